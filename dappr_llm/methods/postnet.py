"""
PostNet: posterior network with one density per class (Charpentier et al. 2020, https://arxiv.org/abs/2006.09239).

    l = BatchNorm(linear(features)),   q_c: a radial flow per class over l
    alpha_c = 1 + N_c q_c(l),   N_c = training rows of class c
    loss    = digamma(alpha0) - digamma(alpha_y) - entropy_weight * entropy(Dir(alpha))

Needs `features`; the model has no linear classifier of its own. Scores: aleatoric `1 - max alpha/alpha0`, epistemic
`K/alpha0`. Evidence is proportional to a normalised density, so that it vanishes far from the training data; NatPN
does the same with a single flow.

Differs from the paper's code, which sums the loss over a batch: ours is the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.errors import UserError
from ..core.outputs import Outputs, Prediction, from_alpha
from ..core.schemas.method_options import PostNetOptions
from .base import HeadInfo, Method, Progress
from .dirichlet import clamp_keeping_gradient, entropy, expected_cross_entropy, one_hot_labels
from .flows import RadialFlows

LIMIT = 30.0  # bound of the log-evidence: a collapsing latent space would reach 80


def evidence_to_alpha(log_evidence: Tensor) -> Tensor:
    """`1 + exp(log_evidence)`."""
    return torch.logaddexp(torch.zeros_like(log_evidence), log_evidence).exp()


def posterior_terms(alpha: Tensor, labels: Tensor, entropy_weight: float) -> dict[str, Tensor]:
    """Expected cross-entropy and entropy bonus, each `[B]`; expects float64 alpha `[B, K]`."""
    fit = expected_cross_entropy(alpha, one_hot_labels(labels, alpha))
    return {"fit": fit, "entropy": -entropy_weight * entropy(alpha)}


def class_budget(counts: tuple[int, ...] | None, kind: str) -> Tensor:
    """`log N_c` `[K]` for the chosen kind of budget."""
    if counts is None:
        raise UserError("postnet needs the number of training rows of each class (HeadInfo.class_counts)")
    if min(counts) < 1:
        raise UserError(f"postnet: class {counts.index(min(counts))} has no training row, so it has no density")
    n = torch.tensor(counts, dtype=torch.float64)
    budget = {"counts": n, "one": torch.ones_like(n), "log": (n + 1).log(), "share": n / n.sum()}[kind]
    return budget.log().float()


class PostNetHead(nn.Module):
    """Features `[B, D]` → `log_evidence` `[B, K]`: `log N_c + log q_c`, clamped to ±30."""

    def __init__(self, dim: int, latent_dim: int, layers: int, log_counts: Tensor):
        super().__init__()
        self.latent = nn.Linear(dim, latent_dim)
        self.norm = nn.BatchNorm1d(latent_dim)
        self.flows = RadialFlows(latent_dim, layers, len(log_counts))
        self.register_buffer("log_counts", log_counts)
        self.log_counts: Tensor

    def forward(self, features: Tensor, logits: Tensor | None = None) -> dict[str, Tensor]:
        return {"log_evidence": self.log_evidence(self.norm(self.latent(features)))}

    def log_evidence(self, latent: Tensor) -> Tensor:
        """Log-evidence `[B, K]` of latents `[B, L]`."""
        return clamp_keeping_gradient(self.log_counts + self.flows.log_prob(latent), -LIMIT, LIMIT)


@dataclass(frozen=True, kw_only=True)
class PostNet(Method):
    """
    Posterior network.

    Args:
        latent_dim (`int`, *optional*, defaults to 6):
            Dimension L of the latent space.
        layers (`int`, *optional*, defaults to 6):
            Radial layers of each class's flow.
        entropy_weight (`float`, *optional*, defaults to 1e-5):
            Weight of the entropy bonus (1e-6 on MNIST).
        budget (`str`, *optional*, defaults to `"counts"`):
            `N_c`: `"counts"` (training rows of the class), `"one"`, `"log"` (`log(N_c + 1)`) or `"share"` (`N_c / N`).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"features"})
    schema: ClassVar[Any] = PostNetOptions
    latent_dim: int = 6
    layers: int = 6
    entropy_weight: float = 1e-5
    budget: str = "counts"

    def num_outputs(self, num_classes: int) -> int:
        return 0

    def build_head(self, info: HeadInfo) -> nn.Module:
        return PostNetHead(info.features(), self.latent_dim, self.layers, class_budget(info.class_counts, self.budget))

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        log_evidence = out.of_head("log_evidence")
        terms = posterior_terms(evidence_to_alpha(log_evidence.double()), labels, self.entropy_weight)
        return {name: term.to(log_evidence.dtype) for name, term in terms.items()}

    def predict(self, out: Outputs) -> Prediction:
        return from_alpha(evidence_to_alpha(out.of_head("log_evidence")))
