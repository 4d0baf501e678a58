"""
Prior networks, trained on auxiliary out-of-distribution rows beside the labelled ones (Malinin and Gales 2018,
https://arxiv.org/abs/1802.10501; with the reverse KL 2019, https://arxiv.org/abs/1905.13472).

    alpha = exp(z)
    target: t_k = 1 for every class, t_y = 1 + precision; t = 1 for an auxiliary row
    kl_pn:  loss = KL(Dir(t) || Dir(alpha)) / precision
    rkl_pn: loss = KL(Dir(alpha) || Dir(t)) / precision      auxiliary rows weigh ood_weight

Needs `auxiliary_rows`, unlabelled rows with label -1. Scores: aleatoric `1 - max alpha/alpha0`, epistemic `K/alpha0`. Where
evidential methods hope that evidence is low far from the data, a prior network is told where it must be. The forward
KL averages over targets: for classes that a model cannot tell apart it settles at alpha below 1, with less evidence
than auxiliary rows have. The reverse KL does not, and learns faster.

Differs from the paper: labelled and auxiliary rows stand in one batch, and the loss is the mean over all of them. At
equal shares that is half of the published sum of two means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.errors import UserError
from ..core.outputs import Outputs, Prediction, from_alpha, upcast
from .base import Method, Progress
from .dirichlet import clamp_keeping_gradient, kl_divergence

_LIMIT = 15.0  # digamma(alpha) is about -1/alpha for small alpha, and lgamma cancels for large ones


def prior_alpha(logits: Tensor) -> Tensor:
    """`exp(z)` with `z` held within ±15."""
    return clamp_keeping_gradient(logits, -_LIMIT, _LIMIT).exp()


def prior_targets(labels: Tensor, like: Tensor, precision: float) -> tuple[Tensor, Tensor]:
    """The target Dirichlet of each row, and which rows are auxiliary (label -1, or a soft label of zeros)."""
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
    A Dirichlet prior network.

    Args:
        precision (`float`, *optional*, defaults to 100):
            What the label's class gets above 1 in the target (the paper's beta).
        ood_weight (`float`, *optional*, defaults to 1.0):
            Weight of auxiliary rows (gamma).
        reverse (`bool`, *optional*, defaults to `False`):
            The reverse KL, registered as `rkl_pn`.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"auxiliary_rows"})
    precision: float = 100.0
    ood_weight: float = 1.0
    reverse: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision <= 0 or self.ood_weight < 0:
            raise UserError(
                f"precision must be above 0 and ood_weight not negative, got {self.precision} and {self.ood_weight}"
            )

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
