"""
Cost of a training step: a plain baseline, our trainer, and a lower bound.

    python scripts/bench_train.py --data-root data
    python scripts/bench_train.py --data-root data --tasks obqa --models smollm2-135m --batches 6 --repeats 5
    python scripts/bench_train.py --data-root data --tasks obqa --dtypes

Batches of 16 real questions in random order, LoRA of rank 8 on q, v and the head, one optimizer step each:

  a        plain baseline: tokenised inside the step, padded to the longest prompt of the batch, logits of the whole
           vocabulary at every position, of which the logits of the answer letters at the last one are used
  ours     the step of `DAPPrTrainer`: no padding, shared prefixes computed once, only the answer letters' logits
  ours_ce  the same with cross-entropy, to measure the additional cost of DAPPr's loss
  no_share without padding, but without sharing prefixes
  compiled ours with `torch_compile: true` (only with `--compile`; compile time is reported separately)
  c        lower bound: forward and backward pass of the decoder without a head, on as many real tokens, no padding

Variants alternate batch by batch and repeat; ratios are those of sums over the same batches, given as median (minimum
to maximum) over the repeats. Peak memory above that of the loaded model is measured in a separate process for each
variant. The learning rate is 0, so that all variants must compute the same loss, which is checked.

With `--dtypes` only our steps and predictions are measured, of one base model in float32 and in bfloat16, in turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import TYPE_CHECKING, Any

import benchlib
import torch

if TYPE_CHECKING:
    from dappr_llm.methods import Method

Batch = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # prepared rows, and the same rows as items


class Bench:
    """A model, batches of rows, and the variants of a training step to measure."""

    def __init__(
        self,
        model_name: str,
        task: str,
        batches: int,
        size: int,
        root: str | None,
        compiled: bool = False,
        dtype: str | None = None,
    ):
        from dappr_llm import DAPPrConfig, DAPPrTrainer
        from dappr_llm.methods import get_method
        from dappr_llm.text.backend import TextBackend
        from dappr_llm.text.data.tasks import load_task

        self.model, self.tokenizer = benchlib.load_model(model_name, dtype)
        self.method, self.cross_entropy = get_method("dappr"), get_method("ce")
        rows = load_task(task, "train", root)
        width = max(map(len, rows["options"]))
        self.backend = TextBackend(self.model, self.tokenizer, self.method, width)
        args = DAPPrConfig(tempfile.mkdtemp(), report_to="none", learning_rate=0.0)
        self.trainer = DAPPrTrainer(self.model, args, method=self.method, backend=self.backend)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        chosen = rows.select(order[: batches * size])
        prepared = self.backend.prepare(chosen)
        self.batches = [
            (list(prepared.select(range(i, i + size))), chosen.select(range(i, i + size)).to_list())
            for i in range(0, batches * size, size)
        ]
        weights = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=0.0, fused=True)
        self.losses: dict[str, float] = {}
        self.model.train()
        self.compiled_blocks: dict[torch.nn.Module, Any] = {}
        if compiled:
            self.backend.compile_blocks(self.model)
            blocks = [part for part in self.model.modules() if part._compiled_call_impl is not None]
            self.compiled_blocks = {block: block._compiled_call_impl for block in blocks}
            self._switch(False)

    def _step(self, name: str, loss: torch.Tensor, optimize: bool = True) -> None:
        loss.backward()
        if optimize:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[name] = float(loss.detach())

    def plain(self, batch: Batch) -> None:
        from dappr_llm.core.outputs import Outputs
        from dappr_llm.methods import Progress

        ids = self.backend.readout.token_ids(self.backend.num_choices or 4)
        texts = [self.backend.prompt.render(row["question"], row["options"]) for row in batch[1]]
        labels = torch.tensor([row["label"] for row in batch[1]], device=benchlib.device())
        inputs = self.tokenizer(texts, padding=True, return_tensors="pt").to(benchlib.device())
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        logits = self.model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], position_ids=positions
        ).logits
        answers = logits[:, -1, ids].float()
        terms = self.method.loss(Outputs(logits=answers), labels, Progress(0, 1))
        self._step("a", sum(terms.values()).mean())  # type: ignore[union-attr]

    def _ours(self, name: str, batch: Batch, method: Method, share: bool = True) -> None:
        self.trainer.method, self.backend.reader.share_prefix = method, share
        inputs = self.trainer._prepare_inputs(self.backend.collate(batch[0]))
        self._step(name, self.trainer.compute_loss(self.model, inputs))

    def ours(self, batch: Batch) -> None:
        self._ours("ours", batch, self.method)

    def ours_ce(self, batch: Batch) -> None:
        self._ours("ours_ce", batch, self.cross_entropy)

    def no_share(self, batch: Batch) -> None:
        self._ours("no_share", batch, self.method, share=False)

    def compiled(self, batch: Batch) -> None:
        self._switch(True)
        self._ours("compiled", batch, self.method)
        self._switch(False)

    def _switch(self, on: bool) -> None:
        for block, call in self.compiled_blocks.items():
            block._compiled_call_impl = call if on else None

    def trunk(self, batch: Batch) -> None:
        tokens = [token for row in batch[0] for token in row["input_ids"]]
        length = len(tokens) // len(batch[0])  # the remainder is left out, which can only lower the bound
        ids = torch.tensor(tokens[: length * len(batch[0])], device=benchlib.device()).view(-1, length)
        hidden = self.model.get_base_model().get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        self._step("c", hidden[:, -1].float().square().mean(), optimize=False)

    def predict(self, batch: Batch) -> None:
        self.model.eval()
        with torch.no_grad():
            self.trainer.method, self.backend.reader.share_prefix = self.method, True
            inputs = self.trainer._prepare_inputs(self.backend.collate(batch[0]))
            self.method.predict(self.backend.read(self.model, inputs))
        self.model.train()

    def variants(self) -> dict[str, Any]:
        return {
            "a": self.plain,
            "ours": self.ours,
            "ours_ce": self.ours_ce,
            "no_share": self.no_share,
            **({"compiled": self.compiled} if self.compiled_blocks else {}),
            "c": self.trunk,
        }


def memory(args: argparse.Namespace, name: str) -> None:
    bench = Bench(args.models[0], args.tasks[0], args.batches, args.batch_size, args.data_root, dtype=args.dtype)
    with torch.no_grad():  # touch every weight, so that it is resident before measuring starts
        bench.model(input_ids=torch.tensor([[5, 6]], device=benchlib.device()))

    def work() -> None:
        for batch in bench.batches:
            bench.variants()[name](batch)

    print(json.dumps(benchlib.peak_memory(work)))


def measure(args: argparse.Namespace, model_name: str, task: str, repeats: int) -> dict[str, Any]:
    bench = Bench(model_name, task, args.batches, args.batch_size, args.data_root, args.compile, args.dtype)
    if args.compile:
        print(f"First compiled step: {benchlib.seconds(lambda: bench.compiled(bench.batches[0])):.1f} s", flush=True)
    times = benchlib.rounds(bench.variants(), bench.batches, repeats)
    tokens = sum(len(row["input_ids"]) for prepared, _ in bench.batches for row in prepared)
    bench.backend.reader.share_prefix = True  # the last variant may have turned it off
    packed = sum(bench.backend.collate(prepared)["packed"]["input_ids"].numel() for prepared, _ in bench.batches)
    longest = sum(len(b) * max(len(row["input_ids"]) for row in b) for b, _ in bench.batches)
    flops = 4 * benchlib.trunk_parameters(
        bench.model
    )  # per token: forward pass, and backward pass to the activations only (weights are frozen)
    same = [name for name in times if name not in ("a", "c", "ours_ce")]
    apart = max(abs(bench.losses[name] - bench.losses["a"]) for name in same)
    exact = benchlib.device().type == "cpu" and args.dtype != "bfloat16"
    assert not exact or apart < 1e-3 * (1 + abs(bench.losses["a"])), bench.losses
    peak = benchlib.matmul_peak()
    found = {
        "model": model_name, "task": task, "batches": args.batches, "batch_size": args.batch_size,
        "tokens": {"real": tokens, "padded": longest, "computed": packed}, "loss_difference": apart,
        "seconds": times, "peak_flops": peak,
        "tokens_per_second": {name: tokens / min(values) for name, values in times.items()},
        "mfu": {name: flops * tokens / min(values) / peak for name, values in times.items()},
    }  # fmt: skip
    pairs = [(name, to) for name in times for to in ("a", "c") if name != to] + [("ours", "ours_ce")]
    pairs += [("compiled", "ours")] if args.compile else []
    found["ratios"] = {f"{name}/{to}": benchlib.ratio(times, name, to) for name, to in pairs}
    title = f"{model_name}, {task}: {args.batches} batches of {args.batch_size}, {repeats} repeats; tokens {tokens} "
    title += f"real, {longest} padded, {packed} computed by ours"
    rows = []
    for name in times:
        pairs = (found["ratios"].get(f"{name}/{to}", (1.0, 1.0, 1.0)) for to in ("a", "c"))
        to_a, to_c = (f"{median:.3f} ({low:.3f} to {high:.3f})" for median, low, high in pairs)
        rows.append([
            name, min(times[name]) / args.batches, to_a, to_c, round(found["tokens_per_second"][name]),
            found["mfu"][name],
        ])  # fmt: skip
    benchlib.show(title, ["variant", "s per step", "time / a", "time / c", "real tokens/s", "MFU"], rows)
    median, low, high = found["ratios"]["ours/ours_ce"]
    print(f"\nDAPPr / cross-entropy on our path: {median:.3f} ({low:.3f} to {high:.3f})", flush=True)
    if args.compile:
        print("Compiled / ours: {:.3f} ({:.3f} to {:.3f})".format(*found["ratios"]["compiled/ours"]), flush=True)
    return found


def measure_dtypes(args: argparse.Namespace, model_name: str, task: str) -> dict[str, Any]:
    """Steps and predictions of one base model in both dtypes, in turns."""
    size = (args.batches, args.batch_size, args.data_root)
    benches = {dtype: Bench(model_name, task, *size, dtype=dtype) for dtype in ("float32", "bfloat16")}
    works = {}
    for dtype, bench in benches.items():
        works |= {f"step {dtype}": bench.ours, f"prediction {dtype}": bench.predict}
    times = benchlib.rounds(works, benches["float32"].batches, args.repeats)
    losses = {dtype: bench.losses["ours"] for dtype, bench in benches.items()}
    ratios = {kind: benchlib.ratio(times, f"{kind} bfloat16", f"{kind} float32") for kind in ("step", "prediction")}
    rows = []
    for kind, (median, low, high) in ratios.items():
        best = [min(times[f"{kind} {dtype}"]) / args.batches for dtype in benches]
        rows.append([kind, *best, f"{median:.3f} ({low:.3f} to {high:.3f})"])
    title = f"{model_name}, {task}: {args.batches} batches of {args.batch_size}, {args.repeats} repeats; loss {losses}"
    benchlib.show(title, ["", "s, float32", "s, bfloat16", "bfloat16 / float32"], rows)
    return {"model": model_name, "task": task, "seconds": times, "ratios": ratios, "losses": losses}


def measure_memory(args: argparse.Namespace, model_name: str, task: str) -> dict[str, int]:
    common = ["--models", model_name, "--tasks", task, "--batch-size", str(args.batch_size), "--batches", "2"]
    common += ["--data-root", args.data_root] if args.data_root else []
    common += ["--dtype", args.dtype] if args.dtype else []
    found = {name: benchlib.in_process([*common, "--memory-of", name]) for name in ("a", "ours", "no_share", "c")}
    rows = [[name, round(size / 2**20), size / found["a"]] for name, size in found.items()]
    benchlib.show(f"{model_name}, {task}: peak memory above the loaded model", ["variant", "MiB", "/ a"], rows)
    return found


def main() -> None:
    parser = benchlib.arguments(__doc__ or "")
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "mistral-shaped"])
    parser.add_argument("--tasks", nargs="+", default=["obqa", "csqa"])
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3, help="for the first model and task; the others get one less")
    parser.add_argument("--compile", action="store_true", help="also measure torch_compile: true")
    benchlib.add_dtype(parser)
    parser.add_argument("--dtypes", action="store_true", help="only the ratio of bfloat16 to float32")
    parser.add_argument("--memory-of", help="internal: print the peak memory of one variant")
    args = benchlib.parse(parser)
    if args.memory_of:
        return memory(args, args.memory_of)
    content: dict[str, Any] = {"machine": benchlib.machine(), "time": [], "memory": {}}
    print(json.dumps(content["machine"]))
    if args.dtypes:
        content["time"] = [measure_dtypes(args, model, task) for model in args.models for task in args.tasks]
        return benchlib.save(args.json, content)
    for number, (model, task) in enumerate((m, t) for m in args.models for t in args.tasks):
        if number and model != args.models[0] and task != args.tasks[0]:
            continue  # for the other models, the first task only
        content["time"].append(measure(args, model, task, max(1, args.repeats - (number > 0))))
    content["memory"] = measure_memory(args, args.models[0], args.tasks[0])
    return benchlib.save(args.json, content)


if __name__ == "__main__":
    main()
