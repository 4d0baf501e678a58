"""
What the frozen-trunk cache saves over a sweep: 4 methods x 2 seeds, LoRA on the top third of the layers.

    python scripts/bench_sweep.py --data-root data
    python scripts/bench_sweep.py --data-root data --items 512 --test-items 500 --epochs 3

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

    top = args.layers - args.layers // 3
    return build_recipe(
        {
            "name": f"{method}-{seed}",
            "model": {"name": args.model},
            "lora": {
                "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"],
                "layers_to_transform": list(range(top, args.layers)),
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


def run_one(method: str, seed: int, args: Any, folder: str, trunk: str | None) -> tuple[float, list[np.ndarray]]:
    from dappr_llm import DAPPrTrainer
    from dappr_llm import run as runs
    from dappr_llm.batching import RowSet

    recipe = recipe_of(method, seed, args, folder, trunk)
    start = time.perf_counter()
    settings = runs.build_args(recipe)
    own, ood = runs.test_tasks(recipe)
    run = runs.build(recipe, settings)
    trainer = DAPPrTrainer(run.model, settings, run.train, None, method=run.method, backend=run.backend)
    trainer.train()
    tables = trainer.predict_tables([RowSet(rows, task.name, split) for split, rows, task in (own, *ood)])
    if trainer.backend.trunk is not None:
        trainer.backend.trunk.flush()
    return time.perf_counter() - start, [table.probs for table in tables]


def main() -> None:
    parser = benchlib.arguments(__doc__ or "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int, default=30, help="layers of the model (default: SmolLM2-135M's 30)")
    parser.add_argument("--items", type=int, default=128, help="training items (default: 128)")
    parser.add_argument("--test-items", type=int, default=32, help="of each of the four test sets (default: 32)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    args = parser.parse_args()
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
                rows.append(
                    [f"{method}, seed {seed}", found[False][0], found[True][0], found[True][0] / found[False][0]]
                )
    without, cached = (sum(row[column] for row in rows) for column in (1, 2))
    rows.append(["all", without, cached, cached / without])
    benchlib.show(
        f"{args.model}: {args.items} training items x {args.epochs} epochs, 4 x {args.test_items} test items",
        ["run", "without, s", "with the cache, s", "ratio"],
        rows,
    )
    count, top = len(rows) - 1, args.layers // 3
    bounds = [
        (2 * top + (args.layers - top) / count / args.epochs) / (args.layers + top),
        (top + (args.layers - top) / count) / args.layers,
    ]
    print(f"\nBounds by counting layers: training {bounds[0]:.2f}, prediction {bounds[1]:.2f}")
    print(f"Largest difference of probabilities between the two: {apart:.1e}", flush=True)
    content = {
        "machine": benchlib.machine(),
        "runs": rows,
        "ratio": cached / without,
        "bounds": bounds,
        "apart": apart,
    }
    benchlib.save(args.json and Path(args.json), content)


if __name__ == "__main__":
    main()
