"""
F-EDL: evidential learning with a flexible Dirichlet (Yoon and Kim 2025, https://arxiv.org/abs/2510.18322).

    alpha = exp(z),   p = softmax(g_p),   tau = softplus(g_tau);   mixture: sum_j p_j Dir(alpha + tau e_j)
    A = alpha0 + tau,   mu = (alpha + tau p)/A,   Var_k = mu_k (1 - mu_k)/(A + 1) + tau^2 p_k (1 - p_k)/(A (A + 1))
    loss = sum_k (y_k - mu_k)^2 + sum_k Var_k + sum_k (y_k - p_k)^2

Needs `features` (the inputs of the MLPs g_p and g_tau) and `spectral_norm` (backbone and classifier, not the MLPs).
Scores: epistemic `sum_k Var_k`, aleatoric `1 - sum_k mu_k^2 - sum_k Var_k`. Where EDL predicts one Dirichlet, this
mixture can have several modes; it has no KL term and no coefficient to tune.

Differs from the paper's code, which sums the loss over a batch: ours is the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.outputs import Outputs, Prediction, upcast
from ..core.schemas.method_options import FEDLOptions
from .base import HeadInfo, Method, Progress
from .dirichlet import log_softplus, one_hot_labels, squared_error


def flexible_moments(logits: Tensor, p_logits: Tensor, tau_logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and `p`, each `[B, K]`, of the mixture; computed from logarithms, so that no logit overflows."""
    p = p_logits.softmax(-1)
    log_tau = log_softplus(tau_logit).unsqueeze(-1)
    log_total = torch.logaddexp(logits.logsumexp(-1, keepdim=True), log_tau)  # log A
    tau_share = (log_tau - log_total).exp()  # tau / A
    mean = (logits - log_total).exp() + p * tau_share
    within = mean * (1 - mean) * torch.sigmoid(-log_total)  # sigmoid(-log A) = 1/(A + 1)
    between = p * (1 - p) * tau_share.square() * torch.sigmoid(log_total)
    return mean, within + between, p


class FEDLHead(nn.Module):
    """Features `[B, D]` → `p_logits` `[B, K]` and `tau_logit` `[B]`, by one MLP each."""

    def __init__(self, dim: int, num_classes: int, hidden_dim: int):
        super().__init__()
        self.p = self._mlp(dim, hidden_dim, num_classes)
        self.tau = self._mlp(dim, hidden_dim, 1)

    @staticmethod
    def _mlp(dim: int, hidden_dim: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(dim, hidden_dim), nn.ReLU(), nn.LayerNorm(hidden_dim), nn.Linear(hidden_dim, outputs)
        )

    def forward(self, features: Tensor, logits: Tensor | None = None) -> dict[str, Tensor]:
        return {"p_logits": self.p(features), "tau_logit": self.tau(features).squeeze(-1)}


@dataclass(frozen=True, kw_only=True)
class FEDL(Method):
    """
    Evidential learning with the flexible Dirichlet distribution.

    Args:
        hidden_dim (`int`, *optional*, defaults to 256):
            Hidden width of the two MLPs.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"features", "spectral_norm"})
    schema: ClassVar[Any] = FEDLOptions
    hidden_dim: int = 256

    def build_head(self, info: HeadInfo) -> nn.Module:
        return FEDLHead(info.features(), info.num_classes, self.hidden_dim)

    def _moments(self, out: Outputs) -> tuple[Tensor, Tensor, Tensor]:
        return flexible_moments(upcast(out.logits), out.of_head("p_logits"), out.of_head("tau_logit"))

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        mean, variance, p = self._moments(out)
        target = one_hot_labels(labels, mean)
        return {
            "fit": squared_error(mean, target).sum(-1),
            "variance": variance.sum(-1),
            "brier": squared_error(p, target).sum(-1),
        }

    def predict(self, out: Outputs) -> Prediction:
        mean, variance, _ = self._moments(out)
        epistemic = variance.sum(-1)
        return Prediction(mean, None, 1 - mean.square().sum(-1) - epistemic, epistemic)
