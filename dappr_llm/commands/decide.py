"""The walk behind `dappr calibrate`: predict held-out rows, fit a decision rule, keep it beside the adapter."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core import checkpoint
from ..core.errors import UserError
from ..core.recipe import load_recipe
from ..decisions import rule as calibration
from ..evaluation.prediction_table import PredictionTable
from ..inference.card import render_decision
from .walks import is_main_process, load_predictor, say

_TOO_MANY_SEEN = 0.1  # more rows than this met in training: it is not a held-out set with a few duplicates


@dataclass(frozen=True)
class Wishes:
    """What `dappr_llm.decisions.rule.calibrate` is asked for; see there."""

    alpha: float = 0.1
    max_risk: float | None = None
    min_coverage: float | None = None
    confidence: float = 0.95
    score: str = "lac"
    abstain_on: str = "auto"


def calibrate_checkpoint(
    name: str,
    task: Any = None,
    split: str = "validation",
    wishes: Wishes | None = None,
    table: str | None = None,
    out: str | None = None,
    base: str | None = None,
    root: str | None = None,
    batch_size: int = 16,
    limit: int | None = None,
) -> calibration.Decision:
    """
    Fit the decision rule of a checkpoint and write its `decision.json`.

    Args:
        name (`str`):
            The checkpoint's folder, or a Hub id.
        task, split (*optional*):
            Held-out rows to predict.
        wishes (`Wishes`, *optional*):
            Error rates and bounds.
        table (`str`, *optional*):
            Predictions of this checkpoint that are already there (`.npz`), instead of a task.
        out (`str`, *optional*):
            Write a copy of the checkpoint here; needed for one that comes from the Hub.
        base, root, batch_size, limit (*optional*):
            As for `dappr predict`.
    """
    wishes = wishes or Wishes()
    folder = _folder(name, out)
    _, config = checkpoint.load_sidecar(folder)
    if table is not None:
        found = PredictionTable.load(table)
        _check_table(found, config, table)
        refuse_training_split(folder, found.meta.get("task"), found.meta.get("split"))
    elif task is not None:
        found = _predict(folder, task, split, base, root, batch_size, limit)
    else:
        raise UserError("Give held-out rows (--task NAME --split validation) or their predictions (--table FILE.npz)")
    fitting = found.num_options <= config["num_choices"]
    if not fitting.all():
        say(f"{(~fitting).sum()} rows offer more than {config['num_choices']} options and are left out")
        found = found.select(fitting)
    decision = calibration.calibrate(found, **vars(wishes))
    decision = replace(decision, weights_sha256=checkpoint.weights_hash(folder))
    if is_main_process():
        path = decision.save(folder)
        say(f"{render_decision(decision)}\n\nDecision rule: {path}")
    if decision.abstention["threshold"] is None:
        say(
            f"Warning: no threshold keeps the risk under {decision.abstention['max_risk']:.1%} with "
            f"{wishes.confidence:.0%} confidence, so the rule always abstains; raise --max-risk, or give more rows"
        )
    return decision


def _folder(name: str, out: str | None) -> Path:
    source = Path(checkpoint.load_sidecar(name)[0])
    if out is None:
        if not Path(name).is_dir():
            raise UserError(f"{name} is not a folder of this machine: say where to put a copy of it with --out FOLDER")
        return source
    target = Path(out)
    if target.resolve() != source.resolve():
        if target.exists() and any(target.iterdir()):
            raise UserError(f"{target} is not empty; give another folder with --out")
        ignore = shutil.ignore_patterns("checkpoint-*", ".cache", calibration.FILE)
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignore)
    return target


def _predict(
    folder: Path, spec: Any, split: str, base: str | None, root: str | None, batch_size: int, limit: int | None
) -> PredictionTable:
    from ..inference.modality import find_task, load_rows

    task = find_task(spec, checkpoint.load_sidecar(folder)[1]["modality"])
    refuse_training_split(folder, task.name, split)
    recipe = load_recipe(folder / checkpoint.RECIPE) if (folder / checkpoint.RECIPE).is_file() else None
    # Which images validate was decided by the run's seed.
    seed = int(recipe.train.get("seed", 42)) if recipe else 0
    rows = load_rows(task, split, root, limit, seed=seed)
    trainer = load_predictor(str(folder), base, batch_size)
    rows = without_seen(rows, trainer.backend, checkpoint.load_fingerprints(folder), task.name)
    say(f"Predicting {task.name} ({split}, {len(rows)} rows)")
    choices = getattr(task, "num_choices", None)
    table = trainer.predict_table(rows, task.name, split, checkpoint=folder.name, task_num_choices=choices)
    if is_main_process():
        table.save(folder / checkpoint.TABLES / f"{task.name}-{split}.npz")
    return table


def refuse_training_split(folder: Path, task: Any, split: Any) -> None:
    """The recipe beside a checkpoint says what it was trained on: a rule fitted on that would promise too much."""
    path = folder / checkpoint.RECIPE
    if not path.is_file():
        return
    from ..inference.modality import find_task

    recipe = load_recipe(path)
    data = recipe.data
    own = find_task(data.train, "vision" if recipe.model.backbone else "text") if data.train is not None else None
    if own is not None and own.name == task and data.train_split == split:
        raise UserError(
            f"{task}, split {split!r}, is what {folder} was trained on: calibrate on rows it has not seen, e.g. "
            f"--split {data.validation_split or 'validation'}"
        )


def without_seen(rows: Any, backend: Any, trained: frozenset[str], name: str) -> Any:
    """Leave out the rows that were trained on; refuse a set that is mostly made of them."""
    if not trained:
        return rows
    prepared = backend.prepare(rows, name=name)
    seen = np.array([mark in trained for mark in backend.fingerprints(prepared) or [""] * len(prepared)])
    if seen.mean() > _TOO_MANY_SEEN:
        first = prepared["id"][int(seen.argmax())]
        raise UserError(
            f"{seen.sum()} of {len(seen)} rows of {name} (the first is {first!r}) were trained on: calibrate on rows "
            "that the adapter has not seen"
        )
    if seen.any():
        say(f"{seen.sum()} of {len(seen)} rows were trained on and are left out")
    return rows.select(np.flatnonzero(~seen))


def _check_table(table: PredictionTable, config: dict[str, Any], path: str) -> None:
    facts = {"method": config["method"]["name"], "num_choices": config["num_choices"]}
    for key, value in facts.items():
        if table.meta.get(key) != value:
            raise UserError(f"{path} is not this checkpoint's: its {key} is {table.meta.get(key)!r}, not {value!r}")
