"""
R-EDL: evidential learning with a relaxed prior (Chen et al. 2024, https://openreview.net/forum?id=Si3YFA641c).

    s = softplus(z),   alpha = s + prior
    loss = sum_k (y_k - pi_k)^2 + lambda_e * KL(Dir(s (1-y) + prior) || Dir(prior))
    pi_k = (s_k + prior) / (s_k + cross_weight * sum of the other s_j + prior * K)

Needs logits only. Scores: aleatoric `1 - max alpha/alpha0`, epistemic `prior * K/alpha0`. Differs from EDL in the
weight of the prior (0.1 instead of 1 per class, so that less evidence gives a confident prediction) and in that the
variance term is dropped.

Differs from the paper, whose uncertainty mass is `K/alpha0`; the authors' code multiplies it by the prior, as we do.
The ranking is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import softplus

from ..core.outputs import Outputs, Prediction, from_alpha, upcast
from ..core.schemas.method_options import REDLOptions
from .base import Method, Progress, Scheduled
from .dirichlet import kl_to_symmetric, one_hot_labels, squared_error


@dataclass(frozen=True, kw_only=True)
class REDL(Scheduled, Method):
    """
    EDL with a relaxed prior.

    Args:
        prior (`float`, *optional*, defaults to 0.1):
            Dirichlet parameter of a class without evidence (the paper's lambda_2).
        cross_weight (`float`, *optional*, defaults to 1.0):
            Weight of the other classes' evidence in the projected probability pi (the paper's lambda_1). It affects
            the loss only; predictions are `alpha/alpha0`, which equals pi for 1.
        reg_weight, schedule, warmup_epochs:
            Coefficient of the KL term; see [`Scheduled`].
    """

    schema: ClassVar[Any] = REDLOptions
    prior: float = 0.1
    cross_weight: float = 1.0

    @property
    def epistemic_scale(self) -> float:
        return self.prior

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        logits = upcast(out.logits)
        target = one_hot_labels(labels, logits)
        evidence = softplus(logits)
        others = evidence.sum(-1, keepdim=True) - evidence
        total = evidence + self.cross_weight * others + self.prior * logits.shape[-1]
        penalty = kl_to_symmetric(evidence * (1 - target) + self.prior, self.prior)
        return {
            "fit": squared_error((evidence + self.prior) / total, target).sum(-1),
            "reg": self.weight(progress) * penalty,
        }

    def predict(self, out: Outputs) -> Prediction:
        return from_alpha(softplus(upcast(out.logits)) + self.prior, self.epistemic_scale)
