"""What `dappr plan` measures: a recipe's model without memory for its weights, and one forward pass of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def _nothing(tensor: Any) -> bool:
    return False


@dataclass(frozen=True)
class PlannedModel:
    """
    A model of shapes alone, built by `text.plan_model` or `vision.plan_model`.

    Args:
        name (`str`):
            How the plan calls the model.
        model (`nn.Module`):
            With its adapter, on the meta device or of fake tensors.
        run (`Callable[[int, bool], Any]`):
            A forward pass in training mode: batch size, and whether under bfloat16 autocast.
        example (`tuple[int, ...]`):
            Shape of one example: tokens, or channels, height and width.
        precisions (`tuple[str, ...]`):
            Columns of the memory table.
        presets (`tuple[str, ...]`):
            Rows of the memory table: launch presets.
        largest_unit (`int`):
            Parameters of the largest transformer block, or of embedding or head; what FSDP gathers at once.
        linear (`list`, *optional*):
            Weights that bitsandbytes quantises; without any, nothing is quantised.
        blocks (`list`, *optional*):
            Transformer blocks, which gradient checkpointing recomputes.
        block_input (`int`, *optional*, defaults to 0):
            Bytes of one example between two blocks.
        ignore (`Callable[[Tensor], bool]`, *optional*):
            Saved tensors that do not count.
        rows (`int`, *optional*):
            Training rows, where they are known.
    """

    name: str
    model: Any
    run: Callable[[int, bool], Any]
    example: tuple[int, ...]
    precisions: tuple[str, ...]
    presets: tuple[str, ...]
    largest_unit: int
    linear: list[Any] = field(default_factory=list)
    blocks: list[Any] = field(default_factory=list)
    block_input: int = 0
    ignore: Callable[[Any], bool] = _nothing
    rows: int | None = None


def count(module: Any) -> int:
    """Parameters of a module."""
    return sum(p.numel() for p in module.parameters())
