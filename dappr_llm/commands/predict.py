"""`dappr predict`: writes a prediction table of a task, or a file of answers with prediction sets and abstentions."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError
from ..core.files import is_main_process, say
from . import shared
from .shared import PipelineOptions, Sidecars

if TYPE_CHECKING:
    import argparse

    from ..evaluation.prediction_table import PredictionTable
    from ..inference.answer_files import AnswerItem, Job
    from ..inference.batching import RowSet
    from ..inference.modality import TaskSpec

EPILOG = """examples:
  dappr predict runs/quickstart --task everyday --split test --out predictions.npz
  dappr predict runs/quickstart --task my_questions.jsonl --out predictions.npz    (answers not needed)
  dappr predict runs/seed0 runs/seed1 runs/seed2 --task everyday --out ensemble.npz    (one base model, 3 adapters)
  dappr predict runs/quickstart --task my_questions.csv --out answers.parquet    (killed? the same line goes on)
  dappr predict runs/quickstart --task shards/ --out answers/    (a folder of Parquet files, each to one of its name)

An .npz is a prediction table for `dappr evaluate`; .jsonl, .csv and .parquet hold answers with calibrated
probabilities, prediction sets and abstentions."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("checkpoint", nargs="+", help="folder of a run, or Hub id; several make an ensemble")
    parser.add_argument("--task", required=True, help="task name, .jsonl/.csv/.parquet file, or Hub dataset id")
    parser.add_argument("--split", default="test", help="split of the task (default: test)")
    parser.add_argument("--out", required=True, help="where to write: a table .npz, or answers .jsonl/.csv/.parquet")
    parser.add_argument("--question", help="own data: question column")
    parser.add_argument("--choices", nargs="+", help="own data: choices column, or one column per option")
    parser.add_argument("--answer", help="own data: answer column")
    parser.add_argument("--options", nargs="+", help="own data: the same options for every row (text classification)")
    parser.add_argument("--overwrite", action="store_true", help="start anew even if part of another job is there")
    shared.add_pipeline(parser)
    shared.add_prediction(parser)
    shared.add_cache(parser)


@dataclass(frozen=True)
class TableOptions:
    """
    Options of predicting tables: checkpoints, and the rows of each task.

    Args:
        checkpoints (`Sequence[str]`):
            Folders of runs, or Hub ids; several make an ensemble.
        split (`str`, *optional*, defaults to `"test"`):
            The split of every task.
        base (`str`, *optional*):
            Name or path of the base model, if not the one that the checkpoint names.
        data_root (`str`, *optional*):
            Folder with local copies of Hub datasets.
        batch_size (`int`, *optional*, defaults to 16):
            Prompts per batch.
        limit (`int`, *optional*):
            Use only the first rows of every task.
        cache (`bool`, *optional*, defaults to `True`):
            Reuse saved tables of the same checkpoint and rows; see `inference.table_cache`.
        revision (`str`, *optional*):
            Commit, branch or tag of a checkpoint on the Hub.
        load_in_4bit (`bool`, *optional*, defaults to `False`):
            Quantise the base model.
    """

    checkpoints: Sequence[str] = ()
    split: str = "test"
    base: str | None = None
    data_root: str | None = None
    batch_size: int = 16
    limit: int | None = None
    cache: bool = True
    revision: str | None = None
    load_in_4bit: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> TableOptions:
        """From the arguments of `dappr predict`, or of `dappr evaluate`, which has no loading options but `--base`."""
        return shared.options_from(
            cls,
            args,
            checkpoints=args.checkpoint,
            cache=not args.no_cache,
            revision=getattr(args, "revision", None),
            load_in_4bit=getattr(args, "load_in_4bit", False),
        )


