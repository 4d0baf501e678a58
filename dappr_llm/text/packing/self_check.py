"""Whether a model can be read in packed batches, found out by asking the model itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...core.torch_utils import evaluating
from .attention import use_packed_attention
from .last_layer import LastLayer, find_last_layer

logger = logging.getLogger(__name__)

Rows = list[list[int]]  # token ids


class PackingCheck:
    """
    Decides once per model whether packed batches give what padded ones give, and prepares the model for them.

    Which models do cannot be read off their names: custom attention, recurrent layers, prompt tuning and wrappers that
    split batches all stand in the way. So before the first batch four tiny rows are read both ways; where the logits
    differ, or the model raises, every batch is computed with padding, and the log says why.

    Args:
        enabled (`bool`, *optional*, defaults to `True`):
            Whether to pack at all.
    """

    def __init__(self, enabled: bool = True):
        self._works: bool | None = None if enabled else False
        self._lock = threading.Lock()
        self.last_layer: LastLayer | None = None

    @property
    def wanted(self) -> bool:
        """Whether batches should carry a layout: `False` only after a failed check."""
        return self._works is not False

    def works(
        self,
        model: nn.Module,
        padded: Callable[[Rows], Tensor],
        packed: Callable[[Rows], Tensor],
        tokens: Sequence[int],
    ) -> bool:
        """
        Whether packed rows give what padded rows give; checked at the first call.

        Args:
            model (`nn.Module`):
                The model, wrapped or not.
            padded, packed (`Callable`):
                Logits of rows of token ids, computed either way.
            tokens (`Sequence[int]`):
                Two or more token ids to make rows of.
        """
        if self._works is None:
            with self._lock:
                if self._works is None:
                    reason = self._prepare(model, padded, packed, tokens)
                    if reason is not None:
                        logger.info(f"{type(model).__name__} is computed with padding: {reason}")
                    self._works = reason is None
        return self._works

    def _prepare(
        self,
        model: nn.Module,
        padded: Callable[[Rows], Tensor],
        packed: Callable[[Rows], Tensor],
        tokens: Sequence[int],
    ) -> str | None:
        """Switch the model to packed attention and try it; switched back, with the reason, if it does not work."""
        if isinstance(model, nn.DataParallel):
            return "DataParallel would split packed batches; start one process per device instead"
        a, b = tokens[0], tokens[1]
        rows = [[a, b, a, b, b], [a, b, a], [a, b, b, a], [a, b, a, b, b]]
        with torch.no_grad(), evaluating(model):
            wanted = padded(rows)
            undo = use_packed_attention(model)
            if undo is None:
                return "its attention function has no packed form"
            layer = find_last_layer(model)
            reason = None
            if layer is not None:
                self.last_layer = LastLayer(layer)
                reason = _difference(model, wanted, lambda: packed(rows))
                if reason is not None:
                    self.last_layer.remove()
                    self.last_layer = None
            if layer is None or reason is not None:
                reason = _difference(model, wanted, lambda: packed(rows))
        if reason is not None:
            undo()
        return reason


def _difference(model: nn.Module, wanted: Tensor, read: Callable[[], Tensor]) -> str | None:
    """Why packed rows are not what they should be; `None` if they are."""
    try:
        found = read()
    except Exception as error:  # whatever a model does with a keyword it does not know
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if found.shape != wanted.shape:
        return f"it returned logits of shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    precise = next(model.parameters()).dtype in (torch.float32, torch.float64)
    allowed = (1e-3 if precise else 5e-2) * (1 + wanted.abs().max())
    apart = (found - wanted).abs().max()
    if not apart <= allowed:  # NaN too
        return f"packed rows came out different by {apart.item():.2g}"
    return None
