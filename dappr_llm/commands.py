"""The walks behind the command line: train, predict, evaluate. Each goes forward only."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from . import checkpoint, report
from .errors import UserError
from .evaluators import evaluate_tables
from .files import write_text
from .predictions import PredictionTable
from .recipe import Recipe, load_recipe

# Settings that say where and how far, not what: a run may be resumed with other values.
_NOT_IDENTITY = {
    "output_dir",
    "resume_from_checkpoint",
    "logging_steps",
    "disable_tqdm",
    "report_to",
    "save_total_limit",
}


def is_main_process() -> bool:
    """Whether this process writes and prints; known from the launcher before any process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def say(text: str) -> None:
    """Print once, not once per process."""
    if is_main_process():
        print(text, flush=True)


def train(recipe: Recipe, resume: str | None = None, overwrite: bool = False) -> Path | None:
    """
    Train a recipe, test it, write tables, results and pictures.

    Args:
        recipe (`Recipe`):
            What to do.
        resume (`str`, *optional*):
            `"auto"`: go on from the last checkpoint in the output folder if there is one; or a checkpoint folder.
        overwrite (`bool`, *optional*, defaults to `False`):
            Remove an older run from the output folder first.

    Returns:
        The folder of the finished run, or `None` if training was interrupted and saved.
    """
    folder = recipe.output_dir
    if is_main_process() and claim_folder(recipe, folder, resume, overwrite):
        say(f"{folder} holds this run already, finished; use --overwrite to train it again.")
        show_results(folder)
        return folder
    # torch and its friends take seconds to import: mistakes in the recipe were found before.
    from . import run as runs
    from .trainer import DAPPrTrainer

    args = runs.build_args(recipe)
    id_rows, ood_rows = runs.test_tasks(recipe)
    run = runs.build(recipe, args)
    trainer = DAPPrTrainer(run.model, args, run.train, run.validation, method=run.method, backend=run.backend)
    if is_main_process():
        write_text(folder / checkpoint.RECIPE, recipe.to_yaml())
    say(f"Training {recipe.method['name']} on {run.tasks['train'].name}, {len(run.train or ())} rows, into {folder}")
    trainer.train(resume_from_checkpoint=resume)
    if trainer.interrupt.stopped:
        say(f"Stopped at step {trainer.state.global_step}, saved in {folder}. Continue with --resume.")
        return None
    trainer.save_model(str(folder))
    tables = predict_tables(trainer, folder, id_rows, ood_rows)
    if id_rows is not None:
        finish(folder, tables, recipe.name, trainer.args.seed)
    if trainer.args.push_to_hub:  # once more, now with results: they make the card
        pushed = trainer.push_to_hub()
        say(f"Published: {pushed.url if pushed else ''}")
    return folder


