"""
EDL: evidential deep learning (Sensoy et al. 2018, https://arxiv.org/abs/1806.01768).

    alpha = softplus(z) + 1,   m = alpha/alpha0
    loss  = sum_k (y_k - m_k)^2 + sum_k m_k (1 - m_k)/(alpha0 + 1) + lambda_e * KL(Dir(alpha~) || Dir(1))
    alpha~ = alpha with the evidence of the true class removed

Needs logits only. Scores: aleatoric `1 - max m`, epistemic `K/alpha0`. Where DAPPr compares possibility functions, EDL
takes the expected squared error under the Dirichlet, whose gradient vanishes for large evidence. With
`regulariser="spurious"` (registered as `edl_spurious`) DAPPr's `R` replaces the KL term, for ablation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import softplus

from ..core.outputs import Outputs, Prediction, from_alpha, upcast
from ..core.schemas.method_options import EDLOptions
from .base import Method, Progress, Scheduled
from .dirichlet import kl_to_symmetric, mean_variance, one_hot_labels, spurious_evidence, squared_error, without_label


def expected_error(alpha: Tensor, target: Tensor) -> Tensor:
    """Expected squared error `[B]` under `Dir(alpha)`: squared error of the mean plus the variance."""
    alpha0 = alpha.sum(-1, keepdim=True)
    mean = alpha / alpha0
    return (squared_error(mean, target) + mean_variance(mean, alpha0)).sum(-1)


@dataclass(frozen=True, kw_only=True)
class EDL(Scheduled, Method):
    """
    Evidential deep learning with the squared-error risk.

    Args:
        reg_weight (`float`, *optional*):
            Coefficient at the end of its schedule; defaults to 1 for the KL term and to 2e-4 for `"spurious"`.
        schedule (`str`, *optional*, defaults to `"warmup"`):
            `"warmup"`, `"linear"` or `"constant"`.
        warmup_epochs (`float`, *optional*, defaults to 10):
            Length of the warm-up, in epochs.
        regulariser (`str`, *optional*, defaults to `"kl"`):
            `"kl"`, or for ablations `"spurious"` (DAPPr's R) and `"none"`.
    """

    schema: ClassVar[Any] = EDLOptions
    regulariser: str = "kl"

    @property
    def regularised(self) -> bool:
        return self.regulariser != "none"

    def defaults(self) -> dict[str, Any]:
        return super().defaults() | ({"reg_weight": 2e-4} if self.regulariser == "spurious" else {})

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        logits = upcast(out.logits)
        target = one_hot_labels(labels, logits)
        alpha = softplus(logits) + 1
        terms = {"fit": expected_error(alpha, target)}
        if self.regulariser == "kl":
            terms["reg"] = self.weight(progress) * kl_to_symmetric(without_label(alpha, target))
        elif self.regulariser == "spurious":
            terms["reg"] = self.weight(progress) * spurious_evidence(logits, labels)
        return terms

    def predict(self, out: Outputs) -> Prediction:
        return from_alpha(softplus(upcast(out.logits)) + 1)
