"""
IB-EDL: evidential learning with an information bottleneck (Li et al. 2025, https://arxiv.org/abs/2502.06351).

    z ~ N(mu, s^2) with s = softplus(r),   alpha = softplus(z) + 1
    loss = mean over noise samples of [squared error + variance, as EDL] + beta * KL(N(mu, s^2) || N(0, 1))
    p    = abar/abar0,  abar = max(1, mean over noise samples of alpha - scale_penalty * s)

Needs 2K logits: K means and K pre-activations r of the scales (text: reserved vocabulary rows, stored with the
checkpoint; vision: a classifier of twice the width). Scores: aleatoric `1 - max p`, epistemic `K/abar0`. Differs from
EDL in that an information bottleneck on the noisy logits, not a KL term between Dirichlets, limits the evidence.

Differs from the paper: at prediction time the noise is drawn from a fixed seed and is the same for every row, so that
a prediction depends neither on its batch nor on earlier predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..core.outputs import Outputs, Prediction, from_alpha, upcast
from ..core.schemas.method_options import IBEDLOptions
from .base import Method, Progress
from .dirichlet import log_softplus, one_hot_labels
from .edl import expected_error


def information(mean: Tensor, raw_scale: Tensor) -> Tensor:
    """`KL(N(mean, softplus(raw_scale)^2) || N(0, 1))` `[B]`, summed over classes."""
    spread = softplus(raw_scale).square() - 2 * log_softplus(raw_scale) - 1
    return 0.5 * (mean.square() + spread).sum(-1)


def draw_alpha(mean: Tensor, raw_scale: Tensor, noise: Tensor) -> Tensor:
    """Dirichlet parameters `[n, B, K]` for n samples of standard normal noise, `[n, B, K]` or `[n, 1, K]`."""
    return softplus(mean + softplus(raw_scale) * noise) + 1


@dataclass(frozen=True, kw_only=True)
class IBEDL(Method):
    """
    Evidential learning with an information bottleneck.

    Args:
        beta (`float`, *optional*, defaults to 1e-5):
            Weight of the information term (Mistral-7B: 1e-5 on OBQA, 9e-5 on ARC-C, 5e-5 on CSQA).
        draws (`int`, *optional*, defaults to 20):
            Noise samples per row, in training and prediction.
        scale_penalty (`float`, *optional*, defaults to 0.0):
            Predicted alpha is reduced by this multiple of the scale s.
        noise_seed (`int`, *optional*, defaults to 0):
            Seed of the noise at prediction time.
    """

    schema: ClassVar[Any] = IBEDLOptions
    beta: float = 1e-5
    draws: int = 20
    scale_penalty: float = 0.0
    noise_seed: int = 0

    def num_outputs(self, num_classes: int) -> int:
        return 2 * num_classes

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        mean, raw_scale = upcast(out.logits).chunk(2, dim=-1)
        noise = torch.randn((self.draws, *mean.shape), dtype=mean.dtype, device=mean.device)
        return self.terms(mean, raw_scale, noise, labels)

    def terms(self, mean: Tensor, raw_scale: Tensor, noise: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss terms `[B]` for given noise `[n, B, K]`."""
        alpha = draw_alpha(mean, raw_scale, noise)
        error = expected_error(alpha, one_hot_labels(labels, mean))
        return {"fit": error.mean(0), "info": self.beta * information(mean, raw_scale)}

    def predict(self, out: Outputs) -> Prediction:
        mean, raw_scale = upcast(out.logits).chunk(2, dim=-1)
        noise = self.prediction_noise(mean.shape[-1]).to(mean)
        noise = noise.view(self.draws, *[1] * (mean.dim() - 1), mean.shape[-1])
        return from_alpha(self.lowered(draw_alpha(mean, raw_scale, noise).mean(0), raw_scale))

    def lowered(self, alpha: Tensor, raw_scale: Tensor) -> Tensor:
        """`max(1, alpha - scale_penalty * s)` `[B, K]`."""
        return (alpha - self.scale_penalty * softplus(raw_scale)).clamp_min(1)

    def prediction_noise(self, num_classes: int) -> Tensor:
        """Noise `[draws, K]`, seeded per class, so that class k gets the same noise whatever the number of options."""

        def column(k: int) -> Tensor:
            return torch.randn(self.draws, generator=torch.Generator().manual_seed(1_000 * self.noise_seed + k))

        return torch.stack([column(k) for k in range(num_classes)], dim=-1)