@dataclass(frozen=True)
class AnswerOptions:
    """
    Options of writing answers.

    Args:
        pipeline ([`PipelineOptions`]):
            The pipeline to load.
        out (`str`):
            The output file, or the output folder for several input files.
        split (`str`, *optional*, defaults to `"test"`):
            The split of the task.
        data_root (`str`, *optional*):
            Folder with local copies of Hub datasets.
        limit (`int`, *optional*):
            Answer only the first rows.
        overwrite (`bool`, *optional*, defaults to `False`):
            Start from the first row, and discard what another job left behind.
    """

    pipeline: PipelineOptions
    out: str
    split: str = "test"
    data_root: str | None = None
    limit: int | None = None
    overwrite: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> AnswerOptions:
        """From the parsed command line, with one checkpoint."""
        (name,) = args.checkpoint
        pipeline = PipelineOptions.from_args(args, name)
        return shared.options_from(cls, args, pipeline=pipeline)


def run(args: argparse.Namespace) -> int:
    """Write a table for `--out NAME.npz`, otherwise answers; returns exit code 0, errors are raised."""
    sidecars = Sidecars(args.checkpoint, args.revision)
    columns = _columns(args)
    files = find_shards(args.task, args.out)
    if len(args.checkpoint) > 1 and files:
        raise UserError("An ensemble of checkpoints writes a table: give one file as --task, and --out NAME.npz")
    if files:
        count = answer_shards(files, columns, AnswerOptions.from_args(args))
        say(f"{count} answers written to {args.out} ({len(files)} files)")
        return 0
    task = {"path": args.task, **columns} if columns else args.task
    if args.out.endswith(".npz"):
        (table,) = predict([task], Path(args.out), TableOptions.from_args(args), sidecars)
        say(f"{len(table)} predictions written to {args.out}")
        return 0
    from ..inference.answer_files import check_name

    check_name(args.out)
    if len(args.checkpoint) > 1:
        raise UserError("An ensemble of checkpoints writes a table: give --out NAME.npz")
    count = answer(task, AnswerOptions.from_args(args))
    say(f"{count} answers written to {args.out}")
    return 0


def _columns(args: argparse.Namespace) -> dict[str, Any]:
    """Column names of the user's own data, with the keys of a task mapping in a recipe."""
    columns = {"question": args.question, "choices": args.choices, "answer": args.answer, "options": args.options}
    given = {key: value for key, value in columns.items() if value}
    if len(given.get("choices", ())) == 1:
        given["choices"] = given["choices"][0]
    return given


def predict(
    tasks: Sequence[TaskSpec], out: Path, options: TableOptions, sidecars: Sidecars | None = None
) -> list[PredictionTable]:
    """
    Predict one split of each task with a checkpoint, or with several as an ensemble; rows need no labels.

    All tasks are predicted in one pass; tables in the cache are not predicted again.

    Args:
        tasks (`Sequence`):
            Names, files, mappings, or declarations from `inference.modality.find_task`.
        out (`Path`):
            A folder, or for one task a file (`.npz`, `.parquet`). Item texts are saved beside the tables.
        options ([`TableOptions`]):
            Checkpoints and rows.
        sidecars ([`Sidecars`], *optional*):
            Sidecars of the checkpoints, if they are already loaded.
    """
    from ..inference.batching import RowSet
    from ..inference.modality import find_task, load_rows
    from ..inference.table_cache import as_options, cached_tables, model_key

    names, split = list(options.checkpoints), options.split
    sidecars = sidecars or Sidecars(names, options.revision)
    folder, config = sidecars[names[0]]
    sets = []
    for task in (find_task(spec, config["modality"], config.get("data_revisions")) for spec in tasks):
        rows = load_rows(task, split, options.data_root, options.limit, labelled=False, plain=True)
        say(f"Predicting {task.name} ({split}, {len(rows)} rows)")
        sets.append(RowSet.of_task(rows, task, split, Path(folder).name))
    quantization = {"load_in_4bit": True} if options.load_in_4bit else None
    loading = {"revision": options.revision, "quantization": quantization}
    tables = cached_tables(
        sets,
        load=lambda: shared.load_predictor(names, options.base, options.batch_size, **loading),
        model=lambda: model_key(names, options.base, [sidecars[name] for name in names], **as_options(loading)),
        cache=options.cache,
    )
    save_tables(sets, tables, out)
    return tables


