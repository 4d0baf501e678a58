"""Whether a model can be read without padding (`packing`), found out by asking the model itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.outputs import evaluating, to_device
from . import layout as packing
from .last_layer import find_last_layer, only_at

logger = logging.getLogger(__name__)


class PackedReading:
    """
    Reads answer logits of packed batches, where a model allows it.

    Which models do cannot be read off their names: attention of their own, recurrent layers, prompt tuning and
    wrappers that split batches all stand in the way. So before the first batch four tiny rows are read both ways;
    where the answers differ, or the model refuses, everything is computed with padding as ever, and a line in the
    log says so.

    Args:
        enabled (`bool`, *optional*, defaults to `True`):
            Whether to pack at all.
        share (`bool`, *optional*, defaults to `True`):
            Whether rows share the computation of common beginnings.
    """

    def __init__(self, enabled: bool = True, share: bool = True):
        self.enabled = enabled
        self.share = share
        self._works: bool | None = None if enabled else False
        self._last_layer: Any = None
        if enabled:
            packing.register()

    @property
    def wanted(self) -> bool:
        """Whether batches should carry a layout; known to be useless after a failed check."""
        return self._works is not False

    def read(self, model: nn.Module, plan: Mapping[str, Any]) -> Tensor:
        """Logits of each row of a layout, `[B, C]`, read after its last token."""
        with only_at(self._last_layer, plan["ends"]):
            return read_packed(model, plan)

    def works(self, model: nn.Module, padded: Callable[[list[list[int]]], Tensor], tokens: Sequence[int]) -> bool:
        """
        Whether packed rows give what padded rows give.

        Args:
            model (`nn.Module`):
                The model, wrapped or not.
            padded (`Callable`):
                Logits of rows of tokens, computed with padding.
            tokens (`Sequence[int]`):
                Two or more token ids to make rows of.
        """
        if self._works is None:
            self._last_layer = find_last_layer(model)
            reason = self._problem(model, padded, tokens)
            if reason is not None and self._last_layer is not None:
                self._last_layer = None
                reason = self._problem(model, padded, tokens)
            self._works = reason is None
            if reason is not None:
                logger.info(f"{type(model).__name__} is computed with padding: {reason}")
        return self._works

    def _problem(
        self, model: nn.Module, padded: Callable[[list[list[int]]], Tensor], tokens: Sequence[int]
    ) -> str | None:
        if isinstance(model, nn.DataParallel):
            return "DataParallel would cut packed batches up; start one process per device instead"
        a, b = tokens[0], tokens[1]
        rows = [[a, b, a, b, b], [a, b, a], [a, b, b, a], [a, b, a, b, b]]
        device = next(model.parameters()).device
        with torch.no_grad(), evaluating(model):
            wanted = padded(rows)
            try:
                found = self.read(model, to_device(packing.layout(rows), device))
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


def read_packed(model: nn.Module, plan: Mapping[str, Any]) -> Tensor:
    """Logits of each row of a layout, `[B, C]`, by a whole forward pass."""
    logits = model(
        input_ids=plan["input_ids"],
        position_ids=plan["position_ids"],
        # Four dimensions: taken as a finished mask and passed on as it is. What may be seen is in the layout.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=plan["input_ids"].device),
        logits_to_keep=plan["last"],
        use_cache=False,
        **{packing.KEYWORD: plan},
    ).logits
    return logits[0]
