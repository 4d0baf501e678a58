"""
Does every method learn without options? Accuracy of each against cross-entropy's, by model, readout and K.

    python scripts/defaults_table.py --out runs/defaults --data-root data --model smollm2-135m=smollm2-135m
    python scripts/defaults_table.py --out runs/defaults --data-root data --model qwen=models/qwen --tasks obqa csqa
    python scripts/defaults_table.py --out runs/defaults --table

One JSON file per run is written into the output folder and runs that have one are skipped, so it can be stopped and
started again; `--table` prints Markdown from what is there. `method:` of each recipe holds a name and nothing else.
Defaults are chosen with `--part validation` and seeds other than those that are reported.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from defaults_tasks import SETUPS, Setup, write_files
from scriptlib import arguments

METHODS = {
    "ce": "CE", "dappr": "DAPPr softplus", "dappr_exp": "DAPPr exp", "edl": "EDL", "iedl": "I-EDL", "redl": "R-EDL",
    "ib_edl": "IB-EDL",
}  # fmt: skip
REPORTED = [name for name in METHODS if name != "iedl"]
_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # of Llama, Qwen, Mistral, …
_SMALL = 200_000_000  # parameters up to which the letters' runs adapt every layer


def recipe_for(task: str, model: str, method: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The recipe of one run: nothing in it depends on the method but its name."""
    setup, out = SETUPS[task], Path(args.out)
    files = write_files(task, out / "data", args.data_root)
    head = setup.readout == "head"
    columns = {"text": "text", "label": "label"} if head else {}
    data = {"name": task, "splits": {"train": files["train"], "test": files[args.part]}, **columns}
    layers = top_quarter(model, setup)
    cache = {"trunk_cache": str(out / "trunk")} if layers else {}
    lora: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": _LINEAR}
    rate = args.learning_rate or (5e-4 if layers else 2e-3)
    return {
        "model": {"name": model, "dtype": args.dtype, "readout": setup.readout},
        "lora": lora | ({"layers_to_transform": layers} if layers else {}),
        "method": {"name": method},
        "data": {"train": data, "validation_split": None, "max_test_samples": args.rows, "checks": "off"},
        "train": {
            **({} if head else {"prompt": {"template": "Question: {question}\nChoices:\n{choices}\nAnswer:"}}),
            **({} if layers else {"adam_beta2": 0.95}),
            **cache,
            "max_length": 128, "learning_rate": rate, "lr_scheduler_type": "cosine", "warmup_steps": 10,
            "weight_decay": 0.0, "max_grad_norm": 1.0, "max_steps": args.steps or setup.steps,
            "per_device_train_batch_size": 16, "per_device_eval_batch_size": 32,
            "train_sampling_strategy": "group_by_length", "logging_steps": 10, "save_strategy": "no", "seed": seed,
        },
    }  # fmt: skip