def claim_folder(recipe: Recipe, folder: Path, resume: str | None, overwrite: bool) -> bool:
    """
    Make sure that the output folder is free or holds this very run. Returns whether that run is finished.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return False
    path = folder / checkpoint.RECIPE
    if not path.is_file():
        raise UserError(f"{folder} is not empty and holds no run of ours; choose another train.output_dir")
    if overwrite:
        for entry in (*folder.glob("checkpoint-*"), folder / checkpoint.TABLES):
            shutil.rmtree(entry, ignore_errors=True)
        for entry in (
            folder / checkpoint.RESULTS,
            folder / "decision.json",
            folder / "adapter_model.safetensors",
            path,
        ):
            entry.unlink(missing_ok=True)
        return False
    difference = _difference(_identity(load_recipe(path)), _identity(recipe))
    if difference:
        raise UserError(
            f"{folder} holds another run ({difference}); choose another train.output_dir, or pass --overwrite"
        )
    if resume is None:
        raise UserError(
            f"{folder} holds this run already: pass --resume to go on with it, or --overwrite to start anew"
        )
    return (folder / checkpoint.RESULTS).is_file()


def _identity(recipe: Recipe) -> dict[str, Any]:
    from dataclasses import asdict

    values = asdict(recipe)
    values["train"] = {k: v for k, v in values["train"].items() if k not in _NOT_IDENTITY}
    values["data"].pop("root")
    return _flat({k: v for k, v in values.items() if k not in ("name", "description")})


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            return f"its {key} is {old.get(key)!r}, now {new.get(key)!r}"
    return ""


def predict_tables(trainer: Any, folder: Path, id_rows: Any, ood_rows: list[Any]) -> dict[str, PredictionTable]:
    """Predict the ID test rows and every OOD task; each table is saved as soon as it is there."""
    tables = {}
    for split, rows, task in ([id_rows] if id_rows else []) + ood_rows:
        say(f"Predicting {task.name} ({split}, {len(rows)} rows)")
        table = trainer.predict_table(
            rows, task.name, split, checkpoint=folder.name, task_num_choices=task.num_choices or None
        )
        tables[task.name] = table
        if is_main_process():
            table.save(folder / checkpoint.TABLES / f"{task.name}-{split}.npz")
    return tables


def finish(folder: Path, tables: dict[str, PredictionTable], title: str, seed: int | None = None) -> dict[str, Any]:
    """Results, pictures and the printed table, from prediction tables alone; the first table is the ID one."""
    (id_name, id_table), *ood = tables.items()
    results = evaluate_tables(id_table, dict(ood))
    if not is_main_process():
        return results
    meta = {
        "id": id_name,
        "ood": [name for name, _ in ood],
        "split": id_table.meta.get("split"),
        "method": id_table.meta.get("method"),
        "options": id_table.meta.get("options"),
        "seed": seed,
        "command": " ".join(["dappr", *sys.argv[1:]]),
        "versions": checkpoint.versions(),
    }
    report.save_results(results, meta, folder / checkpoint.RESULTS)
    pictures = [folder / "reliability.png", folder / "alpha0.png"]
    try:
        report.plot_reliability(id_table, pictures[0])
        report.plot_alpha0(id_table, dict(ood), pictures[1])
    except UserError as error:  # figures are worth more than pictures: say what is missing and go on
        say(f"No pictures: {error}")
        pictures = []
    say("\n" + report.render_results(results, title))
    say(
        f"\nAdapter, tables and results: {folder}"
        + (f"\nPictures: {', '.join(map(str, pictures))}" if pictures else "")
    )
    return results


def show_results(folder: Path) -> None:
    """Print the figures of a finished run."""
    results, _ = report.load_results(folder / checkpoint.RESULTS)
    say(report.render_results(results, folder.name))


def load_predictor(name: str, base: str | None, batch_size: int, **kwargs: Any) -> Any:
    """A trainer around a checkpoint, used for prediction only."""
    from .config import DAPPrConfig
    from .run import load_checkpoint
    from .trainer import DAPPrTrainer

    loaded = load_checkpoint(name, base, **kwargs)
    args = DAPPrConfig(loaded.folder, per_device_eval_batch_size=batch_size, report_to="none")
    return DAPPrTrainer(loaded.model, args, method=loaded.method, backend=loaded.backend)


def predict(trainer: Any, task: Any, split: str, root: str | None, limit: int | None = None) -> PredictionTable:
    """Predictions of a loaded checkpoint on one split of a task; rows without answers are welcome."""
    from .text.tasks import get_task, load_task

    task = get_task(task)
    rows = load_task(task, split, root, limit, labelled=False)
    say(f"Predicting {task.name} ({split}, {len(rows)} rows)")
    name = Path(trainer.args.output_dir).name
    return trainer.predict_table(rows, task.name, split, checkpoint=name, task_num_choices=task.num_choices)


def evaluate(
    name: str | None,
    id_task: str,
    ood_tasks: list[str],
    split: str,
    out: str | None,
    base: str | None = None,
    root: str | None = None,
    batch_size: int = 16,
    limit: int | None = None,
) -> dict[str, Any]:
    """
    Figures in and out of distribution, from a checkpoint or from saved tables alone.

    Args:
        name (`str`, *optional*):
            The checkpoint; not needed when all tasks are `.npz` tables.
        id_task, ood_tasks (`str`, `list[str]`):
            Tasks, files of rows, or prediction tables (`.npz`).
    """
    missing = [task for task in (id_task, *ood_tasks) if not task.endswith(".npz")]
    if missing and name is None:
        raise UserError(f"{missing[0]!r} is not a prediction table (.npz): give a checkpoint to predict it with")
    folder = Path(out or (name if name and Path(name).is_dir() else "."))
    trainer = load_predictor(name, base, batch_size) if missing and name else None
    tables: dict[str, PredictionTable] = {}
    for task in (id_task, *ood_tasks):
        if task.endswith(".npz"):
            table = PredictionTable.load(task)
        else:
            table = predict(trainer, task, split, root, limit)
            if is_main_process():
                table.save(folder / checkpoint.TABLES / f"{table.meta['task']}-{split}.npz")
        key = table.meta.get("task") or Path(task).stem
        if key in tables:
            raise UserError(f"{task!r} is given twice: tables are told apart by their task, {key!r}")
        tables[key] = table
    return finish(folder, tables, name or "tables", next(iter(tables.values())).meta.get("seed"))
