"""
What the frozen-trunk cache saves over a sweep: 4 methods x 2 seeds, LoRA on the top layers (a third, or `--top`).

    python scripts/bench_sweep.py --data-root data
    python scripts/bench_sweep.py --data-root data --items 512 --test-items 500 --epochs 3
    python scripts/bench_sweep.py --data-root data --top 5

Every run is built from a recipe, trained, and predicts all four test sets, once with `train.trunk_cache` and once
without, turn by turn. The cache starts empty: what filling it costs is part of its first run. Everything else (packed
batches, shared prefixes) is the same on both sides, so the ratio is the cache's own doing.

Its bound is arithmetic. Without the cache an item costs the forward pass of all L layers and the backward pass of the
top T, since autograd stops at the frozen boundary by itself; with it, both passes of the top T, and once per sweep the
forward pass of the rest: (2T + (L - T)/runs) / (L + T) in training, (T + (L - T)/runs) / L in prediction.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import benchlib
import numpy as np
import torch

METHODS = ("ce", "edl", "ib_edl", "dappr")


def recipe_of(method: str, seed: int, args: Any, folder: str, trunk: str | None) -> Any:
    from dappr_llm.recipe import build_recipe

    return build_recipe(
        {
            "name": f"{method}-{seed}",
            "model": {"name": args.model},
            "lora": {
                "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"],
                "layers_to_transform": list(range(args.layers - args.top, args.layers)),
            },
            "method": {"name": method},
            "data": {
                "train": "obqa", "ood": ["arc_c", "arc_e", "csqa"], "root": args.data_root, "validation_split": None,
                "max_train_samples": args.items, "max_test_samples": args.test_items,
            },
            "train": {
                "output_dir": f"{folder}/{method}-{seed}-{bool(trunk)}", "num_train_epochs": args.epochs,
                "per_device_train_batch_size": 16, "learning_rate": 1e-3, "seed": seed, "save_strategy": "no",
                "logging_steps": 1000, "disable_tqdm": True, "trunk_cache": trunk,
            },
        }
    )  # fmt: skip


def run_one(method: str, seed: int, args: Any, folder: str, trunk: str | None) -> tuple[list[float], list[np.ndarray]]:
    """Seconds of the whole run, of its training and of its prediction; and the probabilities."""
    from dappr_llm import DAPPrTrainer
    from dappr_llm import run as runs
    from dappr_llm.batching import RowSet

    recipe = recipe_of(method, seed, args, folder, trunk)
    start = time.perf_counter()
    settings = runs.build_args(recipe)
    own, ood = runs.test_tasks(recipe)
    run = runs.build(recipe, settings)
    trainer = DAPPrTrainer(run.model, settings, run.train, None, method=run.method, backend=run.backend)
    ready = time.perf_counter()
    trainer.train()
    trained = time.perf_counter()
    tables = trainer.predict_tables([RowSet(rows, task.name, split) for split, rows, task in (own, *ood)])
    if trainer.backend.trunk is not None:
        trainer.backend.trunk.flush()
    end = time.perf_counter()
    return [end - start, trained - ready, end - trained], [table.probs for table in tables]


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
    args = parser.parse_args()
    args.top = args.top or args.layers // 3
    if args.threads:
        torch.set_num_threads(args.threads)
    from transformers.utils import logging

    logging.disable_progress_bar()
    rows, apart = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for method in args.methods:
                order = (None, f"{folder}/trunk") if len(rows) % 2 else (f"{folder}/trunk", None)
                found = {bool(trunk): run_one(method, seed, args, folder, trunk) for trunk in order}
                apart = max(
                    apart, *(float(np.abs(a - b).max()) for a, b in zip(found[True][1], found[False][1], strict=True))
                )
                rows.append([f"{method}, seed {seed}", found[False][0], found[True][0]])
    totals = [np.sum([row[side] for row in rows], axis=0) for side in (1, 2)]
    rows.append(["all", *totals])
    shown = [
        [name, without[0], cached[0], *(c / w for c, w in zip(cached, without, strict=True))]
        for name, without, cached in rows
    ]
    benchlib.show(
        f"{args.model}: top {args.top} of {args.layers} layers, {args.items} training items x {args.epochs} epochs, "
        f"4 x {args.test_items} test items",
        ["run", "without, s", "with the cache, s", "ratio", "training alone", "prediction alone"],
        shown,
    )
    count, top = len(shown) - 1, args.top
    bounds = [
        (2 * top + (args.layers - top) / count / args.epochs) / (args.layers + top),
        (top + (args.layers - top) / count) / args.layers,
    ]
    print(f"\nBounds by counting layers: training {bounds[0]:.2f}, prediction {bounds[1]:.2f}")
    print(f"Largest difference of probabilities between the two: {apart:.1e}", flush=True)
    content = {
        "machine": benchlib.machine(),
        "runs": shown,
        "ratio": shown[-1][3],
        "bounds": bounds,
        "apart": apart,
    }
    benchlib.save(args.json and Path(args.json), content)


if __name__ == "__main__":
    main()
