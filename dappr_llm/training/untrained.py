"""What the model says before it is trained, for the baselines: features of the frozen base model, and zero-shot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.backend import is_stream
from ..core.errors import first_line
from ..core.files import say
from ..evaluation.row_baselines import has_same_options
from ..evaluation.trivial_baselines import stratified_sample
from ..inference.batching import RowSet
from ..inference.table_predictor import TablePredictor
from ..methods import get_method

if TYPE_CHECKING:
    from ..evaluation.prediction_table import PredictionTable
    from .trainer import DAPPrTrainer

_MOST_ROWS = 5000  # training rows whose features are computed: a small part of a training that has more


@dataclass
class Untrained:
    """
    Inputs of [`row_baselines`] that need the model as it is before training.

    Args:
        features (`tuple[np.ndarray, np.ndarray]`, *optional*):
            Hidden states `[N, D]` of `feature_rows`, and of the test rows.
        feature_rows (`np.ndarray`, *optional*):
            Indices of the training rows that features were computed for.
        zero_shot (`PredictionTable`, *optional*):
            The answers of the model, where it gives any before training.
    """

    features: tuple[np.ndarray, np.ndarray] | None = None
    feature_rows: np.ndarray | None = None
    zero_shot: PredictionTable | None = None


def before_training(trainer: DAPPrTrainer, train: Any, test: RowSet | None) -> Untrained:
    """
    What the untrained model says about the rows of a run; called by every process, before `train()`.

    A model from scratch has nothing to say. FSDP and DeepSpeed hold a model in parts, which are put together only
    when training begins: there these baselines are left out.

    Args:
        trainer ([`DAPPrTrainer`]):
            Its model is read without its trained weights: a new adapter changes nothing, and a resumed one is loaded
            by `train()`.
        train:
            Training rows, as the task gives them.
        test (`RowSet`, *optional*):
            Test rows.
    """
    found = Untrained()
    if not trainer.args.num_train_epochs and trainer.args.max_steps <= 0:
        return found  # nothing is trained: this would be the run itself
    if test is None or not trainer.backend.pretrained or is_stream(train) or _is_sharded(trainer):
        return found
    if not (np.asarray(test.rows["label"]) >= 0).any():
        return found
    try:
        if has_same_options(train, test.rows):
            _add_features(found, trainer, train, test)
        if trainer.backend.answers_untrained:
            found.zero_shot = _zero_shot(trainer, test)
    except Exception as error:  # whatever a baseline stumbles over must not keep a run from training
        say(f"No baseline of the untrained model: {first_line(error)}")
    return found


def _is_sharded(trainer: DAPPrTrainer) -> bool:
    return bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)


def _add_features(found: Untrained, trainer: DAPPrTrainer, train: Any, test: RowSet) -> None:
    labels = np.asarray(train["label"])
    known = np.flatnonzero(labels >= 0)
    rows = known[stratified_sample(labels[known], _MOST_ROWS, trainer.args.seed)]
    say(f"Reading {len(rows)} training and {len(test.rows)} test rows before training, for the baselines")
    chosen = train.select(rows) if hasattr(train, "select") else [train[int(i)] for i in rows]
    states = [
        trainer.predictor.hidden_states(part, name)[0].numpy()
        for part, name in ((chosen, "training rows"), (test.rows, test.task))
    ]
    found.features, found.feature_rows = (states[0], states[1]), rows


def _zero_shot(trainer: DAPPrTrainer, test: RowSet) -> PredictionTable:
    """The softmax of the untrained model's own logits, whatever the method will make of them."""
    plain, predictor = get_method("ce"), trainer.predictor
    backend = trainer.backend.with_method(plain, 0.0)
    own = TablePredictor(predictor.model, plain, backend, predictor.accelerator, predictor.settings)
    return own.predict_tables([test])[0]
