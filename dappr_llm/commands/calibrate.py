"""`dappr calibrate`: fit a decision rule on predictions of held-out rows, and save it beside the weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError
from ..core.files import LOCK, is_main_process, say
from ..core.manifest import PARTIAL
from ..core.names import table_name
from ..decisions.rule import FILE
from . import shared
from .shared import Sidecars

if TYPE_CHECKING:
    import argparse

    from ..core.backend import Backend
    from ..core.recipe import Recipe
    from ..decisions.rule import Decision
    from ..evaluation.prediction_table import PredictionTable
    from ..inference.modality import DatasetRows, TaskSpec

EPILOG = """examples:
  dappr calibrate runs/tickets                             the run's own validation rows
  dappr calibrate runs/quickstart --task everyday --split validation --max-risk 0.05
  dappr calibrate runs/obqa --table runs/obqa/predictions/obqa-validation.npz --alpha 0.05
  dappr calibrate --base org/model --adapter org/lora --method ce --out runs/mine --task dev.jsonl --split dev"""

_TOO_MANY_SEEN = 0.1  # with a larger share of training rows, the calibration set is not held out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("checkpoint", nargs="?", help="folder of a run, or Hub id")
    parser.add_argument(
        "--task",
        help="task name, .jsonl/.csv/.parquet file, or Hub dataset id; never training rows (default: what the run was "
        "trained on)",
    )
    parser.add_argument("--split", help="split of the task (default: validation)")
    parser.add_argument("--table", help="predictions of held-out rows (.npz) instead of a task")
    parser.add_argument("--alpha", type=shared.share, default=0.1, help="error rate of prediction sets (default: 0.1)")
    parser.add_argument(
        "--max-risk", type=shared.share, help="share of wrong answers among those given (default: 0.05)"
    )
    parser.add_argument("--min-coverage", type=shared.share, help="share of questions that must be answered")
    parser.add_argument(
        "--confidence", type=shared.share, default=0.95, help="certainty of the risk bound (default: 0.95)"
    )
    parser.add_argument("--score", default="lac", help="conformal score: lac, aps or possibility (default: lac)")
    parser.add_argument("--abstain-on", default="auto", help="aleatoric, epistemic or auto (default: auto)")
    parser.add_argument("--out", help="write a copy of the checkpoint here instead of changing it")
    parser.add_argument("--adapter", help="an adapter trained elsewhere (folder or Hub id); needs --out")
    parser.add_argument("--method", default="ce", help="with --adapter: method for its logits (default: ce)")
    parser.add_argument(
        "--num-choices",
        type=shared.whole(2, 26),
        default=4,
        help="with --adapter: answer letters it was trained on (default: 4)",
    )
    parser.add_argument("--template", help="with --adapter: its prompt, with {question} and {choices}")
    shared.add_columns(parser)
    shared.add_prediction(parser)


@dataclass(frozen=True)
class RuleOptions:
    """Error rates and bounds of the decision rule; arguments of `dappr_llm.decisions.calibrate.calibrate`."""

    alpha: float = 0.1
    max_risk: float | None = None
    min_coverage: float | None = None
    confidence: float = 0.95
    score: str = "lac"
    abstain_on: str = "auto"


@dataclass(frozen=True)
class CalibrateOptions:
    """
    Options of `dappr calibrate`.

    Args:
        checkpoint (`str`):
            The checkpoint's folder, or a Hub id.
        task (`str` or `Mapping`, *optional*):
            Task with held-out rows, which are predicted; by default what the run was trained on.
        split (`str`, *optional*):
            Split of the task; by default the validation split.
        table (`str`, *optional*):
            Saved predictions (`.npz`) of this checkpoint for held-out rows, instead of a task.
        out (`str`, *optional*):
            Write a copy of the checkpoint to this folder; required for a checkpoint on the Hub.
        rule ([`RuleOptions`], *optional*):
            Error rates and bounds.
        base, data_root, batch_size, limit (*optional*):
            As in [`TableOptions`].
        columns (`Mapping`, *optional*):
            Columns and labels of own data; by default the run's.
    """

    checkpoint: str
    task: TaskSpec | None = None
    split: str | None = None
    table: str | None = None
    out: str | None = None
    rule: RuleOptions = RuleOptions()
    base: str | None = None
    data_root: str | None = None
    batch_size: int = 16
    limit: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_args(cls, args: argparse.Namespace, checkpoint: str, out: str | None) -> CalibrateOptions:
        """From the parsed command line; with `--adapter` the checkpoint is the imported one."""
        rule = shared.options_from(RuleOptions, args)
        columns = shared.columns(args)
        return shared.options_from(cls, args, checkpoint=checkpoint, out=out, rule=rule, columns=columns)


def run(args: argparse.Namespace) -> int:
    """Run the verb; returns exit code 0, errors are raised."""
    sidecars = Sidecars([args.checkpoint] if args.checkpoint else [])
    name, out = args.checkpoint, args.out
    if args.adapter:
        from ..inference.import_adapter import adopt

        if name or not out:
            raise UserError("--adapter makes a new checkpoint: give --out FOLDER, and no other checkpoint")
        prompt = {"template": args.template.replace("\\n", "\n")} if args.template else None
        with publishing(Path(out)) as staged:
            adopt(args.adapter, staged, args.base, args.method, args.num_choices, prompt)
            calibrate_checkpoint(CalibrateOptions.from_args(args, str(staged), None), shown=Path(out))
        return 0
    if not name:
        raise UserError("Give a checkpoint, or an adapter trained elsewhere (--adapter, --base, --out)")
    calibrate_checkpoint(CalibrateOptions.from_args(args, name, out), sidecars)
    return 0


def calibrate_checkpoint(
    options: CalibrateOptions, sidecars: Sidecars | None = None, shown: Path | None = None
) -> Decision:
    """
    Fit the decision rule of a checkpoint and write its `decision.json`.

    Args:
        options ([`CalibrateOptions`]):
            Checkpoint, held-out rows and bounds.
        sidecars ([`Sidecars`], *optional*):
            Sidecar of the checkpoint, if it is already loaded.
        shown (`Path`, *optional*):
            The folder that messages and the table name, if the checkpoint is going to be renamed.
    """
    from ..core import checkpoint
    from ..decisions.calibrate import calibrate
    from ..inference.card import render_decision

    source, config = (sidecars or Sidecars([options.checkpoint]))[options.checkpoint]
    folder = Path(source)
    target = _target(folder, options)
    shown = shown or target or folder
    table = _held_out(folder, config, options, shown.name)
    fitting = table.num_options <= config["num_choices"]
    if not fitting.all():
        say(f"{(~fitting).sum()} rows offer more than {config['num_choices']} options and are left out")
        table = table.select(fitting)
    decision = calibrate(table, **vars(options.rule))
    decision = replace(decision, weights_sha256=checkpoint.weights_hash(folder))
    if is_main_process():
        with publishing(target) if target is not None else nullcontext(folder) as place:
            if target is not None:
                shutil.copytree(folder, place, dirs_exist_ok=True, ignore=_not_copied)
            if options.table is None:
                table.save(place / checkpoint.TABLES / table_name(table.meta["task"], table.meta["split"]))
            decision.save(place)
        say(f"{render_decision(decision)}\n\nDecision rule: {shown / FILE}")
    if decision.abstention["threshold"] is None:
        say(
            f"Warning: no threshold keeps the risk under {decision.abstention['max_risk']:.1%} with "
            f"{options.rule.confidence:.0%} confidence, so the rule always abstains; raise --max-risk, or give more "
            "rows"
        )
    return decision


def _target(source: Path, options: CalibrateOptions) -> Path | None:
    """The folder for a copy of the checkpoint with the rule; `None` if the rule goes into the checkpoint's own."""
    if options.out is None:
        if not Path(options.checkpoint).is_dir():
            name = options.checkpoint
            raise UserError(f"{name} is not a folder of this machine: say where to put a copy of it with --out FOLDER")
        return None
    target = Path(options.out)
    if target.resolve() == source.resolve():
        return None
    _refuse_full(target)  # before anything slow
    return target


