"""
Savings of the frozen-layer cache over a sweep: 4 methods x 2 seeds, LoRA on the top layers (a third, or `--top`).

    python scripts/bench_sweep.py --data-root data
    python scripts/bench_sweep.py --data-root data --items 512 --test-items 500 --epochs 3
    python scripts/bench_sweep.py --data-root data --top 5

Every run is built from a recipe, trained, and predicts all four test sets; the variants alternate:

  cache        LoRA on the top layers, with `train.trunk_cache`; the cache starts empty, so the first run fills it
  without      the same run without the cache: the same adapter up to rounding
  every layer  LoRA on all layers, the cost of a sweep that cannot use the cache; another adapter

Everything else (packed batches, shared prefixes) is the same in all variants.

The possible savings are bounded. Without the cache, an item costs the forward pass of all layers and the backward pass
of the top ones, since autograd stops at the lowest trained layer; with it, both passes of the top layers, and once per
sweep the forward pass of the others. The printed bounds are ratios of floating-point operations that torch counted in
steps of these runs, so they hold for any implementation of the same computation.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import benchlib
import numpy as np
import torch

if TYPE_CHECKING:
    from dappr_llm import DAPPrTrainer
    from dappr_llm.core.recipe import Recipe

METHODS = ("ce", "edl", "ib_edl", "dappr")
SIDES = ("cache", "without", "every layer")


def recipe_of(method: str, seed: int, args: argparse.Namespace, folder: str, side: str) -> Recipe:
    """The recipe of one run of a variant."""
    from dappr_llm.core.recipe import build_recipe

    lowest = 0 if side == "every layer" else args.layers - args.top
    return build_recipe(
        {
            "name": f"{method}-{seed}",
            "model": {"name": args.model},
            "lora": {
                "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"],
                "layers_to_transform": list(range(lowest, args.layers)),
            },
            "method": {"name": method},
            "data": {
                "train": "obqa", "ood": ["arc_c", "arc_e", "csqa"], "root": args.data_root, "validation_split": None,
                "max_train_samples": args.items, "max_test_samples": args.test_items,
            },
            "train": {
                "output_dir": f"{folder}/{method}-{seed}-{side}", "num_train_epochs": args.epochs,
                "per_device_train_batch_size": 16, "learning_rate": 1e-3, "seed": seed, "save_strategy": "no",
                "logging_steps": 1000, "disable_tqdm": True,
                "trunk_cache": f"{folder}/trunk" if side == "cache" else None,
            },
        }
    )  # fmt: skip


def run_one(method: str, seed: int, args: argparse.Namespace, folder: str, side: str, count: bool) -> dict[str, Any]:
    """Seconds `[3]` of the whole run, its training and its prediction; the probabilities; FLOPs if `count`."""
    from dappr_llm import DAPPrTrainer
    from dappr_llm.training.build import build_args, build_run, build_tests

    recipe = recipe_of(method, seed, args, folder, side)
    start = time.perf_counter()
    settings = build_args(recipe)
    own, ood = build_tests(recipe)
    run = build_run(recipe, settings)
    trainer = DAPPrTrainer(run.model, settings, run.train, None, method=run.method, backend=run.backend)
    ready = time.perf_counter()
    trainer.train()
    trained = time.perf_counter()
    tables = trainer.predict_tables([own, *ood])
    if trainer.backend.reader.frozen is not None:
        trainer.backend.reader.frozen.store.flush()
    end = time.perf_counter()
    return {
        "seconds": np.array([end - start, trained - ready, end - trained]),
        "probs": [table.probs for table in tables],
        "flops": operations(trainer) if count else None,
    }


def operations(trainer: DAPPrTrainer) -> tuple[int, int]:
    """FLOPs of one training step and of one prediction, on the same 16 rows."""
    from torch.utils.flop_counter import FlopCounterMode

    rows = trainer.backend.collate([trainer.train_dataset[row] for row in range(16)])
    trainer.model.train()
    with FlopCounterMode(display=False) as step:
        trainer.compute_loss(trainer.model, trainer._prepare_inputs(dict(rows))).backward()
    trainer.model.zero_grad()
    trainer.model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as reading:
        trainer.backend.read(trainer.model, trainer._prepare_inputs(dict(rows)))
    return step.get_total_flops(), reading.get_total_flops()


def bounds(flops: dict[str, tuple[int, int]], side: str, runs: int, epochs: int) -> tuple[float, float]:
    """Lower bounds on the cost of the cached sweep relative to another variant, for training and for prediction."""
    (step, reading), (step_there, reading_there) = flops["cache"], flops[side]
    below = flops["without"][1] - reading  # cost of filling the cache, once per row of the sweep
    return (step + below / runs / epochs) / step_there, (reading + below / runs) / reading_there


def main() -> None:
    parser = benchlib.arguments(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int, default=30, help="layers of the model (default: SmolLM2-135M's 30)")
    parser.add_argument("--top", type=int, help="how many layers train (default: a third)")
    parser.add_argument("--items", type=int, default=128, help="training items (default: 128)")
    parser.add_argument("--test-items", type=int, default=32, help="of each of the four test sets (default: 32)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--skip-every-layer", action="store_true", help="leave LoRA on all layers out")
    args = benchlib.parse(parser)
    args.top = args.top or args.layers // 3
    from transformers.utils import logging

    logging.disable_progress_bar()
    sides = SIDES[:2] if args.skip_every_layer else SIDES
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for method in args.methods:
                shift = len(found) % len(sides)
                order = sides[shift:] + sides[:shift]
                first = not found  # FLOPs are the same in all runs of a variant
                runs = {side: run_one(method, seed, args, folder, side, first) for side in order}
                found[f"{method}, seed {seed}"] = runs
                print(f"{method}, seed {seed}: done", flush=True)
    benchlib.save(args.json and Path(args.json), {"machine": benchlib.machine(), **summary(found, args)})


def summary(found: dict[str, dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Print and return times of all runs, their sum, ratios and bounds."""
    sides = sorted(next(iter(found.values())), key=SIDES.index)
    seconds = {name: {side: run[side]["seconds"] for side in sides} for name, run in found.items()}
    seconds["all"] = {side: sum(run[side] for run in seconds.values()) for side in sides}  # type: ignore[misc]
    ratios = {name: {side: (run["cache"] / run[side]).tolist() for side in sides[1:]} for name, run in seconds.items()}
    benchlib.show(
        f"{args.model}: top {args.top} of {args.layers} layers, {args.items} training items x {args.epochs} epochs, "
        f"4 x {args.test_items} test items; seconds, and ratios of the cached run to the others",
        ["run", *sides, *(f"/ {side}{part}" for side in sides[1:] for part in ("", ", training", ", prediction"))],
        [
            [name, *(float(run[side][0]) for side in sides), *sum((ratios[name][side] for side in sides[1:]), [])]
            for name, run in seconds.items()
        ],
    )  # fmt: skip
    flops = {side: run["flops"] for side, run in next(iter(found.values())).items()}
    least = {side: bounds(flops, side, len(found), args.epochs) for side in sides[1:]}
    apart = max(
        float(np.abs(one - other).max())
        for run in found.values()
        for one, other in zip(run["cache"]["probs"], run["without"]["probs"], strict=True)
    )
    print()
    for side, (training, prediction) in least.items():
        print(f"Least ratio to '{side}' by counted operations: training {training:.3f}, prediction {prediction:.3f}")
    print(f"Largest difference of probabilities with and without the cache: {apart:.1e}", flush=True)
    return {
        "seconds": {name: {side: run[side].tolist() for side in sides} for name, run in seconds.items()},
        "ratios": ratios,
        "flops": flops,
        "bounds": least,
        "apart": apart,
    }


if __name__ == "__main__":
    main()
