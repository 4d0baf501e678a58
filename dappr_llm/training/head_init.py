"""
Where a classification head starts: at random, or at the probe: a logistic regression on the frozen model's features.

A random head spends much of a short training on what the probe finds in a second, most of all with few rows per class
or many classes, and losses on evidence learn slowest from there. Training then starts where frozen features end.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.backend import is_stream
from ..core.errors import UserError
from ..methods.base import reads_evidence

if TYPE_CHECKING:
    from torch import nn

    from .trainer import DAPPrTrainer

logger = logging.getLogger(__name__)

FEW_ROWS = 64  # rows per label that `auto` fits the probe to
_STRENGTHS = (0.01, 0.1, 1.0, 10.0)  # C, the inverse of the regularisation
_FOLDS, _CV_ROWS = 3, 1500  # cross-validation is to stay cheap
_MOST_SURE = 0.95  # mean probability of the training rows' labels at the start
# A row's largest logit at the start, on average, for methods that read logits as evidence. With 4 the classes of a
# probe are so near to each other that the first steps undo it (CLINC150: accuracy 79 % to 66 %), with 10 they are not.
_TOP_LOGIT = 10.0


def init_head(trainer: DAPPrTrainer) -> None:
    """Fit the head before training, once in a trainer's life, if `DAPPrConfig.head_init` asks for it."""
    wanted = trainer.args.head_init
    if wanted == "random" or trainer.head_is_settled:
        return
    layer = trainer.backend.score_layer(trainer.model)
    rows, reason = trainer.labelled_rows, _reason_against(trainer, layer)
    if reason is not None:
        if wanted == "probe":
            raise UserError(f"train.head_init: probe {reason}; set train.head_init: random")
        return
    assert layer is not None
    labels = np.asarray(rows["labels"])
    classes = trainer.backend.num_choices or 2
    trainer.head_is_settled = True
    if wanted == "auto":
        if not trainer.backend.has_new_head or len(np.unique(labels[labels >= 0])) < 2:
            return
        kept = some_of_each(labels, classes)
        rows, labels = (rows, labels) if kept is None else (rows.select(kept), labels[kept])
    features = trainer.predictor.hidden_states(rows, "the training rows")[0].double().numpy()
    weight, bias, said, right = fit_probe(features, labels, classes, layer.bias is not None)
    logits = features @ weight.T + (0.0 if bias is None else bias)
    scale = min(_scale(trainer, logits), sureness_scale(logits, labels, right))
    _write(layer, weight * scale, None if bias is None else bias * scale)
    logger.info(f"The head starts from a logistic regression on the frozen model's features ({said})")


def some_of_each(labels: np.ndarray, classes: int) -> list[int] | None:
    """Up to `FEW_ROWS` rows of each label, in their order; `None`: all rows, which are no more on average."""
    if len(labels) <= FEW_ROWS * classes:
        return None
    mixed = np.random.default_rng(0).permutation(len(labels))
    mixed = mixed[labels[mixed] >= 0]
    order = mixed[np.argsort(labels[mixed], kind="stable")]  # by label, and shuffled within each
    counts = np.bincount(labels[order], minlength=classes)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return sorted(order[rank < FEW_ROWS].tolist())


def _reason_against(trainer: DAPPrTrainer, layer: nn.Linear | None) -> str | None:
    """Why the head cannot be fitted; `None` if it can."""
    if layer is None:
        return "is for a new classification head (model.readout: head)"
    if is_stream(trainer.labelled_rows):
        return "reads all training rows before training, and a stream has no end (data.streaming)"
    if hasattr(layer.weight, "ds_id"):
        return "writes the whole head, of which DeepSpeed ZeRO-3 holds only a part"
    return "needs training rows" if trainer.labelled_rows is None else None


def fit_probe(
    features: np.ndarray, labels: np.ndarray, classes: int, with_bias: bool, seed: int = 0
) -> tuple[np.ndarray, np.ndarray | None, str, float | None]:
    """
    A multinomial logistic regression, its strength chosen by cross-validation on these rows.

    A head without bias gets one without intercept: features then keep their mean, whose direction takes its place.

    Args:
        features (`np.ndarray` of shape `[N, D]`), labels (`np.ndarray` of shape `[N]`):
            The training rows; unlabelled ones (-1) are left out.
        classes (`int`):
            K; a class without rows gets the lowest logit of all.
        with_bias (`bool`):
            Whether the head has a bias.
        seed (`int`, *optional*, defaults to 0):
            Of the folds.

    Returns:
        `tuple`: Weights `[K, D]`, bias `[K]` or `None`, a few words about the fit, and its cross-validated accuracy
        (`None` if no two labels have two rows each).
    """
    features, labels = features[labels >= 0], labels[labels >= 0]
    seen, codes = np.unique(labels, return_inverse=True)
    if len(seen) < 2:
        raise UserError("train.head_init: probe needs training rows of two labels at least")
    mean = features.mean(0) if with_bias else np.zeros(features.shape[1])
    spread = features.std(0)
    spread = np.where(spread > 1e-6 * max(spread.max(), 1e-12), spread, np.inf)  # a constant feature says nothing
    scaled = (features - mean) / spread
    strength, accuracy = _choose_strength(scaled, codes, with_bias, seed)
    model = _regression(strength, with_bias, 2000, 1e-7).fit(scaled, codes)
    own = model.coef_ if len(seen) > 2 else np.concatenate([-model.coef_, model.coef_]) / 2
    shift = np.broadcast_to(model.intercept_, (len(model.coef_),))
    shift = shift if len(seen) > 2 else np.concatenate([-shift, shift]) / 2
    own = own / spread
    shift = shift - own @ mean
    lowest = (features @ own.T + shift).min()
    centre = features.mean(0)
    weight = np.tile(0.0 if with_bias else lowest * centre / (centre @ centre), (classes, 1))
    weight = np.broadcast_to(weight, (classes, features.shape[1])).copy()
    bias = np.full(classes, lowest)
    weight[seen], bias[seen] = own, shift
    found = "" if accuracy is None else f", cross-validated accuracy {accuracy:.3f}"
    return weight, bias if with_bias else None, f"C = {strength:g}{found}", accuracy


