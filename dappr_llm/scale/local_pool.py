"""Runs `dappr train` jobs as subprocesses, one per device at a time; a failed job does not stop the others."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from ..core import checkpoint
from ..core.errors import UserError
from ..core.files import folder_lock
from ..core.terminal import show
from ..evaluation.results import load_results

_POLL = 0.2  # seconds
_LOCK_WAIT = 120  # seconds that a run of a killed sweep may need to save and release its folder lock


@dataclass(frozen=True)
class Job:
    """
    One `dappr train` run.

    Args:
        name (`str`): Name in messages.
        folder (`Path`): Its output folder.
        recipe (`Path`): Its recipe file.
        overrides (`tuple[str, ...]`): Recipe overrides `section.key=value`.
        after (`str`, *optional*): Folder of a run that must be finished first.
    """

    name: str
    folder: Path
    recipe: Path
    overrides: tuple[str, ...]
    after: str | None = None

    @property
    def log(self) -> Path:
        """Log file of the run's output, beside its folder, which `dappr train` owns."""
        return self.folder.with_suffix(".log")

    def command(self) -> list[str]:
        """Command line of the run; `--resume` starts from the beginning if there is nothing to resume."""
        settings = [part for override in self.overrides for part in ("--set", override)]
        return [sys.executable, "-m", "dappr_llm", "train", str(self.recipe), *settings, "--resume"]


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    slot: int
    start: float


def visible_devices() -> list[str]:
    """GPUs visible to this process, in the format of `CUDA_VISIBLE_DEVICES`; empty without GPUs."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def run_jobs(jobs: list[Job], slots: list[str | None], done: set[str]) -> tuple[dict[str, str], bool]:
    """
    Run jobs, one per slot at a time.

    Args:
        jobs (`list[Job]`):
            Jobs, started in this order as far as `after` allows.
        slots (`list[str]`):
            Device of each slot; `None`: the CPU. One job runs per slot at a time.
        done (`set[str]`):
            Folders of finished runs; this function adds to it.

    Returns:
        `tuple`: Reasons of failures by the job's folder, and whether the sweep was interrupted.
    """
    waiting, total = list(jobs), len(jobs)
    running: list[_Running] = []
    failed: dict[str, str] = {}
    times: list[float] = []
    stop = _StopRequest()
    with stop:
        while (waiting and not stop.requested) or running:
            free = sorted(set(range(len(slots))) - {run.slot for run in running})
            while free and not stop.requested and (job := _next_ready(waiting, done, failed)):
                waiting.remove(job)
                run = _start(job, slots[free[0]], free.pop(0))
                running.append(run)
                number = total - len(waiting)
                show(f"[{number}/{total}] {job.name}: started, log in {job.log}")
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                times.append(time.monotonic() - run.start)
                left = (len(waiting) + len(running)) * sum(times) / len(times) / len(slots)
                _settle(run, done, failed, stop.requested, left)
            if not running and waiting and not stop.requested and not _next_ready(waiting, done, failed):
                break  # the remaining jobs wait for runs that are not part of this sweep
            stop.forward([run.process for run in running])
            time.sleep(_POLL)
    return failed, stop.requested


def _next_ready(waiting: list[Job], done: set[str], failed: dict[str, str]) -> Job | None:
    """The first job whose prerequisite is finished; jobs whose prerequisite failed are marked as failed."""
    for job in list(waiting):
        if job.after is None or job.after in done:
            return job
        if job.after in failed:
            waiting.remove(job)
            failed[str(job.folder)] = f"{job.name} needs {job.after}, which failed"
            show(f"{job.name}: left out, since {job.after} failed")
    return None


def _start(job: Job, device: str | None, slot: int) -> _Running:
    job.folder.mkdir(parents=True, exist_ok=True)
    _wait_for_lock(job.folder)
    environment = dict(os.environ)
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    log = open(job.log, "ab")  # noqa: SIM115 - closed when the process has ended
    process = subprocess.Popen(
        job.command(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # the terminal sends Ctrl-C to this process only, which forwards it once
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    return _Running(job, process, log, slot, time.monotonic())


def _end_with_parent() -> None:
    """Linux: the run receives SIGTERM, and so saves and stops, if the sweep's process is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _wait_for_lock(folder: Path) -> None:
    end = time.monotonic() + _LOCK_WAIT
    while True:
        try:
            with folder_lock(folder):
                return
        except UserError:
            if time.monotonic() > end:
                raise
            time.sleep(1)


def _settle(run: _Running, done: set[str], failed: dict[str, str], stopping: bool, left: float) -> None:
    """Record and print the outcome of an ended run; `left` is the estimated time of the remaining runs in seconds."""
    run.log.close()
    took = time.monotonic() - run.start
    code = run.process.returncode
    if code == 0 and (run.job.folder / checkpoint.RESULTS).is_file():
        done.add(str(run.job.folder))
        results, _ = load_results(run.job.folder / checkpoint.RESULTS)
        accuracy = results.get("id/accuracy", float("nan"))
        ahead = f", about {_duration(left)} to go" if left else ""
        show(f"{run.job.name}: done in {_duration(took)}, accuracy {100 * accuracy:.1f}{ahead}")
    elif stopping and code in (130, -signal.SIGTERM, -signal.SIGINT):
        show(f"{run.job.name}: stopped and saved")
    else:
        failed[str(run.job.folder)] = f"exit code {code}: {_last_line(run.job.log)}"
        show(f"{run.job.name}: FAILED after {_duration(took)}, {failed[str(run.job.folder)]}")


def _last_line(log: Path) -> str:
    text = log.read_bytes()[-4000:].decode(errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


class _StopRequest:
    """Handles SIGINT and SIGTERM: the first one terminates every run (it saves and stops), the second kills them."""

    def __init__(self) -> None:
        self.requested = False
        self._count = 0
        self._sent = 0

    def __enter__(self) -> _StopRequest:
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._count += 1
        if self._count == 1:
            show("\nStopping: every run saves after its step. Once more to end them at once.")

    def forward(self, processes: list[subprocess.Popen[bytes]]) -> None:
        """Send each received signal on to the runs, once."""
        if self._sent < self._count:
            end: Callable[[subprocess.Popen[bytes]], None] = subprocess.Popen.terminate
            end = end if self._count == 1 else subprocess.Popen.kill
            for process in processes:
                end(process)
            self._sent = self._count
