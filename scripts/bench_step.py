"""
Step time of DAPPr relative to cross-entropy with the same backbone; steps alternate in one process.

    python scripts/bench_step.py                                    # cifar10: VGG16, batch 64
    python scripts/bench_step.py --recipe mnist/dappr --rounds 50
"""

from __future__ import annotations

import numpy as np
from bench_workload import Workload
from benchlib import interleaved, median_ratio
from scriptlib import arguments

from dappr_llm.core.recipe import load_recipe


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--recipe", default="cifar10/dappr")
    parser.add_argument("--method", default="dappr")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    recipe = load_recipe(args.recipe, ["model.pretrained=false"])
    works = {name: Workload(recipe, name, args.batch_size) for name in (args.method, "ce")}
    times = interleaved({name: work.step for name, work in works.items()}, args.rounds)
    for name, values in times.items():
        print(f"{name:<8} {1000 * np.median(values):8.2f} ms per step of {args.batch_size} (median of {args.rounds})")
    ratio, low, high = median_ratio(times[args.method], times["ce"])
    print(f"{args.method} / ce: {ratio:.4f} (95 % {low:.4f} to {high:.4f}), {recipe.model.backbone}")


if __name__ == "__main__":
    main()
