"""
Kills a small training run at random times, resumes it each time, and compares it with an uninterrupted run.

    python scripts/kill_test.py --kills 20

Each kill has a random target: the n-th training step, save, evaluation or prediction of that process, and a delay
after its start. A run that finishes before its kill is checked, and a new run is started. Prints the number of kills
per phase, and fails unless the final weights are bitwise equal.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from scriptlib import arguments

# Imported once in the parent, for all forked children.
_SHARED = (
    *(
        "dappr_llm.training.trainer",
        "dappr_llm.commands.predict",
        "dappr_llm.commands.train",
        "dappr_llm.evaluation.reporting.run_results",
        "dappr_llm.inference.loading",
        "dappr_llm.text.backend",
        "dappr_llm.text.data.tasks",
    ),
    *("datasets", "peft", "matplotlib.pyplot", "sklearn.metrics", "transformers.models.mistral.modeling_mistral"),
    *("transformers.models.auto.modeling_auto", "transformers.optimization", "torch._dynamo", "pyarrow.parquet"),
)
METHODS = {
    b"t": "training_step",
    b"s": "_save_checkpoint",
    b"e": "evaluate",
    b"p": "predict_table",
    b"m": "save_model",
}
NAMES = {b"t": "steps", b"s": "save", b"e": "evaluation", b"p": "prediction", b"m": "save of the model"}
TARGETS = ((b"t", 12), (b"s", 4), (b"s", 4), (b"e", 3), (b"p", 2), (b"m", 4))  # phase, and largest n to wait for
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def prepare(folder: Path) -> Path:
    """A tiny base model and a recipe for it: 12 steps, a save every 2, an evaluation every 3."""
    from tiny import build_model, build_tokenizer, make_rows, write_recipe

    build_model().save_pretrained(folder / "base")
    build_tokenizer().save_pretrained(folder / "base")
    splits = {"train": make_rows(48), "validation": make_rows(64, 60), "test": make_rows(16, 140)}
    return write_recipe(
        folder, folder / "base", splits, make_rows(10, 180, options=5), evidence_offset="auto",
        per_device_train_batch_size=8, num_train_epochs=2, save_strategy="steps", save_steps=2, save_total_limit=2,
        eval_steps=3,
    )  # fmt: skip


def train_arguments(recipe: Path, run: Path) -> list[str]:
    settings = ["train.eval_strategy=steps", "lora.lora_dropout=0.1"]  # dropout: the random state must be restored too
    start = ["train", str(recipe), "--output-dir", str(run), "--resume"]
    return start + [part for text in settings for part in ("--set", text)]


class Child:
    """A run in a forked child process, which inherits the parent's imports."""

    def __init__(self, recipe: Path, run: Path, log: Path):
        sys.stdout.flush()
        self.code: int | None = None
        self.phases = b""
        self._pipe, announce = os.pipe()
        os.set_blocking(self._pipe, False)
        self.pid = os.fork()
        if self.pid:
            os.close(announce)
            return
        code = 1
        try:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            from dappr_llm.commands.main import main as dappr

            announce_phases(announce)
            code = dappr(train_arguments(recipe, run))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def begun(self, phase: bytes) -> int:
        """Number of times that the run has entered a phase."""
        with contextlib.suppress(BlockingIOError):
            self.phases += os.read(self._pipe, 65536)
        return self.phases.count(phase)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def wait(self, seconds: float) -> int:
        limit = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
        if self.code is None:
            self.kill()
        return self.code if self.code is not None else -1


def announce_phases(pipe: int) -> None:
    """Patch the trainer of this process to write one byte to the pipe whenever it enters a phase."""
    from dappr_llm.training.trainer import DAPPrTrainer

    for phase, name in METHODS.items():
        original = getattr(DAPPrTrainer, name)

        def wrapped(*args: Any, _original: Any = original, _phase: bytes = phase, **kwargs: Any) -> Any:
            os.write(pipe, _phase)
            return _original(*args, **kwargs)

        setattr(DAPPrTrainer, name, wrapped)


def kill_once(recipe: Path, run: Path, log: Path, draw: random.Random) -> str | None:
    """Start or resume the run and kill it; returns the phase that was hit, or `None` if the run finished first."""
    log.unlink(missing_ok=True)
    phase, most = draw.choice(TARGETS)
    number, delay = draw.randint(1, most), draw.uniform(0, 0.04)
    process = Child(recipe, run, log)
    limit = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < limit:
        if process.begun(phase) >= number:
            time.sleep(delay)
            process.kill()
            return NAMES[phase]
        time.sleep(0.0005)
    if process.poll() is None:
        process.kill()
        raise SystemExit(f"The run did not end within 300 s:\n{log.read_text()}")
    if process.code != 0:
        raise SystemExit(f"The run could not be resumed (exit code {process.code}):\n{log.read_text()}")
    return None


def weights(run: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    return {name: value.tobytes() for name, value in load_file(run / "adapter_model.safetensors").items()}


def kill_test(kills: int, seed: int, folder: Path) -> dict[str, int]:
    """
    Run the test; returns the number of kills per phase.

    After a run that finished before its kill, a new run is started, so that the number of kills is reached.
    """
    for name in _SHARED:
        importlib.import_module(name)

    draw = random.Random(seed)
    recipe = prepare(folder)
    log = folder / "run.log"
    if Child(recipe, folder / "whole", log).wait(300) != 0:
        raise SystemExit(f"The uninterrupted run failed:\n{log.read_text()}")
    wanted = weights(folder / "whole")
    hits: dict[str, int] = {}
    done = finished = 0
    while done < kills:
        run = folder / f"run{finished}"
        doing = kill_once(recipe, run, log, draw)
        if doing is not None:
            done += 1
            hits[doing] = hits.get(doing, 0) + 1
            print(f"kill {done}: during {doing}", flush=True)
            continue
        check(run, wanted)
        finished += 1
    run = folder / f"run{finished}"
    finish(recipe, run, log)
    check(run, wanted)
    hits["finished runs"] = finished + 1
    return hits


def finish(recipe: Path, run: Path, log: Path) -> None:
    """Resume a run and let it finish."""
    log.unlink(missing_ok=True)
    code = Child(recipe, run, log).wait(300)
    if code != 0:
        raise SystemExit(f"The run could not be resumed (exit code {code}):\n{log.read_text()}")


def check(run: Path, wanted: dict[str, bytes]) -> None:
    if weights(run) != wanted:
        raise SystemExit(f"{run}: the weights differ from the uninterrupted run's")
    for path in (run / "predictions").glob("*.npz"):
        from dappr_llm.evaluation.prediction_table import PredictionTable

        PredictionTable.load(path)
    json.loads((run / "results.json").read_text())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hits = kill_test(args.kills, args.seed, Path(folder))
    runs = hits.pop("finished runs")
    shown = ", ".join(f"{count} during {name}" for name, count in sorted(hits.items()))
    print(f"{sum(hits.values())} kills ({shown}); {runs} runs finished, their weights equal the uninterrupted run's")


if __name__ == "__main__":
    main()
