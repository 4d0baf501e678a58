"""What training shows: one aligned line per log, the table of each evaluation, and in a terminal a bar below them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import has_length

from ...core.files import say
from ...evaluation.reporting.tables import number
from ...evaluation.reporting.text_tables import render_answers

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from ..config import DAPPrConfig
    from ..trainer import DAPPrTrainer

# Heading, key in the log, kind of number.
_FIGURES = (
    ("loss", "loss", "short"),
    ("accuracy", "accuracy", "percent"),
    ("NLL", "nll", "plain"),
    ("uncertainty", "epistemic", "plain"),
)
_WIDTHS = (11, 10, 9, 13, 9, 11)  # of these, of the speed and of the time left
_SUMMARY = "train_runtime"  # Trainer's last entry has it


class ProgressLines(ProgressCallback, PrinterCallback):
    """
    Takes the place of Trainer's `ProgressCallback` and `PrinterCallback`, and is removed under these names too.

    Whatever else is logged is in `train_log.jsonl`, in the checkpoints' `trainer_state.json` and with the trackers.
    """

    training_bar: Any
    prediction_bar: Any

    def __init__(self) -> None:
        super().__init__()
        self._clock = StepClock()
        self._above = ""  # what the last thing shown was: "line" or "table"

    def on_train_begin(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.current_step = state.global_step
        self._clock = StepClock()
        self._above = ""
        if state.is_world_process_zero:
            self.training_bar = tqdm(  # gone at the end: the summary says it all
                total=state.max_steps,
                initial=state.global_step,
                leave=False,
                dynamic_ncols=True,
                disable=_hidden(args),
            )

    def on_step_end(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._clock.step()
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_prediction_step(
        self,
        args: DAPPrConfig,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and has_length(eval_dataloader):
            if self.prediction_bar is None:
                self.prediction_bar = tqdm(
                    total=len(eval_dataloader),
                    leave=self.training_bar is None,
                    dynamic_ncols=True,
                    disable=_hidden(args),
                )
            self.prediction_bar.update(1)

    def on_evaluate(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_evaluate(args, state, control, **kwargs)
        self._clock.pause()

    def on_save(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._clock.pause()

    def on_log(
        self,
        args: DAPPrConfig,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.training_bar is None or not logs:  # not rank 0, or an evaluation that a script asked for and is given
            return
        rows = (state.train_batch_size or args.train_batch_size) * args.gradient_accumulation_steps * args.world_size
        if "loss" in logs:
            width = max(len("step"), 2 * len(str(state.max_steps)) + 1)
            if self._above != "line":
                say(("\n" if self._above else "") + heading(width))
                self._above = "line"
            speed, left = self._clock.read(rows, state.max_steps - state.global_step)
            say(line(f"{state.global_step}/{state.max_steps}".rjust(width), logs, speed, left))
        elif _SUMMARY in logs:
            say("\n" + summary(state.global_step, logs))
        else:
            self._show_table(logs)

    def _show_table(self, logs: Mapping[str, Any]) -> None:
        self._clock.pause()
        for text in filter(None, [evaluation(logs), *out_of_distribution(logs)]):
            say(("\n" if self._above == "line" else "") + text)
            self._above = "table"

    def on_train_end(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None


class StepClock:
    """Seconds of the training steps, without evaluations and saving in between, and of everything since the start."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._seconds, self._steps, self._done = 0.0, 0, 0

    def step(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self._seconds += now - self._last
        self._last = now
        self._steps += 1
        self._done += 1

    def pause(self) -> None:
        """What has happened since the last step was none of it."""
        self._last = time.perf_counter()

    def read(self, rows: int, steps_left: int) -> tuple[float, float]:
        """
        Rows per second since it was last read, and seconds until the end at the pace so far, evaluations included.

        Args:
            rows (`int`):
                Rows of a step, of all processes.
            steps_left (`int`):
                Steps that are still to come.
        """
        speed = rows * self._steps / self._seconds if self._seconds else math.nan
        left = (time.perf_counter() - self._start) / self._done * steps_left if self._done else math.nan
        self._seconds, self._steps = 0.0, 0
        return speed, left


def replace_progress(trainer: DAPPrTrainer) -> None:
    """
    Put [`ProgressLines`] in the place of what Trainer prints with; what a user gave as `callbacks` stays.

    Notebooks keep their own table. A user's own `ProgressCallback` or `PrinterCallback` prints instead of ours.
    """
    own = trainer.callback_handler.callbacks.pop()  # Trainer adds it last
    if type(own) not in (ProgressCallback, PrinterCallback):
        trainer.callback_handler.callbacks.append(own)
    elif not any(isinstance(c, ProgressCallback | PrinterCallback) for c in trainer.callback_handler.callbacks):
        trainer.add_callback(ProgressLines())


def heading(width: int) -> str:
    """The heading of the lines; `width` is that of the steps."""
    names = [*(name for name, _, _ in _FIGURES), "rows/s", "left"]
    return "step".rjust(width) + "".join(name.rjust(size) for name, size in zip(names, _WIDTHS, strict=True))


def line(step: str, logs: Mapping[str, Any], speed: float, left: float) -> str:
    """The figures of one log below [`heading`]."""
    cells = [_figure(logs.get(key), kind) for _, key, kind in _FIGURES]
    cells += [_figure(speed, "rate"), duration(left)]
    return step + "".join(cell.rjust(size) for cell, size in zip(cells, _WIDTHS, strict=True))


def summary(step: int, logs: Mapping[str, Any]) -> str:
    """The line after the last step."""
    speed = _figure(logs.get("train_samples_per_second"), "rate")
    return (
        f"Trained to step {step} in {duration(logs[_SUMMARY])}, {speed} rows/s, "
        f"mean loss {_figure(logs.get('train_loss'), 'short')}"
    )


def evaluation(logs: Mapping[str, Any]) -> str:
    """The table of an evaluation's entry; empty if it is none, or its rows have no labels."""
    for key in logs:
        prefix = key.removesuffix("_runtime")  # every evaluation has one, behind its prefix
        if prefix != key and f"{prefix}_accuracy" in logs:
            name = "validation" if prefix == "eval" else prefix.removeprefix("eval_")
            found = {k.removeprefix(f"{prefix}_"): v for k, v in logs.items() if k.startswith(f"{prefix}_")}
            return render_answers(found, name)
    return ""


def out_of_distribution(logs: Mapping[str, Any]) -> list[str]:
    """A line for each OOD set of `monitor_ood_rows`."""
    found = []
    for key, value in logs.items():
        name = key.removeprefix("ood/").removesuffix("/epistemic")
        if key == f"ood/{name}/epistemic":
            evidence = logs.get(f"ood/{name}/alpha0")
            text = "" if evidence is None else f", alpha0 {_figure(evidence, 'short')}"
            found.append(f"OOD {name}: uncertainty {_figure(value, 'plain')}{text}")
    return found


def duration(seconds: float) -> str:
    """Seconds as `0:07`, `12:30`, `3:04:05`, `2 d 03 h`."""
    if math.isnan(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24} d {hours % 24:02} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _figure(value: Any, kind: str) -> str:
    if not isinstance(value, int | float) or math.isnan(value):
        return "-" if value is None or isinstance(value, str) else "nan"
    if kind == "rate":
        return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
    if kind == "short":
        return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1e5 else f"{value:.2e}"
    return number(value, kind)


def _hidden(args: DAPPrConfig) -> bool | None:
    """tqdm's `disable`; `None`: shown in terminals only."""
    return True if args.disable_tqdm else None
