"""`dappr audit`: option-permutation audit of a checkpoint; `evaluation.permutation_audit` computes the metrics."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import checkpoint
from ..core.errors import UserError
from ..core.files import is_main_process, say
from ..core.names import table_name
from . import shared

if TYPE_CHECKING:
    from ..evaluation.prediction_table import PredictionTable

EPILOG = """examples:
  dappr audit runs/quickstart                                     the run's own test rows
  dappr audit runs/quickstart --task everyday
  dappr audit runs/quickstart/audits/everyday-test/audit.npz      the metrics again, without the model"""


@dataclass(frozen=True)
class AuditOptions:
    """
    Options of `dappr audit`.

    Args:
        checkpoint (`str`): Folder of a run, Hub id, or the table (`.npz`) of an earlier audit.
        task (`str`, *optional*): The task; by default what the run was trained on.
        split (`str`, *optional*): Its split; by default the test split.
        out (`str`, *optional*): Folder for `audit.npz` and `audit.json`.
        base, data_root, batch_size, limit: As in [`TableOptions`].
        resamples (`int`, *optional*, defaults to 1000): Bootstrap resamples; 0 for no intervals.
        columns (`Mapping`, *optional*): Columns and labels of own data; by default the run's.
    """

    checkpoint: str
    task: str | None = None
    split: str | None = None
    out: str | None = None
    base: str | None = None
    data_root: str | None = None
    batch_size: int = 16
    limit: int | None = None
    resamples: int = 1000
    columns: Mapping[str, Any] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument("checkpoint", help="folder of a run, Hub id, or a table (.npz) that an earlier audit wrote")
    parser.add_argument(
        "--task", help="task name, .jsonl/.csv/.parquet file, or Hub dataset id (default: what the run was trained on)"
    )
    parser.add_argument("--split", help="split of the task (default: test)")
    parser.add_argument("--out", help="folder for metrics and table (default: audits/TASK-SPLIT below the checkpoint)")
    parser.add_argument(
        "--resamples", type=shared.whole(0, 1_000_000), default=1000, help="bootstrap resamples (default: 1000)"
    )
    shared.add_columns(parser)
    shared.add_prediction(parser)


def run(args: argparse.Namespace) -> int:
    """Run the verb; returns exit code 0, errors are raised."""
    shared.Sidecars([args.checkpoint])  # a wrong folder is an error before slow imports
    audit(shared.options_from(AuditOptions, args, columns=shared.columns(args)))
    return 0


def audit(options: AuditOptions) -> dict[str, float]:
    """Audit a checkpoint on a task, or recompute the metrics of an earlier audit's table; returns results by key."""
    from ..evaluation.permutation_audit import TABLE, evaluate_audit, render_audit, save_audit
    from ..evaluation.prediction_table import PredictionTable

    name = options.checkpoint
    if name.endswith(".npz"):
        table, folder = PredictionTable.load(name), Path(options.out or Path(name).parent)
    else:
        table = _predict(options)
        parent = Path(name) if Path(name).is_dir() else Path(".")
        suffix = f"-first{options.limit}" if options.limit else ""
        default = (
            parent / "audits" / f"{table_name(table.meta['task'], table.meta['split']).removesuffix('.npz')}{suffix}"
        )
        folder = Path(options.out) if options.out else default
    results, intervals = evaluate_audit(table, options.resamples)
    if is_main_process():
        if not name.endswith(".npz"):
            table.save(folder / TABLE)
        save_audit(results, intervals, table, folder, options.resamples)
        say(render_audit(results, intervals, f"{table.meta.get('task')} ({table.meta.get('split')}), all rotations"))
        say(f"Metrics and table: {folder}")
    return results


def _predict(options: AuditOptions) -> PredictionTable:
    """Predictions for every rotation of every item of the task."""
    from ..evaluation.permutation_audit import rotated
    from ..inference.modality import load_rows
    from ..inference.run_data import RunData

    folder, config = checkpoint.load_sidecar(options.checkpoint)
    if config["modality"] != "text":
        raise UserError(
            f"{options.checkpoint} classifies images, which have no options to rotate; audits are for questions"
        )
    if config.get("readout", "letters") != "letters":
        raise UserError(
            f"{options.checkpoint} reads fixed labels from a {config['readout']} readout, which has no letters to "
            "rotate; audits are for answers that are read from letters"
        )
    data = RunData(folder, config)
    wanted = data.find(options.task, options.columns, split=options.split, limit=options.limit)
    task, split = wanted.task, wanted.split
    rows = rotated(load_rows(task, split, data.root(options.data_root), wanted.limit, labelled=False))
    predictor = shared.load_predictor(options.checkpoint, options.base, options.batch_size)
    say(f"Predicting {task.name} ({split}, {len(rows)} rotated rows)")
    meta = {"checkpoint": Path(folder).name, "task_num_choices": getattr(task, "num_choices", None)}
    return predictor.predict_table(rows, task.name, split, **meta)
