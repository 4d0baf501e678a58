"""
What one forward pass tells the hooks of its model.

Hooks on the output head, on the last layer and on frozen layers are installed once. What they have to do in a
particular call (which letters to read, at which positions) is set here for the calling thread, so that several
threads can use one model, and a call that is not ours finds nothing set and gets the model's own behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Size, Tensor

if TYPE_CHECKING:
    from .pooled_states import Pooling


@dataclass
class ForwardCall:
    """
    One forward pass.

    Args:
        token_ids (`Tensor`, *optional*):
            Vocabulary rows to read at the output head, `[C]`; `None` where a classification head is read.
        adapters (`Sequence[str]`, *optional*):
            An adapter name per row of the batch, for ensembles in one batch; by default the active adapter.
        positions (`Tensor`, *optional*):
            Positions of a packed batch whose last-layer output is read; others are skipped there.
        length (`int`, *optional*):
            Tokens of that packed batch.
        states (`Tensor`, *optional*):
            Hidden states that enter the lowest trained layer, from the cache; layers below are skipped.
        stop_below (`bool`, *optional*, defaults to `False`):
            Stop the forward pass where the lowest trained layer begins, to fill the cache.
        last (`Tensor`, *optional*):
            Where a classification head reads each row of a packed batch, `[B]`; by default at the last position.
        pooling (`Pooling`, *optional*):
            What the hooks of the gate pool of hidden states, and where they put it.
        hidden (`Tensor`, *optional*):
            Filled by the head's hook: the states that the logits were read from.
        shape (`Size`, *optional*):
            Filled by the hook of a classification head: rows and tokens of what entered it.
        logits (`Tensor`, *optional*):
            Filled by the hook of a classification head: what it read, `[B, C]`.
    """

    token_ids: Tensor | None = None
    adapters: Sequence[str] | None = None
    positions: Tensor | None = None
    length: int | None = None
    states: Tensor | None = None
    stop_below: bool = False
    last: Tensor | None = None
    pooling: Pooling | None = None
    hidden: Tensor | None = None
    shape: Size | None = None
    logits: Tensor | None = None


CURRENT: ContextVar[ForwardCall | None] = ContextVar("dappr_llm_forward_call", default=None)
