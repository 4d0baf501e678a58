"""Notices within the first tenth of a run that nothing is learnt, whatever the method, and says what to do."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..methods.base import Scheduled
from .defaults import is_chance

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from .config import DAPPrConfig
    from .trainer import DAPPrTrainer

logger = logging.getLogger(__name__)

_SHARE = 10  # a tenth of the steps
_LEAST_ROWS = 100  # with fewer, an accuracy says nothing
_GROWTH = 1.2  # of total evidence, beyond which it is what makes the loss fall


class ChanceMonitor(TrainerCallback):
    """
    Compares training accuracy with guessing, once after the first tenth of the steps and once after half of them.

    Args:
        trainer (`DAPPrTrainer`):
            The trainer, which adds the rows of each step.
    """

    def __init__(self, trainer: DAPPrTrainer):
        self.trainer = trainer
        self._due: list[int] = []
        self._clear()

    def _clear(self) -> None:
        self._sums: Tensor | None = None  # rows, right answers, chance
        self._evidence: list[Tensor] = []  # mean alpha0 of the first batch, and of the last one

    def add(self, stats: dict[str, Tensor], keep: Tensor | None = None) -> None:
        """Add the rows of a batch; stays on the device, so that a step waits for nothing."""
        if not self._due:
            return
        known = torch.isfinite(stats["accuracy"]) if keep is None else keep & torch.isfinite(stats["accuracy"])
        parts = (known, stats["accuracy"].masked_fill(~known, 0), stats["chance"].masked_fill(~known, 0))
        sums = torch.stack([part.double().sum() for part in parts])
        self._sums = sums if self._sums is None else self._sums + sums
        if "alpha0" in stats:
            self._evidence = [*self._evidence[:1], stats["alpha0"].detach().nanmean()]

    def on_train_begin(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        least = math.ceil(_LEAST_ROWS / self.trainer.get_total_train_batch_size(args))
        wanted = (math.ceil(state.max_steps / _SHARE), math.ceil(state.max_steps / 2))
        # A run that goes on counts the rows of now; the same steps in every process.
        self._due = sorted({max(step, state.global_step + least) for step in wanted})
        self._clear()

    def on_step_end(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._due or state.global_step < self._due[0]:
            return
        del self._due[0]
        message = self._judge(state)
        if message is None:
            self._due = []  # it learns
        elif state.is_world_process_zero:
            logger.warning(message)
        self._clear()

    def _judge(self, state: TrainerState) -> str | None:
        assert self._sums is not None
        sums, evidence = self._sums, [value.item() for value in self._evidence]
        if self.trainer.args.world_size > 1:
            torch.distributed.all_reduce(sums)
        rows, right, chance = sums.tolist()
        if not rows or not is_chance(right / rows, chance / rows, int(rows)):
            return None
        return (
            f"Training accuracy is at chance after {state.global_step} of {state.max_steps} steps "
            f"({right / rows:.2f} on {int(rows)} rows, chance {chance / rows:.2f}). If it stays there: "
            + remedy(self.trainer, evidence)
        )


def remedy(trainer: DAPPrTrainer, evidence: list[float]) -> str:
    """
    What to do about a model at chance, in one sentence.

    Args:
        trainer (`DAPPrTrainer`):
            Whose model it is.
        evidence (`list[float]`):
            Mean total evidence at the start and now; empty for methods without.
    """
    method, found = trainer.method, []
    if len(evidence) == 2 and evidence[1] > _GROWTH * evidence[0]:
        grown = f"all evidence grew alike, from {evidence[0]:.1f} to {evidence[1]:.1f}: "
        if isinstance(method, Scheduled) and method.regularised and method.schedule != "constant":
            found.append(grown + "set method.schedule: constant with a larger method.reg_weight (5e-3)")
        else:
            found.append(grown + "set train.evidence_offset: auto")
    if trainer.backend.has_new_head and trainer.args.head_init != "probe":
        found.append("set train.head_init: probe")
    elif trainer.backend.class_names is None:
        found.append("start from an adapter that can answer by letter (model.adapter, see recipes/binding.yaml)")
    return ", ".join([*found, "try another train.learning_rate or more steps"]) + ", and check the labels"