def _refuse_full(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not empty; give another folder with --out")


@contextmanager
def publishing(target: Path) -> Iterator[Path]:
    """A hidden folder that is renamed to `target` when all is written; after a failure there is no trace of it."""
    _refuse_full(target)
    staged = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL}")
    try:
        staged.mkdir(parents=True)
        yield staged
        if target.exists():
            target.rmdir()  # fails if another process was faster
        os.rename(staged, target)
    except OSError as error:
        raise UserError(f"Cannot write {target}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _not_copied(folder: str, names: list[str]) -> set[str]:
    """Resumable states, caches, locks, the older rule, and whatever is neither a file nor a folder."""
    patterns = ("checkpoint-*", ".cache", FILE, f"{LOCK}*", f".*{PARTIAL}")
    odd = {name for name in names if not (Path(folder, name).is_file() or Path(folder, name).is_dir())}
    return odd | shutil.ignore_patterns(*patterns)(folder, names)


def _held_out(folder: Path, config: dict[str, Any], options: CalibrateOptions, name: str) -> PredictionTable:
    """Predictions for rows that the checkpoint was not trained on: the given table, or computed here."""
    from ..core import checkpoint
    from ..evaluation.prediction_table import PredictionTable
    from ..inference.run_data import RunData

    data = RunData(folder, config)
    if options.table is not None:
        table = PredictionTable.load(options.table)
        _check_table(table, config, options.table)
        refuse_training_split(data.recipe, folder, table.meta.get("task"), table.meta.get("split"))
        return table
    from ..inference.modality import load_rows

    wanted = data.find(options.task, options.columns, "validation", options.split, options.limit)
    task, split = wanted.task, wanted.split
    refuse_training_split(data.recipe, folder, task.name, split)
    rows = load_rows(task, split, data.root(options.data_root), wanted.limit, seed=data.seed)
    predictor = shared.load_predictor(str(folder), options.base, options.batch_size)
    rows = without_seen(rows, predictor.backend, checkpoint.load_fingerprints(folder), task.name)
    say(f"Predicting {task.name} ({split}, {len(rows)} rows)")
    choices = getattr(task, "num_choices", None)
    return predictor.predict_table(rows, task.name, split, checkpoint=name, task_num_choices=choices)


def refuse_training_split(recipe: Recipe | None, folder: Path, task: str | None, split: str | None) -> None:
    """`UserError` if task and split are those of the run's recipe: a rule fitted on training rows would not hold."""
    if recipe is None or recipe.data.train is None:
        return
    from ..inference.modality import find_task

    data = recipe.data
    own = find_task(data.train, "vision" if recipe.model.backbone else "text")
    if own.name == task and data.train_split == split:
        raise UserError(
            f"{task}, split {split!r}, is what {folder} was trained on: calibrate on rows it has not seen, e.g. "
            f"--split {data.validation_split or 'validation'}"
        )


def without_seen(rows: DatasetRows, backend: Backend, trained: frozenset[str], name: str) -> DatasetRows:
    """
    The rows without those that were trained on; `UserError` if these are more than a tenth.

    Args:
        rows (`Dataset` or `ImageRows`):
            From `modality.load_rows`.
        backend ([`Backend`]):
            Computes the fingerprints of the rows.
        trained (`frozenset[str]`):
            Fingerprints of the training rows, from the checkpoint; empty if it has none.
        name (`str`):
            Name of the task, for messages.
    """
    import numpy as np

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
