"""
Accuracy, confidence AUPR and OOD AUPR against DAPPr's coefficient λ, from the prediction tables of a sweep.

    dappr sweep cifar10/lambda
    python scripts/plot_lambda_sweep.py runs/cifar10-lambda --out lambda.png
"""

from __future__ import annotations

from scriptlib import figure_arguments

from dappr_llm.evaluation.paper_analyses import lambda_curves, plot_curves
from dappr_llm.evaluation.runs import find_runs


def main() -> None:
    args = figure_arguments(__doc__, "lambda_sweep.png").parse_args()
    curves = lambda_curves(find_runs(args.sweep))
    for name, curve in curves.items():
        for weight, found in curve.items():
            print(f"{name:<11} lambda {weight:<8g} {100 * found.mean:6.2f} ± {100 * found.std:.2f}  ({found.n} seeds)")
    plot_curves(curves, args.out, "coefficient λ (leftmost: 0)", "fraction")
    print(args.out)


if __name__ == "__main__":
    main()
