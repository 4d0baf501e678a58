"""
Histograms of normalised total evidence, in and out of distribution, a panel per run.

    python scripts/plot_alpha0.py runs/mnist-table_cpu/edl/seed0 runs/mnist-table_cpu/dappr/seed0 --out alpha0.png
"""

from __future__ import annotations

import argparse

from dappr_llm.evaluation.paper_analyses import plot_evidence
from dappr_llm.evaluation.runs import find_runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of finished runs of Dirichlet methods")
    parser.add_argument("--out", default="alpha0_normalised.png")
    args = parser.parse_args()
    found = [find_runs(folder)[0] for folder in args.runs]
    plot_evidence({f"{run.row} {run.recipe.method['name']}": run.tables for run in found}, args.out)
    print(args.out)


if __name__ == "__main__":
    main()
