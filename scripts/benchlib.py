"""Shared code of the benchmarks: models, alternating timing of variants, peak memory, tables."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scriptlib
import torch

from dappr_llm.core import checkpoint

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Dense bfloat16 FLOP/s of GPUs, from their data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "4090": 165e12}


PLAIN = "float32"  # what the published tables of CPUs were measured in


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments that every benchmark has."""
    parser = scriptlib.arguments(description)
    parser.add_argument("--data-root", help="local folder with Hub datasets in their row layout")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    return parser


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """`--dtype`, for benchmarks that load a base model with [`load_model`]."""
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=f"of the base model (CPUs: {PLAIN})")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The parsed command line; sets the number of CPU threads."""
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def machine() -> dict[str, Any]:
    """Hardware and library versions, which are printed with every measurement."""
    found: dict[str, Any] = {"machine": platform.machine(), "threads": torch.get_num_threads()}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        found |= {"cpu": names[0] if names else platform.processor(), "cores": len(names)}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return {**found, "versions": checkpoint.versions()}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# Random models with Mistral's proportions: head size 128, four query heads per key head, MLP 3.5 x hidden size.
RANDOM = {
    "mistral-shaped": {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 12},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},  # to test the scripts
}


def random_model(name: str) -> PreTrainedModel:
    """A model of `RANDOM`, with the vocabulary of the bundled model, whose tokenizer it uses."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=49152, num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=2048,
        sliding_window=None, pad_token_id=0, **RANDOM[name],
    )  # fmt: skip
    return MistralForCausalLM(config)


def load_model(name: str, dtype: str | None = None) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """A model with a LoRA of rank 8 on q, v and the head, and its tokenizer (for random models the bundled one's)."""
    import warnings

    from peft import LoraConfig
    from transformers.utils import logging

    from dappr_llm.text import lm
    from dappr_llm.text.precision import resolve_dtype

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
    tokenizer = lm.load_tokenizer("smollm2-135m")
    held = resolve_dtype(dtype or ("auto" if torch.cuda.is_available() else PLAIN))
    base = random_model(name).to(held) if name in RANDOM else lm.load_lm(name, held)
    torch.manual_seed(0)
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM"
    )  # fmt: skip
    model = lm.add_adapter(base, lora, name if name == "smollm2-135m" else None)
    return model.to(device()), tokenizer


def trunk_parameters(model: PeftModel) -> int:
    """Number of parameters of the decoder layers, without embeddings and head."""
    base = model.get_base_model()
    ignored = {
        id(p) for part in (base.get_input_embeddings(), base.get_output_embeddings()) for p in part.parameters()
    }
    return sum(p.numel() for p in base.parameters() if id(p) not in ignored)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, including pending GPU work."""
    wait()
    start = clock()
    work()
    wait()
    return clock() - start


def rounds(
    variants: dict[str, Callable[[Any], Any]], parts: Sequence[Any], repeats: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """
    Seconds of every variant over all parts, once per repeat.

    Variants alternate within each part, each time in another order, so that other load on the machine affects all of
    them alike.
    """
    names = list(variants)
    if warm_up:
        for name in names:
            variants[name](parts[0])
    found: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        total = dict.fromkeys(names, 0.0)
        for number, part in enumerate(parts):
            shift = (repeat + number) % len(names)
            for name in names[shift:] + names[:shift]:
                total[name] += seconds(lambda name=name, part=part: variants[name](part))
        for name in names:
            found[name].append(total[name])
    return found


def interleaved(works: dict[str, Callable[[], Any]], rounds: int, warmup: int = 3) -> dict[str, np.ndarray]:
    """
    Seconds of several functions, called alternately: CPU time of this process, or wall-clock time with a GPU.

    Args:
        works (`dict[str, Callable]`):
            The functions, by name.
        rounds (`int`):
            Number of timed calls of each.
        warmup (`int`, *optional*, defaults to 3):
            Untimed calls before.
    """
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warmup + rounds):
        for name in list(works) if turn % 2 == 0 else list(works)[::-1]:
            spent = seconds(works[name], clock)
            if turn >= warmup:
                found[name].append(spent)
    return {name: np.array(values) for name, values in found.items()}


def median_ratio(first: np.ndarray, second: np.ndarray, resamples: int = 2000) -> tuple[float, float, float]:
    """Median of paired ratios `first / second` and its 95 % bootstrap interval."""
    ratios = first / second
    draws = np.random.default_rng(0).integers(0, len(ratios), (resamples, len(ratios)))
    low, high = np.quantile(np.median(ratios[draws], axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def ratio(times: dict[str, list[float]], name: str, to: str) -> tuple[float, float, float]:
    """Median, minimum and maximum over the repeats of the ratio of two variants' times."""
    each = [one / other for one, other in zip(times[name], times[to], strict=True)]
    return statistics.median(each), min(each), max(each)


def matmul_peak() -> float:
    """Peak FLOP/s: from the data sheet for known GPUs, otherwise measured with a large matrix product."""
    if torch.cuda.is_available():
        named = [peak for name, peak in PEAKS.items() if name in torch.cuda.get_device_name()]
        if named:
            return named[0]
    size = 8192 if torch.cuda.is_available() else 1024
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    one = torch.randn(size, size, device=device(), dtype=dtype)
    best = min(seconds(lambda: one @ one) for _ in range(10))
    return 2 * size**3 / best


# --- memory -------------------------------------------------------------------------------------------------------


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def peak_memory(work: Callable[[], Any]) -> int:
    """Peak memory of `work` in bytes above that before the call: of the GPU, or of the process (Linux)."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def in_process(options: Sequence[str]) -> Any:
    """Run this script with other arguments in a new process; returns the JSON of its last line."""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # a single malloc arena, so that freed memory is reused
    command = [sys.executable, sys.argv[0], *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


# --- output -------------------------------------------------------------------------------------------------------


def show(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a Markdown table."""
    print(f"\n{title}\n\n| " + " | ".join(heads) + " |\n|" + " ---: |" * len(heads))
    for row in rows:
        print("| " + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row) + " |")
    sys.stdout.flush()


def save(path: Path | None, content: dict[str, Any]) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
        print(f"\nWritten: {path}")
