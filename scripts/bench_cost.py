"""
Cost of each method, absolute and relative to cross-entropy: parameters, memory, seconds per epoch, inference time.

    python scripts/bench_cost.py --recipe mnist/dappr --rows 48000
    python scripts/bench_cost.py --recipe dogs/dappr --batch-size 256 --rows 10800 --methods ce edl dappr

Steps of the methods alternate in one process, each method with its default options. DUQ needs a double backward pass,
batches of prior networks contain as many auxiliary images as training images, and heads that are fitted after training
are fitted before inference is timed. Memory is the activations that one step keeps for its backward pass, plus
weights, gradients and Adam's two moments. An ensemble of M members costs M times its method.
"""

from __future__ import annotations

import numpy as np
from bench_workload import Workload
from benchlib import interleaved
from scriptlib import arguments

from dappr_llm.core.recipe import load_recipe
from dappr_llm.methods import METHODS


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--recipe", default="mnist/dappr")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rows", type=int, default=48000, help="training rows of an epoch")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    recipe = load_recipe(args.recipe, ["model.pretrained=false", "model.dropout=0.5"])
    names = ["ce", *(name for name in args.methods if name != "ce")]
    works = {name: Workload(recipe, name, args.batch_size, args.rows) for name in names}
    steps = interleaved({name: work.step for name, work in works.items()}, args.rounds)
    reads = interleaved({name: work.predict for name, work in works.items()}, args.rounds)
    base: list[float] = []
    print("| method | parameters (2^20) | memory (MiB) | s / epoch | inference (ms / 1000) | relative to CE |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for name, work in works.items():
        values = [
            work.parameters / 2**20,
            (work.saved_bytes() + 16 * work.parameters) / 2**20,
            float(np.median(steps[name])) * args.rows / args.batch_size,
            float(np.median(reads[name])) * 1e6 / args.batch_size,
        ]
        base = base or values
        relative = " / ".join(f"{value / first:.2f}" for value, first in zip(values, base, strict=True))
        print(f"| {name} | {values[0]:.2f} | {values[1]:.1f} | {values[2]:.1f} | {values[3]:.1f} | {relative} |")


if __name__ == "__main__":
    main()
