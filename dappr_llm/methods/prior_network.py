"""
Prior networks, trained on auxiliary out-of-distribution rows besides the labelled ones (Malinin and Gales 2018,
https://arxiv.org/abs/1802.10501; with the reverse KL 2019, https://arxiv.org/abs/1905.13472).

    alpha = exp(z)
    target: t_k = 1 for every class, t_y = 1 + precision; t = 1 for an auxiliary row
    kl_pn:  loss = KL(Dir(t) || Dir(alpha)) / precision
    rkl_pn: loss = KL(Dir(alpha) || Dir(t)) / precision;     auxiliary rows are weighted by ood_weight

Needs `auxiliary_rows`, which have label -1. Scores: aleatoric `1 - max alpha/alpha0`, epistemic `K/alpha0`. Evidential
methods rely on evidence being low far from the training data; a prior network is trained to have low evidence on the
auxiliary rows. The forward KL averages over targets: for classes that the model confuses it converges to alpha below
1, less evidence than auxiliary rows get. The reverse KL does not, and trains faster.

Differs from the paper: labelled and auxiliary rows share a batch, and the loss is the mean over all of them. At equal
shares that is half of the published sum of two means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.outputs import Outputs, Prediction, from_alpha, upcast
from ..core.schemas.method_options import PriorNetworkOptions
from .base import Method, Progress
from .dirichlet import clamp_keeping_gradient, kl_divergence

_LIMIT = 15.0  # digamma(alpha) is about -1/alpha for small alpha, and lgamma cancels for large ones


def prior_alpha(logits: Tensor) -> Tensor:
    """`exp(z)` with `z` clamped to ±15."""
    return clamp_keeping_gradient(logits, -_LIMIT, _LIMIT).exp()


def prior_targets(labels: Tensor, like: Tensor, precision: float) -> tuple[Tensor, Tensor]:
    """Target Dirichlet parameters `[B, K]`, and the mask `[B]` of auxiliary rows (label -1, or soft label 0)."""
    if labels.dim() == like.dim():
        weights = labels.to(like.dtype)
        auxiliary = weights.sum(-1) == 0
    else:
        auxiliary = labels < 0
        weights = torch.nn.functional.one_hot(labels.clamp_min(0), like.shape[-1]).to(like.dtype)
        weights = weights * (~auxiliary).unsqueeze(-1)
    return 1 + precision * weights, auxiliary


@dataclass(frozen=True, kw_only=True)
class PriorNetwork(Method):
    """
    Dirichlet prior network.

    Args:
        precision (`float`, *optional*, defaults to 100):
            Target evidence of the true class (the paper's beta).
        ood_weight (`float`, *optional*, defaults to 1.0):
            Loss weight of auxiliary rows (the paper's gamma).
        reverse (`bool`, *optional*, defaults to `False`):
            Use the reverse KL; registered as `rkl_pn`.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"auxiliary_rows"})
    schema: ClassVar[Any] = PriorNetworkOptions
    precision: float = 100.0
    ood_weight: float = 1.0
    reverse: bool = False

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        logits = upcast(out.logits)
        alpha = prior_alpha(logits.double())
        target, auxiliary = prior_targets(labels, alpha, self.precision)
        divergence = kl_divergence(alpha, target) if self.reverse else kl_divergence(target, alpha)
        divergence = (divergence / self.precision).to(logits.dtype)
        zero = torch.zeros_like(divergence)
        return {
            "fit": torch.where(auxiliary, zero, divergence),
            "ood": self.ood_weight * torch.where(auxiliary, divergence, zero),
        }

    def predict(self, out: Outputs) -> Prediction:
        return from_alpha(prior_alpha(upcast(out.logits)))
