"""`dappr evaluate`: metrics in and out of distribution, from a checkpoint or from saved tables."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import UserError
from ..core.files import is_main_process
from ..core.names import safe_name, table_name
from ..evaluation.item_texts import item_texts_path
from . import shared
from .predict import TableOptions, predict
from .shared import Sidecars

if TYPE_CHECKING:
    import argparse

    from ..evaluation.prediction_table import PredictionTable
    from ..inference.run_data import Role, Wanted

_GIVEN = "tables"  # copies of the given tables, beside `predictions/`, which hold what was predicted here
EPILOG = """examples:
  dappr evaluate runs/tickets                              the run's own test rows and OOD tasks
  dappr evaluate runs/tickets --id new.csv --ood other.csv     columns and labels are those of the run
  dappr evaluate runs/obqa --id obqa --ood arc_c arc_e csqa
  dappr evaluate --id runs/a/predictions/obqa-test.npz --ood runs/a/predictions/csqa-test.npz --out figures/
  dappr evaluate runs/seed0 runs/seed1 --id obqa --ood arc_c --out runs/ensemble       (an ensemble)

Answer metrics (accuracy, NLL, ECE) use each item's own options. OOD detection reads both tasks on the answer letters
of training ("matched"); the published reading, each task on all its own letters, is reported beside it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument(
        "checkpoint", nargs="*", help="folder of a run, or Hub id; several make an ensemble; none needed with tables"
    )
    parser.add_argument(
        "--id",
        "--task",
        help="in-distribution task, file, or prediction table .npz (default: what the run was trained on)",
    )
    parser.add_argument(
        "--ood", nargs="*", help="out-of-distribution tasks, files or tables (default, without --id: those of the run)"
    )
    parser.add_argument("--split", help="split of every task (default: test)")
    parser.add_argument(
        "--out",
        help="folder for results, tables and pictures (default: evaluations/TASKS below the checkpoint, or here "
        "without one; a run's own results.json is replaced only if you name its folder)",
    )
    parser.add_argument(
        "--match-options",
        action="store_true",
        help="leave wrong options out of OOD rows that offer more than the ID rows do, so that their number says "
        "nothing (saved tables stay as they are)",
    )
    shared.add_columns(parser)
    shared.add_metrics(parser)
    shared.add_prediction(parser)
    shared.add_cache(parser)


@dataclass(frozen=True)
class EvaluateOptions:
    """
    Options of `dappr evaluate`.

    Args:
        id (`str`, *optional*):
            The in-distribution task: a name, a file of rows, or a prediction table (`.npz`); by default the rows that
            the run was tested on.
        ood (`Sequence[str]`, *optional*):
            The out-of-distribution tasks, in the same forms; by default, without `id`, those of the run.
        out (`str`, *optional*):
            Folder to write to. By default a folder below `evaluations/` of the checkpoint, named after tasks and
            split, so that the run's own results are not overwritten.
        prediction ([`TableOptions`], *optional*):
            Checkpoints and rows; no checkpoint is needed if all tasks are `.npz` tables.
        score (`str`, *optional*, defaults to `"epistemic"`):
            Which uncertainty ranks items for OOD detection.
        resamples (`int`, *optional*, defaults to 1000):
            Bootstrap resamples; 0 for no intervals.
        allow_nan (`bool`, *optional*, defaults to `False`):
            Accept saved tables with NaN or Inf; such rows rank as most uncertain.
    """

    id: str | None = None
    ood: Sequence[str] | None = None
    out: str | None = None
    prediction: TableOptions = TableOptions()
    score: str = "epistemic"
    resamples: int = 1000
    allow_nan: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> EvaluateOptions:
        """From the parsed command line."""
        return shared.options_from(cls, args, prediction=TableOptions.from_args(args))


def run(args: argparse.Namespace) -> int:
    """Run the verb; returns exit code 0, errors are raised."""
    evaluate(EvaluateOptions.from_args(args))
    return 0


