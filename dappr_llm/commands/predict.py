"""`dappr predict`: writes a prediction table of a task, or a file of answers with prediction sets and abstentions."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    from ..inference.answer_files import Answerable, Job
    from ..inference.batching import RowSet
    from ..inference.modality import TaskSpec
    from ..inference.run_data import RunData, Wanted

logger = logging.getLogger(__name__)

EPILOG = """examples:
  dappr predict runs/tickets                             the run's own test rows, into runs/tickets/answers/
  dappr predict runs/tickets --task new.csv --out answered.csv     columns and labels are those of the run
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
    parser.add_argument(
        "--task", help="task name, .jsonl/.csv/.parquet file, or Hub dataset id (default: what the run was trained on)"
    )
    parser.add_argument("--split", help="split of the task (default: test)")
    parser.add_argument(
        "--out",
        help="where to write: a table .npz, or answers .jsonl/.csv/.parquet (default: answers/TASK-SPLIT.csv below "
        "the checkpoint)",
    )
    parser.add_argument("--overwrite", action="store_true", help="start anew even if another job's answers are there")
    shared.add_columns(parser)
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
        split (`str`, *optional*):
            The split of every task; by default the test split.
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
        gate (`bool`, *optional*, defaults to `True`):
            Add density and familiarity, if the checkpoint has a gate.
        columns (`Mapping`, *optional*):
            Columns and labels of own data; by default the run's.
        match_options (`bool`, *optional*, defaults to `False`):
            Leave wrong options out of rows that offer more than those of the first task.
    """

    checkpoints: Sequence[str] = ()
    split: str | None = None
    base: str | None = None
    data_root: str | None = None
    batch_size: int = 16
    limit: int | None = None
    cache: bool = True
    revision: str | None = None
    load_in_4bit: bool = False
    gate: bool = True
    columns: Mapping[str, Any] = field(default_factory=dict)
    match_options: bool = False

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
            gate=not getattr(args, "no_gate", False),
            columns=shared.columns(args),
            match_options=getattr(args, "match_options", False),
        )


@dataclass(frozen=True)
class AnswerOptions:
    """
    Options of writing answers.

    Args:
        pipeline ([`PipelineOptions`]):
            The pipeline to load.
        out (`str`, *optional*):
            The output file, or the output folder for several input files; by default below the checkpoint.
        split (`str`, *optional*):
            The split of the task; by default the test split.
        data_root (`str`, *optional*):
            Folder with local copies of Hub datasets.
        limit (`int`, *optional*):
            Answer only the first rows.
        overwrite (`bool`, *optional*, defaults to `False`):
            Start from the first row, and discard what another job left behind.
        columns (`Mapping`, *optional*):
            Columns and labels of own data; by default the run's.
    """

    pipeline: PipelineOptions
    out: str | None = None
    split: str | None = None
    data_root: str | None = None
    limit: int | None = None
    overwrite: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> AnswerOptions:
        """From the parsed command line, with one checkpoint."""
        (name,) = args.checkpoint
        pipeline = PipelineOptions.from_args(args, name)
        return shared.options_from(cls, args, pipeline=pipeline, columns=shared.columns(args))


def run(args: argparse.Namespace) -> int:
    """Write a table for `--out NAME.npz`, otherwise answers; returns exit code 0, errors are raised."""
    sidecars = Sidecars(args.checkpoint, args.revision)
    ensemble = len(args.checkpoint) > 1
    if args.out is None and (ensemble or not Path(args.checkpoint[0]).is_dir()):
        raise UserError("Say where to write with --out: a table .npz, or answers .jsonl, .csv or .parquet")
    files = find_shards(args.task, args.out) if args.task else []
    if ensemble and (files or not args.out.endswith(".npz")):
        raise UserError("An ensemble of checkpoints writes a table: give one file as --task, and --out NAME.npz")
    if files:
        count = answer_shards(files, AnswerOptions.from_args(args))
        say(f"{count} answers written to {args.out} ({len(files)} files)")
        return 0
    if args.out and args.out.endswith(".npz"):
        (table,) = predict([args.task], Path(args.out), TableOptions.from_args(args), sidecars, args.overwrite)
        say(f"{len(table)} predictions written to {args.out}")
        return 0
    from ..inference.answer_files import check_name

    if args.out:
        check_name(args.out)
    count, out = answer(args.task, AnswerOptions.from_args(args), sidecars)
    say(f"{count} answers written to {out}")
    return 0


def predict(
    tasks: Sequence[TaskSpec | Wanted | None],
    out: Path,
    options: TableOptions,
    sidecars: Sidecars | None = None,
    overwrite: bool = True,
) -> list[PredictionTable]:
    """
    Predict one split of each task with a checkpoint, or with several as an ensemble; rows need no labels.

    All tasks are predicted in one pass; tables in the cache are not predicted again.

    Args:
        tasks (`Sequence`):
            Names, files, mappings, declarations from `inference.modality.find_task`, or rows from `RunData.find`;
            `None` for what the run was trained on.
        out (`Path`):
            A folder, or for one task a file (`.npz`, `.parquet`). Item texts are saved beside the tables.
        options ([`TableOptions`]):
            Checkpoints and rows.
        sidecars ([`Sidecars`], *optional*):
            Sidecars of the checkpoints, if they are already loaded.
        overwrite (`bool`, *optional*, defaults to `True`):
            Replace a table of other rows at `out`, if that is a file.
    """
    from ..inference.batching import RowSet
    from ..inference.modality import load_rows
    from ..inference.run_data import RunData, Wanted
    from ..inference.table_cache import as_options, cached_tables, model_key

    names = list(options.checkpoints)
    sidecars = sidecars or Sidecars(names, options.revision)
    data = RunData(*sidecars[names[0]])
    sets = []
    for each in tasks:
        if isinstance(each, Wanted):
            wanted = each
        else:
            wanted = data.find(each, options.columns, split=options.split, limit=options.limit)
        task, split, root = wanted.task, wanted.split, data.root(options.data_root)
        if out.suffix and not overwrite:
            _refuse_other(out, task.name, split)
        rows = load_rows(task, split, root, wanted.limit, labelled=False, seed=data.seed, plain=True)
        data.say_trained(wanted, rows)
        say(f"Predicting {task.name} ({split}, {len(rows)} rows)")
        sets.append(RowSet.of_task(rows, task, split, data.folder.name))
    sets = _matched(sets) if options.match_options else sets
    quantization = {"load_in_4bit": True} if options.load_in_4bit else None
    loading: dict[str, Any] = {"revision": options.revision, "quantization": quantization}
    loading |= {} if options.gate else {"gate": False}
    tables = cached_tables(
        sets,
        load=lambda: shared.load_predictor(names, options.base, options.batch_size, **loading),
        model=lambda: model_key(names, options.base, [sidecars[name] for name in names], **as_options(loading)),
        cache=options.cache,
    )
    _add_text_distances(data, sets, tables, options.data_root)
    save_tables(sets, tables, out)
    return tables


def _matched(sets: Sequence[RowSet]) -> list[RowSet]:
    """Row sets without those wrong options that the rows of the first one do not have."""
    from ..inference.modality import with_matched_options

    found = [sets[0]]
    for each in sets[1:]:
        rows = with_matched_options(each.rows, sets[0].rows)
        if rows is not each.rows and rows != each.rows:
            most = max(len(options) for options in rows["options"])
            each = replace(each, rows=rows, meta={**each.meta, "task_num_choices": most, "options_left_out": True})
        found.append(each)
    return found


def _add_text_distances(
    data: RunData, sets: Sequence[RowSet], tables: Sequence[PredictionTable], root: str | None
) -> None:
    """How far ID and OOD items are from the run's training rows, where these can still be read."""
    from ..evaluation.ood_baselines import add_text_distances
    from ..inference.modality import load_rows

    if len(sets) < 2 or data.recipe is None or data.own is None:
        return
    if "question" not in getattr(sets[0].rows, "column_names", ()):
        return
    own = data.recipe.data
    try:
        place = data.root(root)
        train = load_rows(data.own, own.train_split, place, own.max_train_samples, labelled=False, plain=True)
    except UserError as error:
        logger.info(f"The training rows cannot be read ({error}): texts are compared with half of the ID items")
        return
    add_text_distances(train, tables, [each.rows for each in sets])


