"""
I-EDL: evidential learning weighted by Fisher information (Deng et al. 2023, https://arxiv.org/abs/2303.02045).

    alpha = softplus(z) + 1,   m = alpha/alpha0,   psi1 = trigamma
    loss  = sum_k psi1(alpha_k) [(y_k - m_k)^2 + m_k (1 - m_k)/(alpha0 + 1)]
            - fisher_weight * log|I(alpha)| + lambda_e * KL(Dir(alpha~) || Dir(1))
    log|I| = sum_k log psi1(alpha_k) + log(1 - sum_k psi1(alpha0)/psi1(alpha_k))

Needs logits only. Scores as EDL: aleatoric `1 - max m`, epistemic `K/alpha0`. Differs from EDL in that classes with
little evidence get a larger weight in the error, and that the log-determinant penalises large evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..core.outputs import Outputs, Prediction, from_alpha, upcast
from ..core.schemas.method_options import IEDLOptions
from .base import Method, Progress, Scheduled
from .dirichlet import kl_to_symmetric, mean_variance, one_hot_labels, squared_error, without_label


def log_det_fisher(alpha: Tensor) -> Tensor:
    """
    Log-determinant `[B]` of the Fisher information of `Dir(alpha)`; expects float64.

    The argument of the second logarithm tends to `(K-1)/(2 alpha0)`, which in float32 may round to 0 or below.
    """
    trigamma = torch.polygamma(1, alpha)
    total = torch.polygamma(1, alpha.sum(-1, keepdim=True))
    rest = 1 - (total / trigamma).sum(-1)
    return trigamma.log().sum(-1) + rest.clamp_min(1e-12).log()


@dataclass(frozen=True, kw_only=True)
class IEDL(Scheduled, Method):
    """
    EDL with class errors weighted by Fisher information.

    Args:
        fisher_weight (`float`, *optional*, defaults to 0.05):
            Weight of the log-determinant (the paper's lambda_1: 0.05 on CIFAR-10, 0.005 on MNIST).
        reg_weight, schedule, warmup_epochs:
            Coefficient of the KL term; see [`Scheduled`].
    """

    schema: ClassVar[Any] = IEDLOptions
    fisher_weight: float = 0.05

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        logits = upcast(out.logits)
        target = one_hot_labels(labels, logits).double()
        alpha = softplus(logits).double() + 1  # trigamma and the determinant need float64
        alpha0 = alpha.sum(-1, keepdim=True)
        mean = alpha / alpha0
        error = squared_error(mean, target) + mean_variance(mean, alpha0)
        terms = {
            "fit": (torch.polygamma(1, alpha) * error).sum(-1),
            "fisher": -self.fisher_weight * log_det_fisher(alpha),
            "reg": self.weight(progress) * kl_to_symmetric(without_label(alpha, target)),
        }
        return {name: term.to(logits.dtype) for name, term in terms.items()}

    def predict(self, out: Outputs) -> Prediction:
        return from_alpha(softplus(upcast(out.logits)) + 1)