def evaluate(options: EvaluateOptions) -> dict[str, float]:
    """
    Metrics in and out of distribution, from a checkpoint or from saved tables alone; returns them by key.

    Args:
        options ([`EvaluateOptions`]):
            Tasks, checkpoints and settings.
    """
    checkpoints = list(options.prediction.checkpoints)
    sidecars = Sidecars(checkpoints, options.prediction.revision)  # a wrong folder is an error before slow imports
    if options.id is None and not checkpoints:
        raise UserError("Give a checkpoint, or prediction tables (--id TABLE.npz)")
    if options.prediction.match_options and str(options.id).endswith(".npz"):
        raise UserError("--match-options predicts OOD rows anew: name the ID rows, not their table")
    if len(checkpoints) > 1 and options.out is None:
        raise UserError("An ensemble of checkpoints has no folder of its own: say where its results go with --out")
    from ..evaluation.baseline_results import load_baselines
    from ..evaluation.prediction_table import PredictionTable
    from ..evaluation.reporting.run_results import finish

    given = [spec for spec in (options.id, *(options.ood or ())) if spec is not None]
    saved = {spec: PredictionTable.load(spec, options.allow_nan) for spec in given if spec.endswith(".npz")}
    asked = _wanted(options, sidecars)
    names = [_task_name(each, saved[each]) if isinstance(each, str) else each.task.name for each in asked]
    _refuse_twice(asked, names)
    title = " + ".join(checkpoints)
    folder = Path(options.out) if options.out else _folder(title, names, asked[0], options.prediction)
    paths, tables, missing = {}, {}, {}
    for name, each in zip(names, asked, strict=True):
        if isinstance(each, str):
            paths[name], tables[name] = _keep_table(each, saved[each], name, folder), saved[each]
        else:
            missing[name] = each
    if missing:
        made = predict([*missing.values()], folder, options.prediction, sidecars)
        tables |= dict(zip(missing, made, strict=True))
    # The baselines of the run that the ID table comes from; they are left out where its test rows were others.
    home = Path(options.id).parent.parent if options.id in saved else Path(checkpoints[0])
    baselines = load_baselines(home, tables[names[0]])
    return finish(
        folder,
        {name: tables[name] for name in names},
        title or "tables",
        seed=tables[names[0]].meta.get("seed"),
        resamples=options.resamples,
        score=options.score,
        paths=paths,
        baselines=baselines,
    )


def _wanted(options: EvaluateOptions, sidecars: Sidecars) -> list[str | Wanted]:
    """Saved tables by their paths, and the rows that are to be predicted; in distribution first."""
    from ..inference.run_data import RunData

    prediction = options.prediction
    others = list(options.ood or ())
    missing = [spec for spec in (options.id, *others) if spec is None or not spec.endswith(".npz")]
    if missing and not prediction.checkpoints:
        raise UserError(f"{missing[0]!r} is not a prediction table (.npz): give a checkpoint to predict it with")
    data = RunData(*sidecars[prediction.checkpoints[0]]) if missing else None

    def find(spec: str | None, role: Role) -> str | Wanted:
        if spec is not None and spec.endswith(".npz"):
            return spec
        assert data is not None
        return data.find(spec, prediction.columns, role, prediction.split, prediction.limit)

    if options.id is None and data is not None and not (prediction.split or prediction.columns):
        own, ood = data.tests(prediction.limit)
        return [own, *(ood if options.ood is None else (find(spec, "ood") for spec in others))]
    return [find(options.id, "test"), *(find(spec, "ood") for spec in others)]


def _task_name(path: str, table: PredictionTable) -> str:
    """The task that a saved table names; the file's name if it names none."""
    task = table.meta.get("task") or Path(path).stem
    if not isinstance(task, str):
        raise UserError(f"{path}: its meta.task must be a text, not {type(task).__name__}")
    return task


def _keep_table(path: str, table: PredictionTable, task: str, folder: Path) -> str:
    """The place of a given table below the results' folder, where reports look for it; others are copied there."""
    real, home = Path(path).resolve(), folder.resolve()
    if real.is_relative_to(home):
        return real.relative_to(home).as_posix()
    name = f"{_GIVEN}/{table_name(task, table.meta.get('split') or '')}"
    if is_main_process():
        table.save(folder / name)
        if item_texts_path(path).is_file():
            shutil.copyfile(item_texts_path(path), item_texts_path(folder / name))
    return name


def _refuse_twice(asked: Sequence[str | Wanted], names: Sequence[str]) -> None:
    """Results are keyed by task, so two tables of the same task are an error."""
    seen: set[str] = set()
    for each, name in zip(asked, names, strict=True):
        if name in seen:
            shown = repr(each) if isinstance(each, str) else f"{name!r}"
            raise UserError(f"{shown} is given twice: tables are told apart by their task, {name!r}")
        seen.add(name)


def _folder(checkpoint: str, tasks: Sequence[str], first_rows: str | Wanted, prediction: TableOptions) -> Path:
    """The default output folder of an evaluation."""
    split = prediction.split or ("test" if isinstance(first_rows, str) else first_rows.split)
    parent = Path(checkpoint) if checkpoint and Path(checkpoint).is_dir() else Path(".")
    first, *others = (safe_name(task, without="+") for task in tasks)
    label = safe_name("+".join((f"{first}-{safe_name(split, without='+-')}", *others)))
    label += f"-first{prediction.limit}" if prediction.limit else ""
    return parent / "evaluations" / (label + ("-matched-options" if prediction.match_options else ""))
