"""
Loss weights of rows: of their classes (`train.class_weights`), and of repeats that pad the last batch.

The loss of a step is the weighted mean `sum w_i l_i / sum w_i` over its whole global batch, all micro-batches and
ranks together: how it is cut into parts changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..core.backend import Backend, is_stream
from ..core.errors import UserError, nearest
from ..methods import Method, name_of
from .losses import weigh_last_batch

if TYPE_CHECKING:
    from .config import DAPPrConfig
    from .trainer import DAPPrTrainer


def find_class_weights(args: DAPPrConfig, backend: Backend, method: Method, rows: Any) -> Tensor | None:
    """
    The weight of each class `[K]`, or `None`; wrong weights, and smoothing where it has no meaning, are refused.

    Args:
        args (`DAPPrConfig`):
            Its `class_weights` and `label_smoothing_factor`.
        backend (`Backend`):
            Names the classes.
        method (`Method`):
            Says whether its loss takes soft labels.
        rows:
            Prepared training rows, which `"balanced"` counts.
    """
    if args.label_smoothing_factor and not method.soft_labels:
        raise UserError(
            f"train.label_smoothing_factor: the loss of {name_of(method)!r} compares a row with the centroid of its "
            "one class, so that a label cannot be shared between classes; leave it out"
        )
    wanted = args.class_weights
    if wanted is None:
        return None
    if backend.class_names is None:
        raise UserError(
            "train.class_weights are for fixed labels, but rows that are read by letters have options of their own; "
            "leave them out, or use model.readout: head or tokens"
        )
    if isinstance(wanted, str):
        if rows is None:  # a trainer that only evaluates
            return None
        return _balanced(rows, len(backend.class_names))
    return named_weights(wanted, backend.class_names)


def _balanced(rows: Any, classes: int) -> Tensor:
    if is_stream(rows):
        raise UserError(
            "train.class_weights: balanced counts the training rows, and a stream has no end; give the weights by "
            "label: class_weights: {spam: 5, ham: 1}"
        )
    return balanced_weights(np.asarray(rows["labels"]), classes)


def balanced_weights(labels: np.ndarray, classes: int) -> Tensor:
    """`n / (K * n_k)` of each class, scikit-learn's formula; a class without rows has none to weigh and gets 1."""
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    weights = counts.sum() / (classes * np.maximum(counts, 1))
    return torch.from_numpy(np.where(counts > 0, weights, 1.0))


def named_weights(given: Mapping[Any, float], names: Sequence[str]) -> Tensor:
    """Weights `[K]` given by label; labels that are not named get 1, as in scikit-learn."""
    places = {name: place for place, name in enumerate(names)}
    weights = torch.ones(len(names), dtype=torch.float64)
    for label, weight in given.items():
        name = str(label).lower() if isinstance(label, bool) else str(label)
        if name not in places:
            raise UserError(f"train.class_weights: there is no label {name!r}; {nearest(name, names)}")
        if not math.isfinite(weight) or weight <= 0:
            raise UserError(f"train.class_weights: the weight of {name!r} is {weight}; a positive number is needed")
        weights[places[name]] = weight
    return weights


def weigh_rows(trainer: DAPPrTrainer, batches: list[dict[str, Any]]) -> None:
    """
    Give the rows of one step's micro-batches their `loss_weights`, where they are not all alike.

    Trainer divides the loss of each micro-batch by their number, and averages gradients over ranks, hence the factor.
    """
    weigh_last_batch(batches, trainer.accelerator.gradient_state, trainer.args)
    if trainer.class_weights is None or not batches:
        return
    found = [_row_weights(batch, trainer.class_weights) for batch in batches]
    total = trainer.accelerator.reduce(torch.stack([weights.sum() for weights in found]).sum(), reduction="sum")
    factor = len(batches) * trainer.args.world_size / total
    for batch, weights in zip(batches, found, strict=True):
        batch["loss_weights"] = weights * factor


def _row_weights(batch: Mapping[str, Any], weights: Tensor) -> Tensor:
    """The weight of each row's class; 1 for auxiliary rows, which have none, and 0 for repeats."""
    labels = batch["labels"]
    found = weights.to(labels.device, torch.float32)[labels.clamp_min(0)]
    found = torch.where(labels < 0, torch.ones_like(found), found)
    kept = batch.get("loss_weights")
    return found if kept is None else found * (kept.to(found.device) > 0)
