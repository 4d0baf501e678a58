"""
Reliability curves of all methods of a sweep in one diagram, seeds pooled.

    python scripts/plot_reliability.py runs/mnist-table_cpu --out reliability.png
"""

from __future__ import annotations

from scriptlib import figure_arguments

from dappr_llm.evaluation.paper_analyses import plot_reliabilities
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.evaluation.runs import find_runs


def main() -> None:
    args = figure_arguments(__doc__, "reliability_methods.png").parse_args()
    tables: dict[str, list[PredictionTable]] = {}
    for run in find_runs(args.sweep):
        tables.setdefault(run.row, []).append(run.id_table)
    plot_reliabilities(tables, args.out)
    print(args.out)


if __name__ == "__main__":
    main()
