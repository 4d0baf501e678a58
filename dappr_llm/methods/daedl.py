"""
DAEDL: density-aware evidential learning (Yoon and Kim 2024, https://arxiv.org/abs/2409.08754).

    training:   alpha = exp(z) + 1e-6,   loss = EDL's error and variance + reg_weight * KL(Dir(alpha~) || Dir(1))
    afterwards: d(x) = log sum_c N(f; mean_c, cov_c) over training features,   s = clip((d - min)/(max - min), 0, 1)
    prediction: alpha* = exp(s z)

Needs `features`, `spectral_norm` (of all layers, so that feature distances reflect input distances) and `fit_after`
(the Gaussians). Scores: aleatoric `1 - max alpha*/alpha0*`, epistemic `K/alpha0*`. Differs from EDL in `exp` instead
of softplus, and in that at prediction time the feature density scales the logits.

Differs from the paper's code: the loss is a mean, not a sum; the density is fitted to rows without augmentation, with
covariances shrunk instead of jittered, and one shared covariance where classes have too few rows for one each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.outputs import Outputs, Prediction, from_alpha, upcast
from ..core.schemas.method_options import DAEDLOptions
from .base import HeadInfo, Method, Progress, Scheduled
from .class_gaussians import fit_gaussians, log_density
from .dirichlet import clamp_keeping_gradient, kl_to_symmetric, one_hot_labels
from .edl import expected_error

_LIMIT = 30.0  # exp(88) is infinite in float32
_EPS = 1e-6
_LEAST = 1e-5  # lower bound of s: alpha* is then close to 1, while the argmax of the logits is kept


def bounded(logits: Tensor) -> Tensor:
    """Logits clamped to ±30, so that their exponential is finite in float32."""
    return clamp_keeping_gradient(logits, -_LIMIT, _LIMIT)


def share_covariance(kind: str, info: HeadInfo) -> bool:
    """Whether to fit one pooled covariance; `"auto"`: unless every class has at least 2 D training rows."""
    if kind != "auto":
        return kind == "shared"
    return info.class_counts is None or min(info.class_counts) < 2 * info.features()


class DensityHead(nn.Module):
    """Features `[B, D]` → `density` `[B]`, the factor s in [0, 1] that scales the logits; 1 until it is fitted."""

    def __init__(self, dim: int, num_classes: int, shared: bool):
        super().__init__()
        self.shared = shared
        matrices = 1 if shared else num_classes
        self.register_buffer("means", torch.zeros(num_classes, dim))
        self.register_buffer("whitening", torch.eye(dim).repeat(matrices, 1, 1))
        self.register_buffer("present", torch.zeros(num_classes, dtype=torch.bool))
        self.register_buffer("bounds", torch.zeros(2))  # smallest and largest log-density of the training rows
        self.means: Tensor
        self.whitening: Tensor
        self.present: Tensor
        self.bounds: Tensor

    def forward(self, features: Tensor, logits: Tensor | None = None) -> dict[str, Tensor]:
        if self.training or not self.present.any():  # the training loss does not use it
            return {"density": features.new_ones(len(features))}
        with torch.no_grad():
            low, high = self.bounds.double()
            share = (self.log_density(features) - low) / (high - low).clamp_min(1e-12)
        return {"density": share.clamp(_LEAST, 1).to(features.dtype)}

    def log_density(self, features: Tensor) -> Tensor:
        """Log-density `[B]` of features `[B, D]`, computed in float64 whatever the dtype of the buffers."""
        return log_density(features.double(), self.means.double(), self.whitening.double(), self.present)

    @torch.no_grad()
    def fit(self, features: Tensor, labels: Tensor, shrinkage: float | None) -> None:
        """Fit the class Gaussians to features `[N, D]`, then the range of the log-density on the same rows."""
        found = fit_gaussians(features, labels, len(self.means), self.shared, shrinkage)
        for buffer, value in zip((self.means, self.whitening, self.present), found, strict=True):
            buffer.copy_(value)
        densities = torch.cat([self.log_density(rows.to(self.means.device)) for rows in features.split(1024)])
        self.bounds.copy_(torch.stack([densities.min(), densities.max()]))


@dataclass(frozen=True, kw_only=True)
class DAEDL(Scheduled, Method):
    """
    Evidential learning whose logits are scaled by the feature density at prediction time.

    Args:
        reg_weight (`float`, *optional*, defaults to 0.05):
            Coefficient of the KL term.
        schedule (`str`, *optional*, defaults to `"constant"`):
            `"warmup"`, `"linear"` or `"constant"`.
        covariance (`str`, *optional*, defaults to `"auto"`):
            `"full"` (one per class), `"shared"` (pooled), or `"auto"`: full if every class has at least twice as many
            training rows as features.
        shrinkage (`float`, *optional*):
            Weight of the identity in a covariance; by default estimated, see [`shrunk`].
    """

    needs: ClassVar[frozenset[str]] = frozenset({"features", "spectral_norm", "fit_after"})
    schema: ClassVar[Any] = DAEDLOptions
    covariance: str = "auto"
    shrinkage: float | None = None

    def defaults(self) -> dict[str, Any]:
        return super().defaults() | {"reg_weight": 0.05, "schedule": "constant"}

    def build_head(self, info: HeadInfo) -> nn.Module:
        return DensityHead(info.features(), info.num_classes, share_covariance(self.covariance, info))

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        logits = upcast(out.logits)
        alpha = bounded(logits).exp() + _EPS
        target = one_hot_labels(labels, logits)
        rest = target + (1 - target) * alpha + _EPS
        return {"fit": expected_error(alpha, target), "reg": self.weight(progress) * kl_to_symmetric(rest)}

    def predict(self, out: Outputs) -> Prediction:
        logits = bounded(upcast(out.logits))
        share = out.of_head("density") if out.head is not None else logits.new_ones(len(logits))
        return from_alpha((share.unsqueeze(-1) * logits).exp())

    def fit_head(self, head: nn.Module, features: Tensor, labels: Tensor) -> None:
        assert isinstance(head, DensityHead)
        head.fit(features, labels, self.shrinkage)