def _refuse_other(out: Path, task: str, split: str) -> None:
    """A finished table of other rows is not replaced unasked."""
    from ..evaluation.prediction_table import PredictionTable

    if not out.exists():
        return
    meta = PredictionTable.load(out, allow_nan=True).meta
    if (meta.get("task"), meta.get("split")) != (task, split):
        raise UserError(
            f"{out} holds predictions of {meta.get('task')} ({meta.get('split')}), not of {task} ({split}); choose "
            "another --out, or pass --overwrite"
        )


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


def answer(task: TaskSpec | None, options: AnswerOptions, sidecars: Sidecars | None = None) -> tuple[int, str]:
    """Answer one split of a task (`None`: the run's own) into a file; returns the number of rows and the file."""
    from ..core.names import table_name
    from ..inference.answer_files import describe, predict_file
    from ..inference.modality import iter_items
    from ..inference.run_data import RunData

    name = options.pipeline.checkpoint
    data = RunData(*(sidecars or Sidecars([name], options.pipeline.revision))[name])
    wanted = data.find(task, options.columns, split=options.split, limit=options.limit)
    root = data.root(options.data_root)
    default = data.folder / "answers" / f"{table_name(wanted.task.name, wanted.split).removesuffix('.npz')}.csv"
    out = options.out or str(default)
    pipe = shared.load_pipeline(options.pipeline)
    items = islice(iter_items(wanted.task, wanted.split, root, pipe.run.backend, data.seed), options.limit)
    return predict_file(
        pipe, items, out, describe(pipe, wanted.task, wanted.split, options.limit, root), options.overwrite
    ), out


