"""The walks behind the command line: train, predict, evaluate. Each goes forward only."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..core import checkpoint, manifest
from ..core.errors import UserError
from ..core.files import LOCK, folder_lock, remove_leftovers, write_text
from ..core.recipe import Recipe, load_recipe
from ..evaluation.bootstrap import RESAMPLES, bootstrap
from ..evaluation.evaluators import evaluate_tables
from ..evaluation.item_texts import save_questions
from ..evaluation.prediction_table import PredictionTable
from ..evaluation.reporting.figures import plot_alpha0, plot_reliability
from ..evaluation.reporting.text_tables import render_results
from ..evaluation.results import load_results_file, save_results
from ..inference.batching import RowSet, is_stream
from ..inference.table_cache import as_options, cached_tables, model_key

# Settings that say where and how far, not what: a run may be resumed with other values.
_NOT_IDENTITY = {
    "output_dir",
    "resume_from_checkpoint",
    "logging_steps",
    "disable_tqdm",
    "report_to",
    "save_total_limit",
    "packing",
    "share_prefix",
    "eval_tokens",
    "trunk_cache",
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
    with folder_lock(folder) if is_main_process() else nullcontext():
        if is_main_process() and claim_folder(recipe, folder, resume, overwrite):
            say(f"{folder} holds this run already, finished; use --overwrite to train it again.")
            show_results(folder)
            return folder
        if not is_main_process() and resume is not None and not overwrite and (folder / checkpoint.RESULTS).is_file():
            return folder  # the first process says so, and waits for nobody
        return _train(recipe, folder, resume)


def _train(recipe: Recipe, folder: Path, resume: str | None) -> Path | None:
    # torch and its friends take seconds to import: mistakes in the recipe were found before.
    from ..inference import loading as runs
    from ..training.trainer import DAPPrTrainer

    args = runs.build_args(recipe)
    id_rows, ood_rows = runs.test_tasks(recipe)
    run = runs.build(recipe, args)
    extra = {"auxiliary_dataset": run.auxiliary, "auxiliary_share": recipe.data.auxiliary_share}
    trainer = DAPPrTrainer(run.model, args, run.train, run.validation, method=run.method, backend=run.backend, **extra)
    if args.monitor_ood_rows:
        from ..training.callbacks.ood_monitor import OODMonitor

        sets = {task.name: rows for _, rows, task in ood_rows}
        trainer.add_callback(OODMonitor(trainer, sets, args.monitor_ood_rows))
    if is_main_process():
        write_text(folder / checkpoint.RECIPE, recipe.to_yaml())
    say(f"Training {recipe.method['name']} on {run.tasks['train'].name}, {_size(run.train)} rows, into {folder}")
    if args.num_train_epochs or args.max_steps > 0:  # 0 epochs: test the starting adapter with this method
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


def _size(rows: Any) -> str:
    return "a stream of" if is_stream(rows) else str(len(rows))


def claim_folder(recipe: Recipe, folder: Path, resume: str | None, overwrite: bool) -> bool:
    """
    Make sure that the output folder is free or holds this very run. Returns whether that run is finished.
    """
    remove_leftovers(folder)
    if not folder.exists() or not any(entry.name != LOCK for entry in folder.iterdir()):
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
            folder / manifest.NAME,
            folder / "model.safetensors",
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
    """Predict the ID test rows and every OOD task, all in one pass, and save their tables."""
    named = ([id_rows] if id_rows else []) + ood_rows
    sets = [_row_set(rows, task, split, folder.name) for split, rows, task in named]
    tables = dict(zip((each.task for each in sets), trainer.predict_tables(sets), strict=True))
    if is_main_process():
        for each in sets:
            save_table(tables[each.task], each.rows, folder / checkpoint.TABLES / f"{each.task}-{each.split}.npz")
    return tables


def _row_set(rows: Any, task: Any, split: str, name: str) -> RowSet:
    say(f"Predicting {task.name} ({split}, {len(rows)} rows)")
    choices = getattr(task, "num_choices", None) or None
    return RowSet(rows, task.name, split, {"checkpoint": name, "task_num_choices": choices})


def save_table(table: PredictionTable, rows: Any, path: Path) -> None:
    """Write a table (`.npz` or `.parquet`), and beside it the words of its items, which reports show."""
    table.to_parquet(path) if path.suffix == ".parquet" else table.save(path)
    if "question" in getattr(rows, "column_names", ()):  # images have no words
        save_questions(rows, path)


def finish(
    folder: Path,
    tables: dict[str, PredictionTable],
    title: str,
    seed: int | None = None,
    resamples: int = RESAMPLES,
    score: str = "epistemic",
    paths: dict[str, str] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """
    Results, pictures and the printed table, from prediction tables alone; the first table is the ID one.

    Args:
        folder (`Path`): Where to write.
        tables (`dict[str, PredictionTable]`): By task.
        title (`str`): A line above the printed table.
        seed (`int`, *optional*): The run's, for the record.
        resamples (`int`, *optional*, defaults to 1000): Of the intervals; 0 for none.
        score (`str`, *optional*, defaults to `"epistemic"`): What ranks the items.
        paths (`dict[str, str]`, *optional*): Where each table is kept, if not among the folder's own predictions.
        quiet (`bool`, *optional*, defaults to `False`): Write, but print nothing.
    """
    (id_name, id_table), *ood = tables.items()
    results = evaluate_tables(id_table, dict(ood), score)
    if not is_main_process():
        return results
    _name_nan_rows(tables)
    intervals = bootstrap(id_table, dict(ood), resamples, score=score) if resamples else {}
    own = {name: f"{checkpoint.TABLES}/{name}-{table.meta.get('split')}.npz" for name, table in tables.items()}
    meta = {
        "id": id_name,
        "ood": [name for name, _ in ood],
        "split": id_table.meta.get("split"),
        "method": id_table.meta.get("method"),
        "options": id_table.meta.get("options"),
        "seed": seed,
        "score": score,
        "tables": {**own, **(paths or {})},
        "intervals": {"kind": "bootstrap", "level": 0.95, "resamples": resamples, "seed": 0} if resamples else None,
        "command": " ".join(["dappr", *sys.argv[1:]]),
        "versions": checkpoint.versions(),
    }
    save_results(results, meta, folder / checkpoint.RESULTS, intervals)
    pictures = _draw(folder, id_table, dict(ood))
    if not quiet:
        say("\n" + render_results(results, title, intervals))
        say(f"\nModel, tables and results: {folder}" + (f"\nPictures: {pictures}" if pictures else ""))
    return results


def _name_nan_rows(tables: dict[str, PredictionTable]) -> None:
    for name, table in tables.items():
        if table.nan_rows.any():
            named = ", ".join(table.ids[table.nan_rows][:3])
            say(f"{name}: {table.nan_rows.sum()} rows hold NaN or Inf (first: {named}) and rank as most uncertain")


def _draw(folder: Path, id_table: PredictionTable, ood: dict[str, PredictionTable]) -> str:
    """Draw the pictures; returns where they are, as text."""
    pictures = [folder / "reliability.png", folder / "alpha0.png"]
    try:
        plot_reliability(id_table, pictures[0])
        plot_alpha0(id_table, ood, pictures[1])
    except UserError as error:  # figures are worth more than pictures: say what is missing and go on
        say(f"No pictures: {error}")
        return ""
    return ", ".join(map(str, pictures))


def show_results(folder: Path) -> None:
    """Print the figures of a finished run."""
    content = load_results_file(folder / checkpoint.RESULTS)
    say(render_results(content.results, folder.name, content.intervals))


def load_predictor(names: str | list[str], base: str | None, batch_size: int, **kwargs: Any) -> Any:
    """A trainer around a checkpoint, or around several as an ensemble, used for prediction only."""
    from ..inference.ensemble import AdapterEnsemble
    from ..inference.loading import load_checkpoint
    from ..training.config import DAPPrConfig
    from ..training.trainer import DAPPrTrainer

    names = [names] if isinstance(names, str) else names
    ensemble = AdapterEnsemble.from_pretrained(names, base, **kwargs) if len(names) > 1 else None
    loaded = ensemble.run if ensemble else load_checkpoint(names[0], base, **kwargs)
    args = DAPPrConfig(loaded.folder, per_device_eval_batch_size=batch_size, report_to="none")
    trainer = DAPPrTrainer(loaded.model, args, method=loaded.method, backend=loaded.backend)
    return ensemble.predictor(trainer) if ensemble else trainer


def predict(
    checkpoints: list[str],
    tasks: list[Any],
    split: str,
    out: Path,
    base: str | None = None,
    root: str | None = None,
    batch_size: int = 16,
    limit: int | None = None,
    cache: bool = True,
    **kwargs: Any,
) -> list[PredictionTable]:
    """
    Predictions of a checkpoint, or an ensemble, on one split of each task; rows without answers are welcome.

    All tasks are predicted in one pass, and tables that were computed before are not computed again. With `out`, a
    folder or (for one task) a file (`.npz`, `.parquet`), tables are saved there, and beside them the questions' words.
    """
    from ..inference.modality import find_task, load_rows

    folder, config = checkpoint.load_sidecar(checkpoints[0], kwargs.get("revision"))
    named = [find_task(task, config["modality"]) for task in tasks]
    sets = [
        _row_set(load_rows(task, split, root, limit, labelled=False, plain=True), task, split, Path(folder).name)
        for task in named
    ]
    tables = cached_tables(
        sets,
        load=lambda: load_predictor(checkpoints, base, batch_size, **kwargs),
        model=lambda: model_key(checkpoints, base, **as_options(kwargs)),
        cache=cache,
    )
    is_file = out.suffix in (".npz", ".parquet")
    for each, table in zip(sets, tables, strict=True) if is_main_process() else ():
        save_table(table, each.rows, out if is_file else out / checkpoint.TABLES / f"{each.task}-{split}.npz")
    return tables


def evaluate(
    checkpoints: list[str],
    id_task: str,
    ood_tasks: list[str],
    split: str,
    out: str | None,
    base: str | None = None,
    root: str | None = None,
    batch_size: int = 16,
    limit: int | None = None,
    score: str = "epistemic",
    resamples: int = RESAMPLES,
    allow_nan: bool = False,
    cache: bool = True,
) -> dict[str, Any]:
    """
    Figures in and out of distribution, from a checkpoint or from saved tables alone.

    Args:
        checkpoints (`list[str]`):
            The checkpoint, or several as an ensemble; none is needed when all tasks are `.npz` tables.
        id_task, ood_tasks (`str`, `list[str]`):
            Tasks, files of rows, or prediction tables (`.npz`).
        out (`str`, *optional*):
            Where to write. By default a folder below `evaluations/` of the checkpoint, named after tasks and split,
            so that the run's own results are never replaced by others.
        score, resamples, allow_nan:
            See [`evaluate_tables`], [`bootstrap`] and [`PredictionTable`].
        cache (`bool`, *optional*, defaults to `True`):
            Use tables of the same checkpoint and rows that were computed before; see `prediction_cache`.
    """
    tasks = (id_task, *ood_tasks)
    missing = [task for task in tasks if not task.endswith(".npz")]
    if missing and not checkpoints:
        raise UserError(f"{missing[0]!r} is not a prediction table (.npz): give a checkpoint to predict it with")
    if len(checkpoints) > 1 and out is None:
        raise UserError("An ensemble of checkpoints has no folder of its own: say where its results go with --out")
    name = " + ".join(checkpoints)
    tables = {task: PredictionTable.load(task, allow_nan) for task in tasks if task.endswith(".npz")}
    names = {task: _table_name(task, tables.get(task)) for task in tasks}
    if len(set(names.values())) < len(tasks):
        again = next(task for i, task in enumerate(tasks) if names[task] in [names[other] for other in tasks[:i]])
        raise UserError(f"{again!r} is given twice: tables are told apart by their task, {names[again]!r}")
    folder = Path(out) if out else _evaluation_folder(name, list(names.values()), split, limit)
    if missing:
        made = predict(checkpoints, missing, split, folder, base, root, batch_size, limit, cache)
        predicted = dict(zip(missing, made, strict=True))
    paths = {names[task]: os.path.relpath(task, folder) for task in tables}
    found = {names[task]: tables[task] if task in tables else predicted[task] for task in tasks}
    seed = found[names[id_task]].meta.get("seed")
    return finish(folder, found, name or "tables", seed, resamples, score, paths)


def _table_name(task: str, table: PredictionTable | None) -> str:
    if table is not None:
        return table.meta.get("task") or Path(task).stem
    from ..inference.modality import find_task

    return find_task(task).name


def _evaluation_folder(name: str | None, tasks: list[str], split: str, limit: int | None) -> Path:
    parent = Path(name) if name and Path(name).is_dir() else Path(".")
    label = f"{tasks[0]}-{split}" + "".join(f"+{task}" for task in tasks[1:])
    return parent / "evaluations" / (label[:100] + (f"-first{limit}" if limit else ""))
