"""Learning rates by whole epochs, as the papers' training loops have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_KINDS: dict[str, dict[str, float]] = {
    "step": {"every": 20, "factor": 0.1},
    "cosine": {"warmup": 10, "start": 1e-6, "floor": 1e-5, "lag": 0},
}


def learning_rate(spec: Mapping[str, Any], base: float, epoch: int, epochs: int) -> float:
    """
    The learning rate of a whole epoch.

    Args:
        spec (`Mapping`):
            `{kind: step, every: 20, factor: 0.1}`, or `{kind: cosine, warmup: 10, start: 1e-6, floor: 1e-5, lag: 0}`:
            linear from `start` over `warmup` epochs, then the cosine as if it had begun at epoch 0. `lag: 1` is what
            the reference code does: each epoch trains with the rate of the one before.
        base (`float`):
            The full rate.
        epoch (`int`):
            From 0.
        epochs (`int`):
            Epochs in all.
    """
    values = {**_KINDS[spec["kind"]], **spec}
    if spec["kind"] == "step":
        return base * values["factor"] ** (epoch // values["every"])
    t = max(epoch - values["lag"], 0)
    if t < values["warmup"]:
        return values["start"] + t * (base - values["start"]) / values["warmup"]
    return values["floor"] + 0.5 * (base - values["floor"]) * (1 + math.cos(math.pi * t / epochs))


def epoch_schedule(args: Any, optimizer: Any, steps_per_epoch: float) -> Any:
    """The schedule of `args.epoch_schedule` for an optimizer."""
    from torch.optim.lr_scheduler import LambdaLR

    epochs = math.ceil(args.num_train_epochs)

    def factor(step: int) -> float:
        epoch = min(int(step / steps_per_epoch + 1e-9), epochs - 1)
        return learning_rate(args.epoch_schedule, args.learning_rate, epoch, epochs) / args.learning_rate

    return LambdaLR(optimizer, factor)
