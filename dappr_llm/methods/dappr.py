"""
DAPPr: Dirichlet-approximated possibilistic posterior predictions (https://arxiv.org/abs/2605.00600).

    alpha = softplus(z) + 1,   alpha0 = sum_k alpha_k
    loss  = D + lambda_e * R,  R = sum over k != y of alpha_k^2
    D     = Psi(alpha0 - 1) - Psi(softplus(z_y)),   Psi(t) = (1+t) log(1+t) - t log t

`D` is the maxitive divergence between the Dirichlet possibility function and the projected posterior. Needs
logits only. Scores: aleatoric `1 - max alpha/alpha0`, epistemic `K/alpha0`. Close to the digamma risk
of evidential learning for large alpha, but it neither integrates over the simplex nor needs a KL term.

Differs from the paper: the paper writes `log g(p*)` with `p*` held constant. That value is unbounded below
for bad models, and without the stop-gradient its gradient has the wrong sign. `D = log g(p*) - log p*_y` has
the paper's gradient under plain autograd, is never negative and falls as the model improves; the paper's
value is logged as `paper_value`. With `evidence="exp"`, which is ours, `alpha = exp(z) + 1`: see `exp_evidence.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import softplus

from ..core.errors import UserError
from ..core.outputs import Outputs, Prediction, from_alpha, from_log_alpha, upcast
from ..core.schemas.method_options import DAPPrOptions
from . import exp_evidence
from .base import Method, Progress, Scheduled
from .dirichlet import (
    evidence_gain,
    kl_to_symmetric,
    log_softplus,
    one_hot_labels,
    psi,
    spurious_evidence,
    without_label,
)

MOST_EXP_WEIGHT = 1e-5  # of R with exponential evidence


def divergence(logits: Tensor, labels: Tensor) -> Tensor:
    """The maxitive divergence `D` `[B]` of logits `[B, K]`; labels `[B]`, or soft labels `[B, K]`."""
    evidence = softplus(logits)
    total = evidence.sum(-1) + (logits.shape[-1] - 1)  # alpha0 - 1
    return psi(total) - evidence_gain(evidence, one_hot_labels(labels, logits)).sum(-1)


def log_possibility(logits: Tensor, labels: Tensor) -> Tensor:
    """The paper's `log g(p*)` `[B]`, at most 0. For logging and tests; not a loss, and not for model selection."""
    evidence = softplus(logits)
    total = evidence.sum(-1) + (logits.shape[-1] - 1)
    if labels.dim() == logits.dim():
        target = one_hot_labels(labels, logits)
        share = ((evidence + (1 - target)) / total.unsqueeze(-1)).clamp_min(1e-30)
        return divergence(logits, labels) + (target * share.log()).sum(-1)
    # h(alpha0) - h(alpha_y) with h(1+t) = (1+t) log1p(1/t): accurate to 1e-7 where the published form cancels.
    logit_y = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    h_total = (1 + total) * total.reciprocal().log1p()
    h_label = (1 + softplus(logit_y)) * softplus(-log_softplus(logit_y))
    return h_total - h_label


