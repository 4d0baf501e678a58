"""
CIFAR-10-C: AUPR of clean against corrupted test images by aleatoric uncertainty, mean over corruptions per severity.

    python scripts/shift_table.py runs/cifar10-table --data-root data --rows ce edl dappr
    python scripts/shift_table.py runs/cifar10-dappr --severities 1 5 --corruptions fog snow

Prediction tables are saved in `shift/` inside the run's folder and reused.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scriptlib import arguments

from dappr_llm.commands.shared import load_predictor
from dappr_llm.evaluation.paper_analyses import render_shift, shift_table
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.evaluation.runs import find_runs
from dappr_llm.inference.modality import find_task, load_rows
from dappr_llm.vision.data.catalogue import CORRUPTIONS, SEVERITIES


def tables_of(folder: Path, names: list[str], args: argparse.Namespace) -> dict[str, PredictionTable]:
    """Prediction tables of a run for the corrupted test splits, loaded or predicted."""
    found = {}
    predictor = None
    for name in names:
        path = folder / "shift" / f"{name.replace('/', '_')}.npz"
        if not path.is_file():
            predictor = predictor or load_predictor(str(folder), None, args.batch_size)
            task = find_task(name, "vision")
            rows = load_rows(task, "test", args.data_root, args.limit)
            predictor.predict_table(rows, task.name, "test", checkpoint=folder.name).save(path)
        found[path.stem] = PredictionTable.load(path)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("sweep", help="folder of a sweep on CIFAR-10, or of one run")
    parser.add_argument("--data-root", help="folder with CIFAR-10-C")
    parser.add_argument("--rows", nargs="+", help="only these rows of the sweep")
    parser.add_argument("--corruptions", nargs="+", default=list(CORRUPTIONS), choices=CORRUPTIONS)
    parser.add_argument("--severities", nargs="+", type=int, default=list(SEVERITIES), choices=SEVERITIES)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--limit", type=int, help="use only the first images of each set")
    args = parser.parse_args()
    names = [f"cifar10_c/{corruption}/{severity}" for severity in args.severities for corruption in args.corruptions]
    rows = {}
    for run in find_runs(args.sweep):
        if args.rows and run.row not in args.rows:
            continue
        rows[f"{run.row}, seed {run.seed}"] = shift_table(run.id_table, tables_of(run.folder, names, args))
    for key in ("aupr", "aupr_epistemic", "accuracy"):
        print(f"\n{key}\n\n{render_shift(rows, key)}")


if __name__ == "__main__":
    main()
