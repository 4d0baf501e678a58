"""Several stochastic forward passes over one batch: what MC dropout predicts with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..core.errors import UserError
from ..core.outputs import Outputs, Prediction, repeat_rows, to_device

# Passes run side by side as one larger batch as long as it holds no more input values (tokens, pixels) than this.
_PASS_NUMBERS = 4096

Gathered: TypeAlias = Tensor | dict[str, Tensor]
_LOGITS = "logits"


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
    """Random numbers from a seed of their own; the stream that training draws from goes on as if nothing was drawn."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def read_rows(backend: Any, model: nn.Module, inputs: Mapping[str, Tensor], passes: int = 1) -> Gathered:
    """
    What a method needs of a batch: logits `[B, C]`, or `[B, M, C]` with M stochastic passes; where the model has a
    head of the method's, a dictionary of its values, and of the logits if there are any.

    Args:
        backend:
            What reads the model (`TextBackend` or `ImageBackend`).
        model (`nn.Module`):
            The model, in evaluation mode.
        inputs (`Mapping`):
            A collated batch on the model's device.
        passes (`int`, *optional*, defaults to 1):
            `method.passes`.
    """
    if passes == 1:
        return _gathered(backend.read(model, inputs))
    sample = next(iter(inputs.values()))
    rows, size = sample.shape[0], sample[0].numel()
    side_by_side = max(1, min(passes, _PASS_NUMBERS // max(1, rows * size)))
    repeated = getattr(backend, "repeated", repeat_rows)
    batches: dict[int, Mapping[str, Any]] = {}
    found = []
    with dropout_on(model):
        for start in range(0, passes, side_by_side):
            times = min(side_by_side, passes - start)
            if times not in batches:
                batches[times] = repeated(inputs, times)
            part = _gathered(backend.read(model, batches[times]))
            found.append(pick(part, partial(_unstacked, times=times)))
    if isinstance(found[0], Tensor):
        return torch.cat(found).transpose(0, 1)
    return {key: torch.cat([each[key] for each in found]).transpose(0, 1) for key in found[0]}


def _unstacked(value: Tensor, times: int) -> Tensor:
    return value.unflatten(0, (times, -1))


def _gathered(out: Outputs) -> Gathered:
    if out.head is None:
        return out.logits
    return out.head if out.logits is None else {_LOGITS: out.logits, **out.head}


def as_outputs(found: Any) -> Outputs:
    """What `read_rows` gave, of tensors or arrays, for `method.predict` and `method.loss`."""
    if not isinstance(found, Mapping):
        return Outputs(logits=torch.as_tensor(found))
    values = {key: torch.as_tensor(value) for key, value in found.items()}
    logits = values.pop(_LOGITS, None)
    return Outputs(logits=logits, head=values)  # type: ignore[arg-type]


def pick(found: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to the logits, or to every value of the dictionary."""
    if isinstance(found, Mapping):
        return {key: change(value) for key, value in found.items()}
    return change(found)


def predict_batch(run: Any, rows: Sequence[Mapping[str, Any]], width: int) -> Prediction:
    """
    One batch of encoded rows, read on `width` choices, through a run's model and method; passes seeded.

    Args:
        run (`Run`): A loaded checkpoint, its model in evaluation mode.
        rows (`Sequence[Mapping]`): What the backend's `collate` takes.
        width (`int`): How many choices each of them offers.
    """
    device = next(run.model.parameters()).device
    batch = to_device(run.backend.collate(rows), device)
    with torch.no_grad(), seeded(0), run.backend.reading(width):
        found = read_rows(run.backend, run.model, batch, run.method.passes)
    return run.method.predict(as_outputs(pick(found, lambda value: value.cpu())))
