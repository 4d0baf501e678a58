"""Predictions that are numbers: NaN and Inf become an error that names the item, wherever they would be answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.errors import UserError

if TYPE_CHECKING:
    from ..core.outputs import Outputs, Prediction
    from ..methods import Method


def finite_prediction(method: Method, found: Outputs, ids: Sequence[object]) -> Prediction:
    """
    What a method says about outputs: every prediction leaves the engine here, and none that is not a number.

    The most probable of NaN options would be the first one, and its answer would look like any other.

    Args:
        method (`Method`):
            The method.
        found (`Outputs`):
            Of all rows, on the CPU.
        ids (`Sequence`):
            The rows' ids; a `UserError` names the first whose outputs or prediction are not finite.
    """
    raw = [value for value in (found.logits, *(found.head or {}).values()) if isinstance(value, Tensor)]
    # An infinite logit can be meant (a probability of 0); what comes of it must be finite.
    _refuse_rows([_rows_with(value.isnan()) for value in raw if value.is_floating_point()], ids)
    prediction = method.predict(found)
    values = [prediction.probs, prediction.alpha, prediction.aleatoric, prediction.epistemic]
    bad = [_rows_with(~value.isfinite()) for value in values if value is not None]
    if prediction.members is not None:
        bad.append(_rows_with(~prediction.members.isfinite().movedim(1, 0)))
    _refuse_rows(bad, ids)
    return prediction


def _rows_with(mask: Tensor) -> Tensor:
    return mask.reshape(len(mask), -1).any(-1)


def _refuse_rows(masks: list[Tensor], ids: Sequence[object]) -> None:
    bad = torch.stack(masks).any(0) if masks else torch.zeros(0, dtype=torch.bool)
    if bool(bad.any()):
        first = ids[int(bad.nonzero()[0])]
        raise UserError(
            f"The model gives NaN or Inf for item {first!r} ({int(bad.sum())} of {len(ids)} rows), so it has no "
            "answer: its weights are damaged or diverged in training; train again with a lower train.learning_rate, "
            "or load it in a wider dtype"
        )
