"""
Empirical coverage of the 95 % bootstrap intervals.

    python scripts/interval_coverage.py --out docs/images/interval_coverage.png

Simulates ID and OOD tables of a calibrated Dirichlet model, computes the bootstrap intervals of every pair of tables,
and counts how often they contain the true value, which comes from one very large table of the same model.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from scriptlib import arguments

from dappr_llm.core.files import atomic_write, write_text
from dappr_llm.evaluation.bootstrap import bootstrap
from dappr_llm.evaluation.evaluators import evaluate_tables
from dappr_llm.evaluation.prediction_table import PredictionTable

KEYS = {
    "id/accuracy": "accuracy",
    "id/nll": "NLL",
    "ood/x/auroc": "OOD AUROC",
    "id/brier": "Brier",
    "id/conf_auroc": "conf. AUROC",
    "id/aurc": "AURC",
    "ood/x/aupr": "OOD AUPR",
}


def simulate(rng: np.random.Generator, rows: int, evidence: float) -> PredictionTable:
    """A table with four options, gamma-distributed evidence, and labels drawn from the model's own probabilities."""
    alpha = 1 + rng.gamma(0.7, evidence, (rows, 4))
    probs = alpha / alpha.sum(axis=1, keepdims=True)
    labels = (rng.random((rows, 1)) > probs.cumsum(axis=1)).sum(axis=1).clip(0, 3)
    meta = {"task": "x", "num_choices": 4, "task_num_choices": 4}
    return PredictionTable.from_arrays(np.arange(rows).astype(str), labels, alpha=alpha, meta=meta)


def pair(rng: np.random.Generator, rows: int) -> tuple[PredictionTable, dict[str, PredictionTable]]:
    return simulate(rng, rows, 3.0), {"x": simulate(rng, rows, 1.5)}


def draw(shares: dict[str, float], tables: int, rows: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.0))
    axes = figure.subplots()
    axes.axvspan(93, 97, color="#0072B2", alpha=0.12, label="93 to 97 %")
    axes.axvline(95, color="#333333", linewidth=1, linestyle="--", label="nominal 95 %")
    for place, share in enumerate(reversed(shares.values())):
        error = 196 * np.sqrt(share * (1 - share) / tables)
        axes.errorbar(100 * share, place, xerr=error, fmt="o", color="#D55E00", capsize=3)
    axes.set_yticks(range(len(shares)), reversed([KEYS[key] for key in shares]))
    axes.set(
        xlim=(90, 100), xlabel=f"tables whose interval contains the true value, % ({tables} tables of {rows} rows)"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    with atomic_write(path) as handle:
        figure.savefig(handle, format="png", dpi=160, bbox_inches="tight")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="PNG of the shares; their numbers go beside it as .json")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    # With 1000 times as many rows, its standard error is 1/30 of that of a table of 500 rows.
    truth = evaluate_tables(*pair(rng, 500_000))
    held = dict.fromkeys(KEYS, 0)
    start = time.perf_counter()
    for table in range(args.tables):
        found = bootstrap(*pair(rng, args.rows), resamples=args.resamples, seed=table)
        for key in KEYS:
            held[key] += found[key][0] <= truth[key] <= found[key][1]
        if (table + 1) % 100 == 0:
            print(f"{table + 1} tables, {time.perf_counter() - start:.0f} s", file=sys.stderr)
    shares = {key: count / args.tables for key, count in held.items()}
    for key, share in shares.items():
        print(f"{KEYS[key]:12} true {truth[key]:.4f}  covered {100 * share:.1f} %")
    if args.out:
        draw(shares, args.tables, args.rows, args.out)
        facts = {"tables": args.tables, "rows": args.rows, "resamples": args.resamples, "seed": args.seed}
        write_text(args.out.with_suffix(".json"), json.dumps({**facts, "covered": shares}, indent=2) + "\n")


if __name__ == "__main__":
    main()
