"""
Cost of predicting OpenBookQA, ARC-C, ARC-E and CommonsenseQA: a plain baseline, our predictor, and a lower bound.

    python scripts/bench_predict.py --data-root data                    # a tenth of each set
    python scripts/bench_predict.py --data-root data --fraction 1       # all 5,269 questions: half an hour on a laptop
    python scripts/bench_predict.py --data-root data --linear           # how the cost grows with the number of items

  a        plain baseline: each dataset by itself, tokenised in batches of 16 in dataset order, padded to the longest
           prompt, logits of the whole vocabulary
  ours     `predict_tables`: all datasets in one pass, without padding, shared prefixes computed once per batch
  alone    `predict_tables` for each dataset by itself, in batches of 16
  c        lower bound: forward pass of the decoder without a head, on as many real tokens, without padding
  again    the second `dappr evaluate` of the same checkpoint, as a whole process
  members  one question answered by an ensemble, its members one after the other or together in one batch

All variants use the same adapter; their probabilities must agree to 1e-4. Variants alternate and repeat. Peak memory
above that of the loaded model is measured in a separate process for each variant.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import benchlib
import numpy as np
import torch

if TYPE_CHECKING:
    from datasets import Dataset

TASKS = ("obqa", "arc_c", "arc_e", "csqa")


class Bench:
    """A model with a random adapter, the rows to predict, and the variants to measure."""

    def __init__(self, model_name: str, rows: list[Any], folder: str, dtype: str | None = None):
        from dappr_llm import DAPPrConfig, DAPPrTrainer
        from dappr_llm.inference.batching import RowSet
        from dappr_llm.methods import get_method
        from dappr_llm.text.backend import TextBackend

        self.model, self.tokenizer = benchlib.load_model(model_name, dtype)
        torch.manual_seed(1)
        for name, weight in self.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.02)
        method = get_method("ce")
        base = model_name if model_name not in benchlib.RANDOM else None
        self.backend = TextBackend(self.model, self.tokenizer, method, 4, base_model=base)
        args = DAPPrConfig(folder, report_to="none", disable_tqdm=True, per_device_eval_batch_size=16)
        self.trainer = DAPPrTrainer(self.model, args, method="ce", backend=self.backend)
        self.sets = [RowSet(part, task, "test", {"task_num_choices": k}) for task, k, part in rows]
        self.model.eval()
        self.results: dict[str, list[np.ndarray]] = {}
        self._lengths: list[list[int]] | None = None

    def plain(self, _: None = None) -> None:
        found = []
        for each in self.sets:
            width = max(4, each.meta["task_num_choices"])
            ids = self.backend.readout.token_ids(width)
            parts = []
            for start in range(0, len(each.rows), 16):
                rows = each.rows[start : start + 16]
                texts = [
                    self.backend.prompt.render(*pair) for pair in zip(rows["question"], rows["options"], strict=True)
                ]
                inputs = self.tokenizer(texts, padding=True, return_tensors="pt").to(benchlib.device())
                positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
                with torch.no_grad():
                    logits = self.model(
                        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], position_ids=positions
                    ).logits
                parts.append(logits[:, -1, ids].float().softmax(-1).cpu())
            found.append(torch.cat(parts).numpy())
        self.results["a"] = found

    def ours(self, _: None = None) -> None:
        self.trainer.args.eval_tokens = 4096
        self.results["ours"] = [table.probs for table in self.trainer.predict_tables(self.sets)]

    def alone(self, _: None = None) -> None:
        self.trainer.args.eval_tokens = 0
        self.results["alone"] = [self.trainer.predict_tables([each])[0].probs for each in self.sets]

    def trunk(self, _: None = None) -> None:
        decoder = self.model.get_base_model().get_decoder()
        lengths = [length for part in self.lengths() for length in part]
        mean = sum(lengths) // len(lengths)
        rows = 4096 // mean  # the same tokens per batch as ours, in rows of equal length
        for start in range(0, len(lengths), rows):
            ids = torch.full((min(rows, len(lengths) - start), mean), 5, device=benchlib.device())
            with torch.no_grad():
                decoder(input_ids=ids, use_cache=False)

    def lengths(self) -> list[list[int]]:
        """Number of tokens of every prompt, per dataset; tokenised once."""
        if self._lengths is None:
            sets = (self.backend.encode(self.backend.items(each.rows)) for each in self.sets)
            self._lengths = [[row["length"] for row in rows] for rows in sets]
        return self._lengths

    def variants(self) -> dict[str, Any]:
        return {"a": self.plain, "ours": self.ours, "alone": self.alone, "c": self.trunk}


def load_rows(root: str | None, fraction: float) -> list[Any]:
    from dappr_llm.text.data.tasks import get_task, load_task

    found = []
    for name in TASKS:
        task = get_task(name)
        rows = load_task(task, "test", root, labelled=False)
        order = np.random.default_rng(0).permutation(len(rows))[: max(16, round(fraction * len(rows)))]
        found.append((name, task.num_choices, rows.select(np.sort(order))))
    return found


def tokens_of(bench: Bench) -> dict[str, int]:
    lengths = bench.lengths()
    padded = sum(len(part[i : i + 16]) * max(part[i : i + 16]) for part in lengths for i in range(0, len(part), 16))
    return {"real": sum(map(sum, lengths)), "padded": padded}


def measure(args: argparse.Namespace, model: str) -> dict[str, Any]:
    bench = Bench(model, load_rows(args.data_root, args.fraction), tempfile.mkdtemp(), args.dtype)
    tokens = tokens_of(bench)
    times = benchlib.rounds(bench.variants(), [None], args.repeats, warm_up=False)
    apart = {name: _apart(bench.results["a"], values) for name, values in bench.results.items()}
    exact = benchlib.device().type == "cpu" and args.dtype != "bfloat16"
    assert not exact or max(apart.values()) < 1e-4, apart
    ratios = {f"{one}/{to}": benchlib.ratio(times, one, to) for one in times for to in ("a", "c") if one != to}
    count = sum(len(each.rows) for each in bench.sets)
    flops, peak = 2 * benchlib.trunk_parameters(bench.model) * tokens["real"], benchlib.matmul_peak()
    table = []
    for name, values in times.items():
        both = (ratios.get(f"{name}/{to}", (1.0, 1.0, 1.0)) for to in ("a", "c"))
        shown = [f"{median:.3f} ({low:.3f} to {high:.3f})" for median, low, high in both]
        speed = [round(tokens["real"] / min(values)), flops / min(values) / peak]
        difference = f"{apart[name]:.1e}" if name in apart else "–"
        table.append([name, min(values), 1000 * min(values) / count, *shown, *speed, difference])
    heads = ["variant", "s", "ms per question", "time / a", "time / c", "real tokens/s", "MFU", "difference of probs"]
    benchlib.show(f"{model}: {count} questions of {', '.join(TASKS)}, {args.repeats} repeats; {tokens}", heads, table)
    return {
        "model": model, "seconds": times, "ratios": ratios, "questions": count, "tokens": tokens, "difference": apart,
        "peak_flops": peak,
    }  # fmt: skip


def memory(args: argparse.Namespace, name: str) -> None:
    bench = Bench(args.models[0], load_rows(args.data_root, args.fraction), tempfile.mkdtemp(), args.dtype)
    bench.lengths()
    with torch.no_grad():  # touch every weight, so that it is resident before measuring starts
        bench.model(input_ids=torch.tensor([[5, 6]], device=benchlib.device()))
    print(json.dumps(benchlib.peak_memory(bench.variants()[name])))


def measure_memory(args: argparse.Namespace) -> dict[str, int]:
    common = ["--models", args.models[0], "--fraction", "0.02"]
    common += ["--data-root", args.data_root] if args.data_root else []
    common += ["--dtype", args.dtype] if args.dtype else []
    found = {name: benchlib.in_process([*common, "--memory-of", name]) for name in ("a", "ours", "alone", "c")}
    rows = [[name, round(size / 2**20), size / found["a"]] for name, size in found.items()]
    benchlib.show(f"{args.models[0]}: peak memory above the loaded model", ["variant", "MiB", "/ a"], rows)
    return found


def _apart(wanted: list[np.ndarray], found: list[np.ndarray]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(wanted, found, strict=True))


def measure_again(args: argparse.Namespace) -> dict[str, Any]:
    """Time of the first and of repeated `dappr evaluate` commands, each in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.models[0], load_rows(args.data_root, 0.01), folder)
        bench.trainer.save_model(f"{folder}/run")
        del bench
        command = [
            sys.executable,
            "-m",
            "dappr_llm",
            "evaluate",
            f"{folder}/run",
            "--id",
            TASKS[0],
            "--ood",
            *TASKS[1:],
        ]
        command += ["--data-root", args.data_root] if args.data_root else []
        command += ["--limit", str(args.again)] if args.again else []
        environment = {**os.environ, "DAPPR_PREDICTION_CACHE": f"{folder}/cache"}
        took = []
        for number in range(1 + args.repeats):
            start = time.perf_counter()
            out = [*command, "--out", f"{folder}/{number}"]
            done = subprocess.run(out, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
            took.append(time.perf_counter() - start)
    rows = [["first", took[0]], *(["again", value] for value in took[1:])]
    benchlib.show(f"dappr evaluate, {args.again or 'all'} questions of each task", ["run", "s"], rows)
    return {"first": took[0], "again": took[1:], "limit": args.again}


def measure_ensemble(args: argparse.Namespace) -> dict[str, Any]:
    """Time of one question for an ensemble: members one after the other, and together in one batch."""
    from dappr_llm import AdapterEnsemble

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.models[0], load_rows(args.data_root, 0.01), folder)
        bench.trainer.save_model(f"{folder}/run")
        row = bench.sets[0].rows[0]
        ensemble = AdapterEnsemble.from_pretrained([f"{folder}/run"] * args.members)
    rows, width = ensemble.run.encoded(row["question"], row["options"])
    variants = {
        "in turn": lambda _: ensemble.predict_in_turn(rows, width),
        "side by side": lambda _: ensemble.predict_together(rows, width),
    }
    times = benchlib.rounds(variants, list(range(10)), args.repeats)
    ratio = benchlib.ratio(times, "side by side", "in turn")
    table = [[name, 100 * min(values)] for name, values in times.items()]
    benchlib.show(f"One question, {args.members} members", ["members", "ms"], table)
    print("\nSide by side / in turn: {:.3f} ({:.3f} to {:.3f})".format(*ratio), flush=True)
    return {"members": args.members, "seconds": times, "ratio": ratio}


