"""
Whether familiarity is what it says: uniform on new rows of the same distribution, and 5 % refused at 5 %.

    python scripts/gate_validity.py runs/quickstart

Draws new rows of the run's task (of `everyday`: any number; of other tasks: the calibration and test rows together),
computes their densities once, and splits them again and again into calibration rows and fresh rows. Of each split: the
two-sample Kolmogorov distance of their p-values within 1.36 * sqrt(1/m + 1/n)? the share of fresh rows that is refused
at 5 %? Wanted: at least 93 of 100, and 5 +- 1 % on average over 200.

With `--predictions` the densities of saved tables are used, which all must be of one distribution.
"""

from __future__ import annotations

import numpy as np
from scriptlib import arguments

from dappr_llm.decisions.familiarity import Familiarity
from dappr_llm.evaluation.prediction_table import PredictionTable


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("run", nargs="?", help="folder of a run with a gate")
    parser.add_argument("--predictions", nargs="+", help="tables with density and lengths, instead of a run")
    parser.add_argument("--rows", type=int, default=2400, help="new rows of everyday")
    parser.add_argument("--level", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    densities, lengths = from_tables(args.predictions) if args.predictions else from_run(args.run, args.rows)
    draw = np.random.default_rng(args.seed)
    inside = np.mean([within(densities, lengths, draw) for _ in range(100)])
    refused = [share_refused(densities, lengths, args.level, draw) for _ in range(200)]
    print(f"{len(densities):,} rows, half of them calibrate")
    print(f"Kolmogorov distance within 1.36 * sqrt(1/m + 1/n): {100 * inside:.0f} of 100 splits")
    print(
        f"Refused at {args.level:.0%}: {np.mean(refused):.2%} on average over {len(refused)} splits "
        f"(from {np.min(refused):.2%} to {np.max(refused):.2%})"
    )


def halves(
    densities: np.ndarray, lengths: np.ndarray, draw: np.random.Generator
) -> tuple[Familiarity, np.ndarray, np.ndarray]:
    """Familiarity of one half, and p-values of this half and of the other."""
    order = draw.permutation(len(densities))
    half = len(order) // 2
    known, fresh = order[:half], order[half:]
    fitted = Familiarity.fit(densities[known], lengths[known])
    return (
        fitted,
        fitted.p_values(densities[known], lengths[known]),
        fitted.p_values(densities[fresh], lengths[fresh]),
    )


def within(densities: np.ndarray, lengths: np.ndarray, draw: np.random.Generator) -> bool:
    """Whether a split's p-values lie within the Kolmogorov distance of its calibration rows' own."""
    _, own, fresh = halves(densities, lengths, draw)
    grid = np.unique(np.concatenate([own, fresh]))
    steps = [np.searchsorted(np.sort(part), grid, side="right") / len(part) for part in (own, fresh)]
    return bool(np.abs(steps[0] - steps[1]).max() <= 1.36 * np.sqrt(1 / len(own) + 1 / len(fresh)))


def share_refused(densities: np.ndarray, lengths: np.ndarray, level: float, draw: np.random.Generator) -> float:
    """The share of fresh rows with a familiarity of at most the level."""
    return float((halves(densities, lengths, draw)[2] <= level).mean())


def from_tables(paths: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Densities and lengths of saved tables."""
    tables = [PredictionTable.load(path) for path in paths]
    for path, table in zip(paths, tables, strict=True):
        if table.density is None:
            raise SystemExit(f"{path} has no densities: predict it with a gate")
    lengths = [np.zeros(len(table)) if table.lengths is None else table.lengths for table in tables]
    return np.concatenate([table.density for table in tables]), np.concatenate(lengths)  # type: ignore[misc]


def from_run(folder: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Densities and content lengths of new rows of a run's task."""
    from dappr_llm import load_checkpoint
    from dappr_llm.core import checkpoint
    from dappr_llm.inference.modality import load_rows
    from dappr_llm.inference.run_data import RunData
    from dappr_llm.text.data.everyday import generate

    predictor = load_checkpoint(folder).predictor()
    if predictor.gate is None:
        raise SystemExit(f"{folder} has no gate: run `dappr gate {folder}`")
    data = RunData(*checkpoint.load_sidecar(folder))
    if data.own is not None and data.own.name == "everyday":
        parts = [generate("everyday", "test", rows)]
    else:
        found = [data.find(role=role) for role in ("calibration", "test")]  # type: ignore[arg-type]
        parts = [load_rows(each.task, each.split, data.root(None), seed=data.seed) for each in found]
    prepared = [predictor.backend.prepare(part, labelled=False) for part in parts]
    densities = [predictor.densities(part) for part in prepared]
    lengths = [predictor.backend.content_lengths(part) for part in prepared]
    return np.concatenate(densities), np.concatenate([np.asarray(part) for part in lengths])


if __name__ == "__main__":
    main()
