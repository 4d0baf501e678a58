"""Evaluate and save every so many epochs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from ..config import DAPPrConfig


class EveryEpochs(TrainerCallback):
    """
    Evaluates and saves every so many epochs and after the last one, where the strategies say `epoch`.

    Of equally good checkpoints the later one counts, as in the reference code.

    Args:
        every (`int`): How many epochs.
    """

    def __init__(self, every: int):
        self.every = every

    def on_epoch_end(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        last = state.epoch >= args.num_train_epochs - 1e-6
        if round(state.epoch) % self.every and not last:
            control.should_evaluate = control.should_save = False

    def on_evaluate(
        self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        name = args.metric_for_best_model
        key = name if not name or name.startswith("eval_") else f"eval_{name}"
        if key and metrics and metrics.get(key) == state.best_metric:
            # Trainer keeps a checkpoint only if its metric is better; one ulp less lets an equal one win.
            state.best_metric = math.nextafter(state.best_metric, -math.inf if args.greater_is_better else math.inf)