def measure_linear(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of prediction and training against the number of items, on a tiny random model."""
    from datasets import concatenate_datasets

    from dappr_llm.text.data.tasks import load_task

    pool = concatenate_datasets([load_task(task, "train", args.data_root) for task in ("obqa", "csqa")])
    pool = pool.shuffle(seed=0)
    bench = Bench("tiny", [("pool", 5, pool.select(range(64)))], tempfile.mkdtemp())
    bench.ours()
    found: dict[str, Any] = {"items": args.sizes, "predict": [], "train": []}
    for size in args.sizes:
        rows = pool.select(range(size))
        found["predict"].append(
            min(benchlib.seconds(lambda rows=rows: bench.trainer.predict_table(rows)) for _ in range(2))
        )
        found["train"].append(benchlib.seconds(lambda rows=rows: _epoch(bench, rows)))
    table = []
    for name in ("predict", "train"):
        slope, exponent, fit = _fit(args.sizes, found[name])
        found[f"{name}_fit"] = {"ms_per_item": 1000 * slope, "exponent": exponent, "r2": fit}
        table.append([name, *(f"{value:.2f}" for value in found[name]), 1000 * slope, exponent, fit])
    heads = ["seconds for", *map(str, args.sizes), "ms per item", "exponent of growth", "R² of the line"]
    benchlib.show("Cost against items (a tiny random model: overhead outside the model dominates)", heads, table)
    return found


def _epoch(bench: Bench, rows: Dataset) -> None:
    from dappr_llm import DAPPrConfig, DAPPrTrainer
    from dappr_llm.methods import get_method

    args = DAPPrConfig(
        tempfile.mkdtemp(), report_to="none", disable_tqdm=True, num_train_epochs=1, save_strategy="no",
        per_device_train_batch_size=16, logging_steps=1000, learning_rate=1e-4,
    )  # fmt: skip
    bench.backend.num_choices = 5
    bench.backend._read_width(5)
    trainer = DAPPrTrainer(bench.model, args, rows, method=get_method("ce"), backend=bench.backend)
    trainer.train()


def _fit(sizes: list[int], seconds: list[float]) -> tuple[float, float, float]:
    """Slope of a least-squares line, growth exponent between the two largest sizes, and R² of the line."""
    x, y = np.asarray(sizes, float), np.asarray(seconds)
    slope, start = np.polyfit(x, y, 1)
    rest = ((y - slope * x - start) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    exponent = np.log(y[-1] / y[-2]) / np.log(x[-1] / x[-2])
    return float(slope), float(exponent), float(1 - rest)


def main() -> None:
    parser = benchlib.arguments(__doc__ or "")
    benchlib.add_dtype(parser)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "mistral-shaped"])
    parser.add_argument("--fraction", type=float, default=0.1, help="share of each set (default: 0.1)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--again", type=int, default=50, help="rows of each task for the second run; 0: all")
    parser.add_argument("--members", type=int, default=3, help="members of the ensemble (default: 3)")
    parser.add_argument("--linear", action="store_true", help="only: how cost grows with the number of items")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 300, 1000, 3000, 10_000])
    parser.add_argument("--memory-of", help="internal: print the peak memory of one variant")
    args = benchlib.parse(parser)
    if args.memory_of:
        return memory(args, args.memory_of)
    content: dict[str, Any] = {"machine": benchlib.machine()}
    if args.linear:
        content["linear"] = measure_linear(args)
    else:
        content["predict"] = [measure(args, model) for model in args.models]
        content["memory"] = measure_memory(args)
        if args.models[0] not in benchlib.RANDOM:  # a random base model cannot be loaded again
            content["again"] = measure_again(args)
            content["ensemble"] = measure_ensemble(args)
    return benchlib.save(args.json and Path(args.json), content)


if __name__ == "__main__":
    main()
