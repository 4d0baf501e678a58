"""Several stochastic forward passes over one batch, as MC dropout predicts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..core.backend import Backend, Batch
from ..core.errors import UserError
from ..core.outputs import Gathered, map_values

# Passes run side by side as one larger batch as long as it holds no more input values (tokens, pixels) than this.
_PASS_NUMBERS = 4096
# torch's random numbers and a model's dropout modes belong to the process: one stochastic prediction at a time.
_STOCHASTIC = threading.RLock()


@contextmanager
def dropout_on(model: nn.Module) -> Iterator[None]:
    """Dropout layers drop, everything else stays in evaluation mode; undone at the end."""
    layers = [module for module in model.modules() if isinstance(module, _DropoutNd) and module.p > 0]
    if not layers:
        raise UserError(
            "Several passes need dropout, and this model has none: train with lora.lora_dropout above 0 (0.1 is "
            "usual), or images with model.dropout (0.5)"
        )
    before = [module.training for module in layers]
    for module in layers:
        module.train()
    try:
        yield
    finally:
        for module, training in zip(layers, before, strict=True):
            module.train(training)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from a seed of their own; the caller's random state is restored. One thread at a time."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with _STOCHASTIC, torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def read_passes(
    backend: Backend, model: nn.Module, inputs: Batch, passes: int = 1, width: int | None = None
) -> Gathered:
    """
    What a method needs of a batch: logits `[B, C]`, or `[B, M, C]` with M stochastic passes; where the model has a
    head of the method's own, a dictionary of its values, and of the logits if there are any.

    Args:
        backend (`Backend`):
            What reads the model.
        model (`nn.Module`):
            The model, in evaluation mode.
        inputs (`Mapping`):
            A collated batch on the model's device.
        passes (`int`, *optional*, defaults to 1):
            `method.passes`.
        width (`int`, *optional*):
            How many options to read; by default the trained ones.
    """
    if passes == 1:
        return backend.read(model, inputs, width).gathered()
    sample = next(iter(inputs.values()))
    rows, size = sample.shape[0], sample[0].numel()
    side_by_side = max(1, min(passes, _PASS_NUMBERS // max(1, rows * size)))
    batches: dict[int, Batch] = {}
    found = []
    with _STOCHASTIC, dropout_on(model):
        for start in range(0, passes, side_by_side):
            times = min(side_by_side, passes - start)
            if times not in batches:
                batches[times] = backend.repeated(inputs, times)
            part = backend.read(model, batches[times], width).gathered()
            found.append(map_values(part, partial(_unstacked, times=times)))
    if isinstance(found[0], Tensor):
        return torch.cat(found).transpose(0, 1)
    return {key: torch.cat([each[key] for each in found]).transpose(0, 1) for key in found[0]}


def _unstacked(value: Tensor, times: int) -> Tensor:
    return value.unflatten(0, (times, -1))
