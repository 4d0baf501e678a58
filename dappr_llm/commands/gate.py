"""`dappr gate`: fit a density of hidden states that says how familiar a row is, and save it beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError
from ..core.files import say
from . import shared
from .calibrate import without_seen
from .shared import Sidecars

if TYPE_CHECKING:
    import argparse

    from ..core.backend import Backend
    from ..decisions.gate import Gate
    from ..inference.gate_fitting import GateRows
    from ..inference.modality import TaskSpec
    from ..inference.run_data import RunData

EPILOG = """examples:
  dappr gate runs/tickets                       the run's own training rows, and those it keeps for calibration
  dappr gate runs/mine --task train.jsonl       an adapter trained elsewhere: rows like those that it was trained on
  dappr gate runs/mine --task train.jsonl --calibration dev.jsonl --method knn --rows 2000"""

METHODS = ("auto", "gaussian", "class_gaussian", "knn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("checkpoint", help="folder of a run")
    parser.add_argument(
        "--task",
        help="rows like those it was trained on: task name, .jsonl/.csv/.parquet file, or Hub dataset id (default: "
        "what the run was trained on)",
    )
    parser.add_argument("--split", help="split of the task (default: train)")
    parser.add_argument(
        "--calibration",
        metavar="TASK",
        help="held-out rows for p-values, on which nothing was chosen (default: those that the run keeps, else a "
        "tenth of the rows)",
    )
    parser.add_argument("--calibration-split", metavar="SPLIT", help="their split (default: calibration)")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="auto",
        help="the density (default: one Gaussian, with a mean per class where labels are fixed)",
    )
    parser.add_argument("--rows", type=shared.whole(100), default=4000, help="training rows read (default: 4000)")
    parser.add_argument(
        "--batch-size", type=shared.whole(most=100_000), default=16, help="rows per batch (default: 16)"
    )
    shared.add_base(parser)
    shared.add_data_root(parser)
    shared.add_columns(parser)


@dataclass(frozen=True)
class GateOptions:
    """
    Options of `dappr gate`.

    Args:
        checkpoint (`str`):
            The checkpoint's folder.
        task, split (*optional*):
            Training rows; by default the run's.
        calibration, calibration_split (*optional*):
            Held-out rows for p-values; by default those that the run keeps, else some of the training rows.
        method (`str`, *optional*, defaults to `"auto"`):
            `"gaussian"`, `"class_gaussian"`, `"knn"` or `"auto"`.
        rows (`int`, *optional*, defaults to 4000):
            Training rows at most.
        base, data_root, batch_size, columns (*optional*):
            As in `TableOptions`.
    """

    checkpoint: str
    task: TaskSpec | None = None
    split: str | None = None
    calibration: TaskSpec | None = None
    calibration_split: str | None = None
    method: str = "auto"
    rows: int = 4000
    base: str | None = None
    data_root: str | None = None
    batch_size: int = 16
    columns: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> GateOptions:
        """From the parsed command line."""
        return shared.options_from(cls, args, columns=shared.columns(args))


def run(args: argparse.Namespace) -> int:
    """Run the verb; returns exit code 0, errors are raised."""
    fit(GateOptions.from_args(args), Sidecars([args.checkpoint]))
    return 0


def fit(options: GateOptions, sidecars: Sidecars | None = None) -> Gate:
    """
    Fit the gate of a checkpoint and write it into its folder.

    Args:
        options ([`GateOptions`]):
            Checkpoint and rows.
        sidecars ([`Sidecars`], *optional*):
            Its sidecar, if it is already loaded.
    """
    from ..core import checkpoint
    from ..decisions.gate import FILE
    from ..inference.gate_fitting import GateRows, calibrated, fit_gate
    from ..inference.loading import load_checkpoint
    from ..inference.run_data import RunData
    from ..inference.table_predictor import PredictionSettings

    if not Path(options.checkpoint).is_dir():
        raise UserError(f"{options.checkpoint} is not a folder of this machine; download the checkpoint first")
    folder, config = (sidecars or Sidecars([options.checkpoint]))[options.checkpoint]
    data = RunData(folder, config)
    rows = _training_rows(data, options)
    run = load_checkpoint(folder, options.base, gate=False)  # the gate that is there may be of older weights
    kept: GateRows | str | None = _calibration_rows(data, options, run.backend)
    if kept is None:
        rows, kept = _divided(rows)
    predictor = run.predictor(PredictionSettings(batch_size=options.batch_size))
    say(f"Fitting on {rows.task} ({rows.split}, {min(len(rows.rows), options.rows):,} of {len(rows.rows):,} rows)")
    gate = fit_gate(predictor, rows, kind=options.method, most=options.rows)
    if isinstance(kept, GateRows):
        say(f"Calibrating on {kept.task} ({kept.split}, {len(kept.rows):,} rows)")
        gate = calibrated(predictor, gate, kept)
    else:
        say(f"No familiarity: {kept}")
    gate = gate.bound(checkpoint.weights_hash(folder))
    gate.save(folder)
    say(f"Gate ({gate.kind}, {len(gate.groups)} kinds of hidden states): {Path(folder) / FILE}")
    return gate


def _training_rows(data: RunData, options: GateOptions) -> GateRows:
    from ..inference.gate_fitting import GateRows
    from ..inference.modality import load_rows

    own = data.recipe.data.train_split if data.recipe is not None and options.task is None else "train"
    wanted = data.find(options.task, options.columns, split=options.split or own)
    rows = load_rows(wanted.task, wanted.split, data.root(options.data_root), labelled=False, seed=data.seed)
    return GateRows(rows, wanted.task.name, wanted.split)


def _calibration_rows(data: RunData, options: GateOptions, backend: Backend) -> GateRows | None:
    """Rows for p-values: those that are named, or kept by the run; without any, `None`."""
    from ..core import checkpoint
    from ..inference.gate_fitting import GateRows
    from ..inference.modality import load_rows

    if options.calibration is None and options.calibration_split is None and options.task is not None:
        return None
    try:
        task = options.calibration if options.calibration is not None else options.task
        wanted = data.find(task, options.columns, "calibration", options.calibration_split)
    except UserError:
        if options.calibration is not None or options.calibration_split is not None:
            raise
        return None
    rows: Any = load_rows(wanted.task, wanted.split, data.root(options.data_root), labelled=False, seed=data.seed)
    rows = without_seen(rows, backend, checkpoint.load_fingerprints(data.folder), wanted.task.name)
    return GateRows(rows, wanted.task.name, wanted.split)


def _divided(rows: GateRows) -> tuple[GateRows, GateRows | str]:
    """Training rows without some that are kept for calibration, and these, or why there are none."""
    from dataclasses import replace

    from ..core.splits import calibration_source, same_text, set_aside

    count = len(rows.rows)
    source = calibration_source(0, count)
    if source is None:
        return rows, f"{count:,} rows are too few to keep some for calibration; name others with --calibration"
    names = getattr(rows.rows, "column_names", ())
    groups = [same_text(text) for text in rows.rows["question"]] if "question" in names else None
    rest, own = set_aside([0] * count, groups, source[1])
    say(
        f"{len(own):,} of {count:,} rows are kept for calibration. Where the model was trained on them, new rows will "
        "look somewhat less familiar than they are: --calibration names rows that it has not seen"
    )
    return replace(rows, rows=rows.rows.select(rest)), replace(
        rows, rows=rows.rows.select(own), split=f"{rows.split} (part)"
    )
