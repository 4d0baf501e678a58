"""
Answers are read at one position per row, so of the others the last layer needs keys and values alone.

Its queries, what follows its attention, and its feed-forward block, together nine tenths of that layer's work, are
therefore computed for these positions only. They work on each token by itself, so the answers are the same; what
stands at other positions is not read by anybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .decoder_layers import decoder_layers

_BLOCKS = ("mlp", "self_attn.q_proj", "self_attn.o_proj")  # only the first has to be there


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
    layers = decoder_layers(model)
    return layers[-1] if layers and isinstance(getattr(layers[-1], _BLOCKS[0], None), nn.Module) else None


@contextmanager
def only_at(layer: Any, positions: Tensor) -> Iterator[None]:
    """
    The layer's token-wise blocks compute these positions only.

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
    found = [(owner, name, getattr(owner, name)) for owner, name in _places(layer)]
    for owner, name, block in found:
        setattr(owner, name, _OnlyAt(block, positions))
    try:
        yield
    finally:
        for owner, name, block in found:
            setattr(owner, name, block)


def _places(layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for path in _BLOCKS:
        *above, name = path.split(".")
        owner = getattr(layer, above[0], None) if above else layer
        block = getattr(owner, name, None)
        if isinstance(block, nn.Module) and not _random(block):
            yield owner, name


def _random(block: nn.Module) -> bool:
    """Blocks with dropout stay whole: with fewer positions all later random numbers would be others."""
    return any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in block.modules())