def find_shards(task: str, out: str | None) -> list[Path]:
    """The input files if the task is a folder or a glob pattern (`shards/*.parquet`); empty for any other task."""
    is_pattern = any(mark in task for mark in "*?[")
    if not is_pattern and not Path(task).is_dir():
        return []
    found = sorted(Path(path) for path in glob.glob(task)) if is_pattern else sorted(Path(task).iterdir())
    files = [path for path in found if path.suffix in (".parquet", ".jsonl", ".csv") and not path.name.startswith(".")]
    if not files:
        raise UserError(f"{task}: no .parquet, .jsonl or .csv files there")
    if out is None:
        raise UserError(f"{task} is answered into a folder of as many files: name it with --out")
    if Path(out).suffix or Path(out).is_file():
        raise UserError(f"--out {out}: a folder of files is answered into a folder; give one without an ending")
    if Path(out).resolve() in {path.parent.resolve() for path in files}:
        raise UserError(f"--out {out}: that folder holds the questions; give another")
    stems = [path.stem for path in files]
    if len(set(stems)) < len(stems):
        raise UserError(f"{task}: two files have the same name but for their ending or folder; keep one of them")
    return files


def answer_shards(files: Sequence[Path], options: AnswerOptions) -> int:
    """
    Answer several input files, each into its own file of the output folder, with constant memory; can be resumed.

    Args:
        files (`Sequence[Path]`):
            From [`find_shards`].
        options ([`AnswerOptions`]):
            Options; `limit` counts rows over all files.

    Returns:
        `int`: Number of rows answered.
    """
    from ..inference.answer_files import describe, predict_shards
    from ..inference.modality import count_rows, iter_items
    from ..inference.run_data import RunData

    pipe = shared.load_pipeline(options.pipeline)
    backend = pipe.run.backend
    data = RunData(*Sidecars([options.pipeline.checkpoint], options.pipeline.revision)[options.pipeline.checkpoint])

    def shards() -> Iterator[tuple[str, Iterable[Answerable], Job]]:
        left = options.limit
        for path in files:
            if left is not None and left <= 0:
                return
            wanted = data.find(str(path), options.columns, split=options.split, limit=left)
            items = iter_items(wanted.task, wanted.split, options.data_root, backend)
            yield path.stem, islice(items, left), describe(pipe, wanted.task, wanted.split, left, options.data_root)
            left = None if left is None else left - count_rows(path, left)

    assert options.out is not None
    return predict_shards(pipe, shards(), options.out, overwrite=options.overwrite)
