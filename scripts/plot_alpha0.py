"""
Histograms of normalised total evidence alpha0, in and out of distribution, one panel per run.

    python scripts/plot_alpha0.py runs/mnist-table_cpu/edl/seed0 runs/mnist-table_cpu/dappr/seed0 --out alpha0.png
"""

from __future__ import annotations

from scriptlib import figure_arguments

from dappr_llm.evaluation.paper_analyses import plot_evidence
from dappr_llm.evaluation.runs import find_runs


def main() -> None:
    args = figure_arguments(__doc__, "alpha0_normalised.png", source="runs").parse_args()
    found = [find_runs(folder)[0] for folder in args.runs]
    plot_evidence({f"{run.row} {run.recipe.method['name']}": run.tables for run in found}, args.out)
    print(args.out)


if __name__ == "__main__":
    main()