@dataclass(frozen=True, kw_only=True)
class DAPPr(Scheduled, Method):
    """
    The DAPPr loss.

    Args:
        reg_weight (`float`, *optional*):
            Coefficient lambda of R at the end of its schedule; 2e-4 unless a trainer chooses another one.
        schedule (`str`, *optional*):
            `"warmup"`, `"linear"` or `"constant"`; `"warmup"` unless a trainer chooses another one. A model with
            chance accuracy at the start needs `"constant"`.
        warmup_epochs (`float`, *optional*):
            Length of the warm-up, in epochs; 10.
        regulariser (`str`, *optional*):
            `"spurious"` (R, the default of softplus evidence) or `"none"` (the default of exponential evidence); for
            ablations `"kl"` (the KL term of evidential learning).
        evidence (`str`, *optional*, defaults to `"softplus"`):
            `"softplus"`, the paper's `alpha = softplus(z) + 1`, whose confidence is at most `(s+1)/(s+K)` with `s`
            growing as slowly as a logit does; or `"exp"`, `alpha = exp(z) + 1`, which learns like cross-entropy and
            is meant for many classes.
    """

    schema: ClassVar[Any] = DAPPrOptions
    regulariser: str = None  # type: ignore[assignment]  # settled by the evidence
    evidence: str = "softplus"

    def __post_init__(self) -> None:
        if self.regulariser is None:
            object.__setattr__(self, "regulariser", "none" if self.evidence == "exp" else "spurious")
        super().__post_init__()
        if self.evidence == "exp" and self.regulariser == "spurious" and self.reg_weight > MOST_EXP_WEIGHT:
            raise UserError(
                f"method.reg_weight {self.reg_weight:g} with evidence: exp: R grows as e^(2z) there, and takes over "
                f"the loss; leave regulariser out, or use a weight of at most {MOST_EXP_WEIGHT:g}"
            )

    @property
    def regularised(self) -> bool:
        return self.regulariser != "none"

    def defaults(self) -> dict[str, Any]:
        return super().defaults() | {"reg_weight": 2e-4}

    def at_chance(self) -> dict[str, Any]:
        if self.evidence == "exp" or self.regulariser != "spurious":
            return self.defaults()
        return {"reg_weight": 5e-3, "schedule": "constant", "warmup_epochs": 10}

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        logits = upcast(out.logits)
        terms = {"fit": self._divergence(logits, labels)}
        if self.regulariser != "none":
            terms["reg"] = self.weight(progress) * self._penalty(logits, labels)
        return terms

    def _divergence(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (exp_evidence.divergence if self.evidence == "exp" else divergence)(logits, labels)

    def _penalty(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.evidence == "softplus" and self.regulariser == "spurious":
            return spurious_evidence(logits, labels)
        target = one_hot_labels(labels, logits)
        alpha = exp_evidence.alpha_of(logits) if self.evidence == "exp" else softplus(logits) + 1
        if self.regulariser == "spurious":
            return ((1 - target) * alpha.square()).sum(-1)
        return kl_to_symmetric(without_label(alpha, target))

    def predict(self, out: Outputs) -> Prediction:
        logits = upcast(out.logits)
        return from_log_alpha(softplus(logits)) if self.evidence == "exp" else from_alpha(softplus(logits) + 1)

    def monitor(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        logits = upcast(out.logits)
        value = (exp_evidence.log_possibility if self.evidence == "exp" else log_possibility)(logits, labels)
        if self.regulariser != "none":
            value = value + self.weight(progress) * self._penalty(logits, labels)
        return {"paper_value": value}


def dappr_loss(logits: Tensor, labels: Tensor, reg_weight: float | None = None, evidence: str = "softplus") -> Tensor:
    """
    The DAPPr loss for a custom training loop: the batch mean of `D + reg_weight * R`.

    Args:
        logits (`Tensor`):
            `[B, K]`, any floating dtype; computed in float32 or better.
        labels (`Tensor`):
            `[B]` class indices, or `[B, K]` soft labels whose rows sum to 1.
        reg_weight (`float`, *optional*):
            The coefficient lambda *at this step*; apply a schedule by passing another value each epoch. By default
            2e-4, and 0 with exponential evidence, where R is too steep.
        evidence (`str`, *optional*, defaults to `"softplus"`):
            `"softplus"` as in the paper, or `"exp"`, for many classes: cross-entropy with a level.

    Example:

    ```python
    >>> loss = dappr_loss(model(images), labels, reg_weight=2e-4 * min(1, epoch / 10))
    ```
    """
    logits = upcast(logits)
    if evidence == "softplus":
        weight = 2e-4 if reg_weight is None else reg_weight
        return (divergence(logits, labels) + weight * spurious_evidence(logits, labels)).mean()
    method = DAPPr(evidence=evidence, reg_weight=reg_weight or 0.0, regulariser="spurious" if reg_weight else "none")
    loss = exp_evidence.divergence(logits, labels)
    return (loss + reg_weight * method._penalty(logits, labels) if reg_weight else loss).mean()


def dappr_uncertainty(logits: Tensor, evidence: str = "softplus") -> Prediction:
    """
    Probabilities, Dirichlet parameters and the two uncertainties of DAPPr logits `[B, K]`.

    Args:
        logits (`Tensor`):
            `[B, K]`.
        evidence (`str`, *optional*, defaults to `"softplus"`):
            As in [`dappr_loss`]: what the model was trained with.

    Example:

    ```python
    >>> out = dappr_uncertainty(model(images))
    >>> out.probs, out.alpha, out.aleatoric, out.epistemic
    ```
    """
    return DAPPr(evidence=evidence).predict(Outputs(logits=logits))
