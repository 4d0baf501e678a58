"""Ctrl-C during training: finish the step, save, stop."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from ...core.terminal import show

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from ..config import DAPPrConfig

_ECHO = 1.0  # seconds within which a second signal counts as a copy of the first


class InterruptCallback(TrainerCallback):
    """
    On SIGINT or SIGTERM, saves a resumable checkpoint at the end of the current step and stops training.

    A second Ctrl-C interrupts at once, unless it follows within a second: launchers forward a signal that the terminal
    has already sent to their processes. With several ranks the stop request is reduced over all of them after each
    step, so that they stop at the same step.
    """

    def __init__(self) -> None:
        self.requested = False
        self.stopped = False
        self._when = 0.0
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.requested = self.stopped = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested:
            if time.monotonic() - self._when < _ECHO:
                return
            self.restore()
            raise KeyboardInterrupt
        self.requested = True
        self._when = time.monotonic()
        show("\nStopping after this step and saving; press Ctrl-C again to stop at once.")

    def on_step_end(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        requested = self.requested
        if args.world_size > 1:
            flag = torch.tensor(float(requested), device=args.device)
            torch.distributed.all_reduce(flag)
            requested = bool(flag.item())
        if requested:
            self.stopped = True
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the previous signal handlers; also called when training ends in an error."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
