"""Small helpers for batches and modules that text, vision, inference and training share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def option_rows(num_options: Sequence[int]) -> dict[int, Tensor]:
    """Which rows offer how many options, from counts that the host knows."""
    counts = sorted(set(num_options))
    return {count: torch.tensor([i for i, found in enumerate(num_options) if found == count]) for count in counts}


def to_device(value: Any, device: torch.device | str) -> Any:
    """A batch, with whatever is nested in it, on a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(entry, device) for key, entry in value.items()}
    if isinstance(value, list):
        return [to_device(entry, device) for entry in value]
    return value


def without_wrapper(model: nn.Module) -> Any:
    """A model without what several processes put around it."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; every module's own mode is restored."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def repeat_rows(inputs: Mapping[str, Any], times: int) -> dict[str, Any]:
    """A collated batch several times over; what is not per row stays as it is."""
    rows = next(iter(inputs.values())).shape[0]

    def repeated(value: Any) -> Any:
        if times == 1 or not isinstance(value, Tensor) or value.shape[:1] != (rows,):
            return value
        return value.repeat(times, *[1] * (value.dim() - 1))

    return {key: repeated(value) for key, value in inputs.items()}