def sureness_scale(logits: np.ndarray, labels: np.ndarray, right: float | None) -> float:
    """
    A factor for the logits with which the head is as sure of its training rows as it is right about other rows.

    A regression on more features than rows gets all its rows right with a loss near 0: its gradient would be gone
    before the first step, and the layers below would never be trained.

    Args:
        logits (`np.ndarray` of shape `[N, K]`), labels (`np.ndarray` of shape `[N]`):
            Of the training rows; unlabelled ones (-1) do not count.
        right (`float`, *optional*):
            Accuracy in cross-validation; `None`: not known, nothing is changed.

    Returns:
        `float`: Above 0 and at most 1.
    """
    logits, labels = logits[labels >= 0], labels[labels >= 0]
    if right is None:
        return 1.0

    def sureness(scale: float) -> float:
        scores = scale * (logits - logits.max(-1, keepdims=True))
        scores = np.exp(scores)
        return float((scores[np.arange(len(labels)), labels] / scores.sum(-1)).mean())

    target = max(min(right, _MOST_SURE), 2 / (logits.shape[1] + 1))  # a little more than chance
    low, high = 0.0, 1.0
    if sureness(high) <= target:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sureness(middle) < target else (low, middle)
    return high


def _choose_strength(
    features: np.ndarray, labels: np.ndarray, with_bias: bool, seed: int
) -> tuple[float, float | None]:
    """The C with the lowest cross-validated log loss, and its accuracy; 1 if no two labels have two rows each."""
    from sklearn.model_selection import StratifiedKFold

    kept = np.random.default_rng(seed).permutation(len(labels))[:_CV_ROWS]
    kept = kept[np.bincount(labels[kept])[labels[kept]] > 1]  # a label's only row cannot be in both parts
    seen, labels = np.unique(labels[kept], return_inverse=True)
    if len(seen) < 2:
        return 1.0, None
    features = features[kept]
    folds = StratifiedKFold(min(_FOLDS, int(np.bincount(labels).min())), shuffle=True, random_state=seed)
    losses, hits = np.zeros(len(_STRENGTHS)), np.zeros(len(_STRENGTHS))
    for train, test in folds.split(features, labels):
        for number, strength in enumerate(_STRENGTHS):
            model = _regression(strength, with_bias, 200, 1e-4).fit(features[train], labels[train])
            said = model.predict_log_proba(features[test])
            losses[number] -= said[np.arange(len(test)), labels[test]].sum()
            hits[number] += (said.argmax(-1) == labels[test]).sum()
    best = int(losses.argmin())
    return _STRENGTHS[best], hits[best] / len(labels)


def _regression(strength: float, with_bias: bool, steps: int, tolerance: float) -> Any:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    class Quiet(LogisticRegression):
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            with warnings.catch_warnings():  # a fit that stops early, or has few rows, is good enough
                warnings.simplefilter("ignore", ConvergenceWarning)
                warnings.filterwarnings("ignore", message="The number of unique classes")
                return super().fit(*args, **kwargs)

    return Quiet(C=strength, fit_intercept=with_bias, max_iter=steps, tol=tolerance)


def _scale(trainer: DAPPrTrainer, logits: np.ndarray) -> float:
    """
    A factor for the logits, which leaves the order of classes alone.

    Logits of a logistic regression have a mean of 0 over the classes, where evidence (softplus or exp) is alive; but
    where rows are few they grow without bound, and evidence would start so large that no gradient is left.
    """
    if not reads_evidence(trainer.method, trainer.backend.num_choices or 2):
        return 1.0
    return min(1.0, _TOP_LOGIT / max(float(logits.max(-1).mean()), 1e-6))


@torch.no_grad()
def _write(layer: nn.Linear, weight: np.ndarray, bias: np.ndarray | None) -> None:
    """Write the classes' rows of the head, the same in every process; further outputs of a method stay as they are."""
    values = [weight, bias]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(values, 0)
    for parameter, found in zip((layer.weight, layer.bias), values, strict=True):
        if found is not None:
            parameter[: len(found)] = torch.as_tensor(found).to(parameter.device, parameter.dtype)