def top_quarter(model: str, setup: Setup) -> list[int] | None:
    """The top quarter of the model's layers; `None` where a small model has to adapt all of them."""
    from transformers import AutoConfig

    from dappr_llm.core.model_names import BUNDLED
    from dappr_llm.text.bundled_model import load_path

    config = AutoConfig.from_pretrained(load_path() if model == BUNDLED else model)
    size = 12 * config.num_hidden_layers * config.hidden_size**2
    if size < _SMALL and not setup.top:
        return None
    count = config.num_hidden_layers
    return list(range(count - -(-count // 4), count))


def run_one(name: str, model: str, task: str, method: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train, and read what the table of the test rows says; as `dappr train` does, without its baselines and files."""
    from dappr_llm.core.recipe import build_recipe
    from dappr_llm.training.build import build_args, build_run, build_tests
    from dappr_llm.training.trainer import DAPPrTrainer

    key = run_key(name, task, method, seed, args.part)
    values = recipe_for(task, model, method, seed, args)
    values["train"]["output_dir"] = str(Path(args.out) / "runs" / key)
    recipe = build_recipe(values, key)
    began = time.perf_counter()
    arguments, (test, _) = build_args(recipe), build_tests(recipe)
    run = build_run(recipe, arguments)
    trainer = DAPPrTrainer(run.model, arguments, run.train, method=run.method, backend=run.backend)
    trainer.train()
    if trainer.interrupt.stopped:
        raise SystemExit("Stopped; start again to go on.")
    (table,) = trainer.predict_tables([test])
    probs, labels = table.reading().probs, table.labels
    hits = (probs.argmax(-1) == labels).astype(int)
    return {
        "model": name, "task": task, "method": method, "seed": seed, "part": args.part,
        "seconds": round(time.perf_counter() - began), "accuracy": float(hits.mean()), "hits": "".join(map(str, hits)),
        "nll": nll(probs, labels), "options": trainer.method.options(), "chosen": trainer.chosen,
        "max_steps": arguments.max_steps, "dtype": args.dtype,
    }  # fmt: skip


def nll(probs: np.ndarray, labels: np.ndarray) -> float:
    """Mean negative log-likelihood of the labels."""
    right = probs[np.arange(len(labels)), labels]
    return float(-np.log(np.clip(right, 1e-10, None)).mean())


def run_key(name: str, task: str, method: str, seed: int, part: str) -> str:
    return f"{name}-{task}-{method}-seed{seed}-{part}"


def difference(own: str, reference: str) -> tuple[float, float]:
    """Accuracy minus the reference's in points, and half its 95 % interval, from the same rows."""
    paired = 100 * (np.array(list(own), float) - np.array(list(reference), float))
    return float(paired.mean()), float(1.96 * paired.std(ddof=1) / len(paired) ** 0.5)


def markdown(runs: Iterable[dict[str, Any]], part: str, methods: list[str]) -> str:
    """One row per model and task: CE's accuracy, and what each method differs by, over all seeds' rows together."""
    groups: dict[tuple[str, str], dict[str, dict[int, dict[str, Any]]]] = {}
    for run in runs:
        if run["part"] == part:
            groups.setdefault((run["model"], run["task"]), {}).setdefault(run["method"], {})[run["seed"]] = run
    others = [name for name in methods if name != "ce"]
    lines = ["| model | task | readout, K | seeds | CE | " + " | ".join(METHODS[name] for name in others) + " |"]
    lines.append("| --- | --- | --- | ---: |" + " ---: |" * (len(others) + 1))
    for (model, task), found in sorted(
        groups.items(), key=lambda group: (group[0][0], list(SETUPS).index(group[0][1]))
    ):
        reference = found.get("ce", {})
        cells = []
        for name in others:
            seeds = sorted(found.get(name, {}).keys() & reference.keys())
            hits = ["".join(source[seed]["hits"] for seed in seeds) for source in (found.get(name, {}), reference)]
            cells.append("{:+.1f} ± {:.1f}".format(*difference(*hits)) if seeds else "–")
        accuracy = f"{100 * np.mean([run['accuracy'] for run in reference.values()]):.1f}" if reference else "–"
        setup = SETUPS[task]
        lines.append(
            f"| {model} | {setup.what} | {setup.readout}, {setup.classes} | {len(reference)} | {accuracy} | "
            + " | ".join(cells) + " |"
        )  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", required=True, help="folder of the results, one JSON file per run")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME=PATH", help="base model; may be repeated"
    )
    parser.add_argument("--data-root", help="folder with CLINC150, BANKING77, OpenBookQA and CommonsenseQA")
    parser.add_argument("--tasks", nargs="+", default=list(SETUPS), choices=list(SETUPS))
    parser.add_argument("--methods", nargs="+", default=REPORTED, choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--part", default="test", choices=["validation", "test"], help="rows that are predicted")
    parser.add_argument("--rows", type=int, default=500, help="test rows at most")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run (default: by task)")
    parser.add_argument("--learning-rate", type=float, help="default: 5e-4; 2e-3 where all layers are adapted")
    parser.add_argument("--dtype", default="bfloat16", help="of the base model")
    parser.add_argument("--table", action="store_true", help="only print the table")
    args = parser.parse_args()
    logging.getLogger("dappr_llm").setLevel(logging.INFO)  # what is chosen, and why
    logging.basicConfig(format="%(message)s")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for given in [] if args.table else args.model:
        name, _, path = given.partition("=")
        for task in args.tasks:
            for method in args.methods:
                for seed in args.seeds:
                    file = out / f"{run_key(name, task, method, seed, args.part)}.json"
                    if not file.is_file():
                        print(f"--- {file.stem}", flush=True)
                        found = run_one(name, path or name, task, method, seed, args)
                        gc.collect()  # a trainer and its model refer to each other
                        file.write_text(json.dumps(found, indent=1, allow_nan=False), encoding="utf-8")
                        print(f"{file.stem}: {100 * found['accuracy']:.1f} % in {found['seconds']} s", flush=True)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*.json"))]
    print("\n" + markdown(runs, args.part, args.methods))


if __name__ == "__main__":
    main()
