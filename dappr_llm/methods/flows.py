"""Radial normalising flows, several in parallel."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

_TINY = 1e-30  # smaller than any determinant before its parameters underflow


class RadialFlows(nn.Module):
    """
    F independent stacks of radial layers that map the same input to a standard normal.

    A layer moves a point along the ray from the layer's centre: `x + b/(a + r) (x - centre)` with `r = |x - centre|`,
    `a = softplus(a')` and `b = softplus(b') - a`, which keeps it invertible (Rezende and Mohamed 2015,
    https://arxiv.org/abs/1505.05770).

    Args:
        dim (`int`):
            Dimension L of the input.
        layers (`int`):
            Layers of each flow.
        flows (`int`, *optional*, defaults to 1):
            Number of flows F.
    """

    def __init__(self, dim: int, layers: int, flows: int = 1):
        super().__init__()
        bound = 1 / math.sqrt(dim)
        self.dim = dim
        self.centres = nn.Parameter(torch.empty(layers, flows, dim).uniform_(-bound, bound))
        self.raw_a = nn.Parameter(torch.empty(layers, flows).uniform_(-bound, bound))
        self.raw_b = nn.Parameter(torch.empty(layers, flows).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs `[B, L]` → outputs `[B, F, L]` and log-determinants of the Jacobians `[B, F]`."""
        x = x.unsqueeze(-2)
        log_det = x.new_zeros(())
        for centre, raw_a, raw_b in zip(self.centres, self.raw_a, self.raw_b, strict=True):
            a, s = softplus(raw_a), softplus(raw_b)  # s = a + b
            offset = x - centre  # [B, F, L]
            r = torch.linalg.vector_norm(offset, dim=-1)
            u = 1 / (a + r)
            x = x + ((s - a) * u).unsqueeze(-1) * offset
            # 1 + bu and 1 + bu - bu^2 r as sums of positive terms: no cancellation near a centre, no overflow.
            across = r * u + s * u
            along = r * u * (1 + a * u) + a * u * s * u
            log_det = log_det + (self.dim - 1) * across.clamp_min(_TINY).log() + along.clamp_min(_TINY).log()
        return x, log_det

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-density `[B, F]` of inputs `[B, L]` under each flow."""
        z, log_det = self(x)
        return log_det - z.square().sum(-1) / 2 - self.dim / 2 * math.log(2 * math.pi)
