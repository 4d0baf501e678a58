"""
Throws damaged recipes, command lines, checkpoint and data files at `dappr`: each must end well, or in one sentence.

    python scripts/fuzz.py --cases 5000 --seed 0
    python scripts/fuzz.py --kinds checkpoints --cases 200 --keep failures

Each case is made from its seed alone and runs in a forked process of its own, with limits of time and memory. It fails
if an exception reaches the command line, the process dies or hangs, or an error is not one sentence with exit code 2.
Failing cases are printed with the seed that makes them again, and their files are kept in `--keep`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from scriptlib import arguments

ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "tests" / "fixtures" / "run_v0_1_0"
KINDS = ("recipes", "arguments", "checkpoints", "files")
SECONDS, MEMORY = 60, 12 * 2**30
_WARM = ("dappr_llm.commands.train", "dappr_llm.training.trainer", "dappr_llm.training.build", "dappr_llm.text.build",
         "dappr_llm.inference.pipeline", "dappr_llm.inference.hub", "dappr_llm.vision.build", "datasets", "peft",
         "dappr_llm.evaluation.reporting.run_results", "matplotlib.pyplot", "sklearn.metrics", "pyarrow.parquet",
         "transformers.models.mistral.modeling_mistral", "timm", "dappr_llm.vision.backend", "dappr_llm.scale.plan",
         "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto")  # fmt: skip
TINY_IMAGES = {
    "name": "digits",
    "model": {"backbone": "convnet", "hidden": [8]},
    "method": {"name": "dappr", "reg_weight": 0.01},
    "data": {
        "train": "digits",
        "ood": [],
        "max_train_samples": 32,
        "max_validation_samples": 8,
        "max_test_samples": 8,
    },
    "train": {"per_device_train_batch_size": 16, "num_train_epochs": 1, "save_strategy": "no", "disable_tqdm": True},
}
# Text classification with fixed labels: `heads` is trained, the others are only damaged.
TEXTS = {
    "name": "tickets",
    "model": {"name": "base", "readout": "head"},
    "lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
    "method": {"name": "dappr", "reg_weight": 0.005, "schedule": "constant"},
    "data": {"train": {"path": "tickets.csv", "text": "text", "label": "label"}, "ood": ["other.csv"],
             "checks": "warn"},
    "train": {"per_device_train_batch_size": 8, "max_steps": 1, "save_strategy": "no", "disable_tqdm": True,
              "class_weights": "balanced", "label_smoothing_factor": 0.1, "head_init": "probe", "max_length": 40},
}  # fmt: skip
TOKENS = {**TEXTS, "model": {"name": "base", "readout": "tokens", "answers": {"fruit": " A", "tool": " B"}},
          "train": {**TEXTS["train"], "head_init": "auto", "class_weights": {"fruit": 1.0, "tool": 2.0},
                    "prompt": {"template": "Which? {text} Answer:"}}}  # fmt: skip
TYPED = "Which is a fruit?\nplum\nhammer\n\n"  # for `dappr ask`


def main() -> int:
    """Run the cases; exit code 1 if one failed."""
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=5000, help="how many, over all kinds (default: 5000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; they count up from it")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="what to damage (default: all)")
    parser.add_argument("--keep", type=Path, help="folder for the files of failing cases")
    args = parser.parse_args()
    failures = run(args.cases, args.seed, args.kinds, args.keep)
    return 1 if failures else 0


def run(cases: int, seed: int, kinds: Any = KINDS, keep: Path | None = None) -> list[str]:
    """Run cases and print what became of them; returns the failing ones in words."""
    _warm_up()
    counts: Counter[tuple[str, str]] = Counter()
    failures: list[str] = []
    start = time.monotonic()
    done = 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            stage = prepare(Path(folder))
            for number in range(cases):
                kind = kinds[number % len(kinds)]
                outcome, detail = one_case(stage, kind, seed + number, keep)
                counts[kind, outcome] += 1
                done += 1
                if outcome not in ("accepted", "refused"):
                    failures.append(f"{kind}, seed {seed + number}: {outcome}: {detail}")
                    print(failures[-1], flush=True)
                if sys.stderr.isatty() and number % 20 == 0:
                    print(f"\r{number}/{cases}, {len(failures)} failed", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"Interrupted; --seed {seed + done} goes on from here.", flush=True)
    for kind in kinds:
        found = {outcome: n for (of, outcome), n in sorted(counts.items()) if of == kind}
        print(f"{kind}: {sum(found.values())} cases, " + ", ".join(f"{n} {outcome}" for outcome, n in found.items()))
    print(f"{done} cases from seed {seed}, {len(failures)} failed, {time.monotonic() - start:.0f} s")
    return failures


def _warm_up() -> None:
    """Import once what every forked case needs."""
    import importlib

    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in _WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def prepare(folder: Path) -> Path:
    """A run with its base model and data, a recipe of images, and a checkpoint to resume from."""
    import yaml

    from dappr_llm.commands.main import main as dappr

    shutil.copytree(FIXTURE, folder, dirs_exist_ok=True)
    (folder / "image.yaml").write_text(yaml.safe_dump(TINY_IMAGES))
    (folder / "heads.yaml").write_text(yaml.safe_dump(TEXTS))
    (folder / "tokens.yaml").write_text(yaml.safe_dump(TOKENS))
    write_texts(folder)
    recipe = yaml.safe_load((folder / "run" / "recipe.yaml").read_text())
    recipe["train"] |= {"output_dir": "resumed", "num_train_epochs": 1, "max_steps": 2, "save_strategy": "steps"}
    recipe["train"] |= {"save_steps": 1, "eval_strategy": "no"}
    recipe["data"] |= {"max_test_samples": 8, "max_train_samples": 16, "checks": "warn"}
    (folder / "resumed.yaml").write_text(yaml.safe_dump(recipe))
    with _inside(folder), contextlib.redirect_stdout(io.StringIO()):
        pid = os.fork()  # so that the parent never runs a thread of torch's
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                code = dappr(["train", "resumed.yaml"]) + dappr(["train", "image.yaml", "--output-dir", "images"])
                code += dappr(["train", "heads.yaml", "--output-dir", "heads"])
                code += dappr(["train", "tokens.yaml", "--output-dir", "tokens"])
            os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise SystemExit("fuzz: the runs to damage could not be trained")
        (folder / "resumed" / "results.json").unlink()  # an unfinished run, which can be resumed
    return folder


def write_texts(folder: Path) -> None:
    """Files of texts and labels: `tickets.csv`, `.jsonl` and `.parquet`, and `other.csv` without labels."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    things = {"fruit": ("plum", "fig", "pear"), "tool": ("hammer", "saw", "drill")}
    rows = [
        {"text": f"Which {words[i % 3]} is {i}", "label": label, "stars": i % 5 + 1}
        for i in range(30)
        for label, words in things.items()
    ]
    lines = [",".join(map(str, row.values())) for row in rows]
    (folder / "tickets.csv").write_text("\n".join(["text,label,stars", *lines]) + "\n")
    (folder / "other.csv").write_text("\n".join(["text", *(f"sky {i}" for i in range(8))]) + "\n")
    (folder / "tickets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "tickets.parquet")


@contextlib.contextmanager
def _inside(folder: Path) -> Any:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def one_case(stage: Path, kind: str, seed: int, keep: Path | None) -> tuple[str, str]:
    """What became of one case, and what it was if it failed."""
    import fuzz_cases

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "case"
        shutil.copytree(stage, folder, symlinks=True)
        draw = random.Random(f"{kind}/{seed}")
        command, what = fuzz_cases.MAKE[kind](draw, folder)
        outcome, detail = forked(command, folder)
        if outcome not in ("accepted", "refused"):
            detail = f"{what}; dappr {' '.join(command)[:300]}\n{detail}"
            if keep:
                shutil.copytree(folder, keep / f"{kind}-{seed}", symlinks=True, dirs_exist_ok=True)
                (keep / f"{kind}-{seed}.json").write_text(json.dumps({"command": command, "what": what}, indent=1))
        return outcome, detail


def forked(command: list[str], folder: Path) -> tuple[str, str]:
    """Run `dappr` in a forked process; `accepted`, `refused`, or what went wrong."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.setpgid(0, 0)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        report = _child(command)
        with os.fdopen(write, "wb") as handle:
            handle.write(json.dumps(report).encode())
        os._exit(0)
    os.close(write)
    data = b""
    ends = time.monotonic() + SECONDS
    while select.select([read], [], [], max(0, ends - time.monotonic()))[0]:
        block = os.read(read, 1 << 16)
        if not block:
            break
        data += block
    else:
        os.killpg(pid, signal.SIGKILL)
    os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not data:
        return ("hung", "") if status == -signal.SIGKILL else ("died", f"exit status {status}")
    outcome, detail = json.loads(data)
    return outcome, detail


def _child(command: list[str]) -> tuple[str, str]:
    from dappr_llm.commands.main import main as dappr

    out, err = io.StringIO(), io.StringIO()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # libraries that write to the terminal themselves
        os.dup2(null, stream)
    sys.stdin = io.StringIO(TYPED)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = dappr(command)
    except SystemExit as leaving:  # of argparse
        code = leaving.code
    except BaseException:
        return "traceback", traceback.format_exc()[-3000:]
    lines = err.getvalue().strip().splitlines()
    if "Traceback (most recent call last)" in err.getvalue():
        return "printed traceback", err.getvalue()[-3000:]
    if code == 0:
        return "accepted", ""
    if code != 2 or not lines:
        return "wrong exit", f"exit code {code}: {err.getvalue()[-500:]}"
    first = next((number for number, line in enumerate(lines) if line.startswith("dappr")), len(lines))
    said = lines[first:]
    # A name with a line break in it goes on in an indented line.
    if not said or not all(line.startswith("  ") for line in said[1:]):
        return "not a sentence", err.getvalue()[-1000:]
    if any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for line in said for character in line):
        return "control characters", repr(said)
    return "refused", ""


if __name__ == "__main__":
    sys.exit(main())
