"""
Mean epistemic uncertainty on the ID test split against the number of training rows, for DAPPr and EDL.

    dappr sweep mnist/train_size --data-root data
    python scripts/plot_train_size.py runs/mnist-train_size --out train_size.png
"""

from __future__ import annotations

from scriptlib import figure_arguments

from dappr_llm.evaluation.paper_analyses import falls, plot_curves, size_curves
from dappr_llm.evaluation.runs import find_runs


def main() -> None:
    args = figure_arguments(__doc__, "train_size.png").parse_args()
    curves = size_curves(find_runs(args.sweep))
    for method, curve in curves.items():
        for size, found in curve.items():
            print(f"{method:<6} {size:6.0f} rows: mean {found.mean:.4f} ± {found.std:.4f}  ({found.n} seeds)")
        print(f"{method}: {'falls' if falls(curve) else 'does not fall'} with every step of more data")
    plot_curves(curves, args.out, "training images", "mean epistemic uncertainty, test")
    print(args.out)


if __name__ == "__main__":
    main()