def save_tables(sets: Sequence[RowSet], tables: Sequence[PredictionTable], out: Path) -> None:
    """
    Write prediction tables with their item texts; on rank 0 only.

    Args:
        sets, tables:
            Row sets and their tables, in the same order.
        out (`Path`):
            A run's folder, or for one table a file (`.npz`, `.parquet`).
    """
    from ..core import checkpoint
    from ..core.names import table_name
    from ..evaluation.reporting.run_results import save_table

    is_file = out.suffix in (".npz", ".parquet")
    for each, table in zip(sets, tables, strict=True) if is_main_process() else ():
        path = out if is_file else out / checkpoint.TABLES / table_name(each.task, each.split)
        save_table(table, each.rows, path)


def answer(task: TaskSpec, options: AnswerOptions) -> int:
    """Answer one split of a task and write the answers to a file; returns the number of rows."""
    from ..inference.answer_files import describe, predict_file
    from ..inference.modality import find_task, iter_items

    pipe = shared.load_pipeline(options.pipeline)
    backend = pipe.run.backend
    found = find_task(task, backend.modality, backend.data_revisions)
    items = islice(iter_items(found, options.split, options.data_root, backend), options.limit)
    job = describe(pipe, task, options.split, options.limit, options.data_root)
    return predict_file(pipe, items, options.out, job, options.overwrite)


def find_shards(task: str, out: str) -> list[Path]:
    """The input files if the task is a folder or a glob pattern (`shards/*.parquet`); empty for any other task."""
    is_pattern = any(mark in task for mark in "*?[")
    if not is_pattern and not Path(task).is_dir():
        return []
    found = sorted(Path(path) for path in glob.glob(task)) if is_pattern else sorted(Path(task).iterdir())
    files = [path for path in found if path.suffix in (".parquet", ".jsonl", ".csv") and not path.name.startswith(".")]
    if not files:
        raise UserError(f"{task}: no .parquet, .jsonl or .csv files there")
    if Path(out).suffix or Path(out).is_file():
        raise UserError(f"--out {out}: a folder of files is answered into a folder; give one without an ending")
    if Path(out).resolve() in {path.parent.resolve() for path in files}:
        raise UserError(f"--out {out}: that folder holds the questions; give another")
    stems = [path.stem for path in files]
    if len(set(stems)) < len(stems):
        raise UserError(f"{task}: two files have the same name but for their ending or folder; keep one of them")
    return files


def answer_shards(files: Sequence[Path], columns: dict[str, Any], options: AnswerOptions) -> int:
    """
    Answer several input files, each into its own file of the output folder, with constant memory; can be resumed.

    Args:
        files (`Sequence[Path]`):
            From [`find_shards`].
        columns (`dict`):
            Column names of the user's own data.
        options ([`AnswerOptions`]):
            Options; `limit` counts rows over all files.

    Returns:
        `int`: Number of rows answered.
    """
    from ..inference.answer_files import describe, predict_shards
    from ..inference.modality import count_rows, find_task, iter_items

    pipe = shared.load_pipeline(options.pipeline)
    backend = pipe.run.backend

    def shards() -> Iterator[tuple[str, Iterable[AnswerItem], Job]]:
        left = options.limit
        for path in files:
            if left is not None and left <= 0:
                return
            spec = {"path": str(path), **columns}
            job = describe(pipe, spec, options.split, left, options.data_root)
            task = find_task(spec, backend.modality)
            yield path.stem, islice(iter_items(task, options.split, options.data_root, backend), left), job
            left = None if left is None else left - count_rows(path, left)

    return predict_shards(pipe, shards(), options.out, overwrite=options.overwrite)
