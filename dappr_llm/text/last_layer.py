"""
Answers are read at one position per row, so nothing after the last layer's attention needs the others.

The feed-forward block of the last layer, most of that layer's work, is therefore computed for these positions alone.
It works on each token by itself, so the answers are the same; what stands at other positions is not read by anybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import UserError
from .trunk_cache import decoder_layers

_NAME = "mlp"


class _OnlyAt(nn.Module):
    """A token-wise module that is asked at some positions only; zero elsewhere."""

    def __init__(self, module: nn.Module, positions: Tensor):
        super().__init__()
        object.__setattr__(self, "module", module)  # not a submodule: parameters stay where they are
        object.__setattr__(self, "positions", positions)

    def forward(self, hidden: Tensor) -> Tensor:
        part = self.module(hidden.index_select(1, self.positions))
        return part.new_zeros((*hidden.shape[:-1], part.shape[-1])).index_copy(1, self.positions, part)


def find_last_layer(model: nn.Module) -> Any:
    """The last layer of a causal LM, if its feed-forward block is where it can be found."""
    try:
        layer = decoder_layers(model)[-1]
    except (UserError, AttributeError):
        return None
    return layer if isinstance(getattr(layer, _NAME, None), nn.Module) else None


@contextmanager
def only_at(layer: Any, positions: Tensor) -> Iterator[None]:
    """
    The layer's feed-forward block computes these positions only.

    Args:
        layer (`nn.Module`, *optional*):
            From `find_last_layer`; `None` changes nothing.
        positions (`Tensor`):
            Different positions that are read.
    """
    # Checkpointing runs the layer again later, when it would be whole again.
    if layer is None or (layer.training and getattr(layer, "gradient_checkpointing", False)):
        yield
        return
    block = getattr(layer, _NAME)
    setattr(layer, _NAME, _OnlyAt(block, positions))
    try:
        yield
    finally:
        setattr(layer, _NAME, block)
