"""Evaluation during training: the same figures, from the same tables, as everywhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.backend import option_rows
from ..core.outputs import as_outputs, map_values
from ..evaluation.evaluators import evaluate_id
from ..inference.stochastic_passes import seeded
from ..inference.table_predictor import PredictionSettings, TablePredictor
from ..methods import Progress
from .evidence import evidence_summary
from .losses import row_losses

if TYPE_CHECKING:
    from transformers import EvalPrediction

    from .trainer import DAPPrTrainer


def build_predictor(trainer: DAPPrTrainer) -> TablePredictor:
    """What predicts with a trainer's model, method and batch sizes."""
    args = trainer.args
    settings = PredictionSettings(
        batch_size=args.per_device_eval_batch_size,
        max_tokens=args.eval_tokens,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        seed=args.seed,
        progress=False if args.disable_tqdm else None,
    )
    model, accelerator = trainer.model, trainer.accelerator
    return TablePredictor(model, trainer.method, trainer.backend, accelerator, settings, trainer.method_name)


def eval_metrics(predictor: TablePredictor, prediction: EvalPrediction, epochs: float) -> dict[str, float]:
    """
    Losses with the coefficients of the end of training, and every metric of `evaluate_id`, on the labelled rows.

    Args:
        predictor (`TablePredictor`):
            Whose method and backend read the outputs.
        prediction (`EvalPrediction`):
            Raw outputs, and (label, row, option count) of every row, from all ranks.
        epochs (`float`):
            Epochs of the whole training.
    """
    method = predictor.method
    found, labels, num_options = in_order(prediction.predictions, prediction.label_ids)
    known = labels >= 0
    if not known.any():
        return {}
    # Each of several passes counts as a row of its own: the loss is their mean.
    each = map_values(found, lambda value: value[known])
    if method.passes > 1:
        each = map_values(each, lambda value: value.reshape(-1, *value.shape[2:]))
    rows = [torch.from_numpy(values[known]).repeat_interleave(method.passes) for values in (labels, num_options)]
    with seeded(0):  # a loss that draws noise must not depend on when it is evaluated, nor disturb training
        groups, final = option_rows(rows[1].tolist()), Progress.final(epochs)
        num_choices = predictor.backend.num_choices or int(num_options.max())
        terms, logged = row_losses(method, num_choices, as_outputs(each), rows[0], groups, final)
    losses = {f"loss/{key}": value.mean().item() for key, value in terms.items()}
    metrics = {"loss": sum(losses.values()), **losses}
    metrics |= {key: value.mean().item() for key, value in logged.items()}
    table = predictor.table(as_outputs(found), labels, num_options, [str(i) for i in range(len(labels))])
    return metrics | evidence_summary(table, as_outputs(found)) | evaluate_id(table)


def in_order(found: Any, keys: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """
    Outputs, labels and option counts in the order of the dataset, each row once.

    The longest rows were read first, and ranks may have padded their last batch with repeats.

    Args:
        found (`np.ndarray` or `dict`):
            Gathered outputs.
        keys (`np.ndarray` of shape `[N, 3]`):
            Label, row number and option count of each.
    """
    first = np.unique(keys[:, 1], return_index=True)[1]
    return map_values(found, lambda value: value[first]), keys[first, 0], keys[first, 2]
