"""
DAPPr's terms with exponential evidence, `alpha = exp(z) + 1`, which the paper does not have.

Everything is computed from logarithms, so that nothing overflows: `log alpha = softplus(z)`, and with
`u = log(alpha0 - 1) = logsumexp(z_1, ..., z_K, log(K-1))` the divergence is `Psi(e^u) - Psi(e^{z_y})`.

For large evidence its gradient is `p_k - [k = y]`, that of cross-entropy: it is cross-entropy with a level. The level,
`alpha0`, has no optimum of its own; it depends on steps and learning rate, and `K/alpha0` ranks rows nearly as the
energy score of a cross-entropy model does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .dirichlet import one_hot_labels

_LARGE = 15.0  # beyond it the first terms of the series are exact to float32, and e^u would lose digits
_LARGEST = 60.0  # exponents beyond this change no float32 result of the terms that are clamped


def psi_of_exp(u: Tensor) -> Tensor:
    """`Psi(e^u)`; see `dirichlet.psi`."""
    small = u.clamp_max(_LARGE)
    return torch.where(
        u > _LARGE,
        u + 1 + (-u.clamp_min(_LARGE)).exp() / 2,
        softplus(small) + small.exp() * softplus(-small),
    )


def log_total(logits: Tensor) -> Tensor:
    """`log(alpha0 - 1)` `[B]` of logits `[B, K]`."""
    constant = logits.new_full((*logits.shape[:-1], 1), _log(logits.shape[-1] - 1))
    return torch.cat([logits, constant], dim=-1).logsumexp(-1)


def divergence(logits: Tensor, labels: Tensor) -> Tensor:
    """The maxitive divergence `D` `[B]` of logits `[B, K]`; labels `[B]`, or soft labels `[B, K]`."""
    total = psi_of_exp(log_total(logits))
    if labels.dim() < logits.dim():
        return total - psi_of_exp(_of_label(logits, labels))
    target = one_hot_labels(labels, logits)
    rest = logits.clamp_max(_LARGEST).exp() + (1 - target)
    # A class that is not the label at all gains nothing; its division would meet 0/0 where evidence is dead.
    gain = rest.clamp_min(1e-12) * (target / rest.clamp_min(1e-12)).log1p()
    return total - (target * softplus(logits) + gain).sum(-1)


def log_possibility(logits: Tensor, labels: Tensor) -> Tensor:
    """The paper's `log g(p*)` `[B]` with this evidence; for logs."""
    total = log_total(logits)
    if labels.dim() < logits.dim():
        return _h_of_exp(total) - _h_of_exp(_of_label(logits, labels))
    target = one_hot_labels(labels, logits)
    share = torch.logaddexp(logits, (1 - target).clamp_min(1e-30).log()) - total.unsqueeze(-1)
    return divergence(logits, labels) + (target * share).sum(-1)


def alpha_of(logits: Tensor) -> Tensor:
    """`alpha` `[B, K]`, finite for any finite logits."""
    return logits.clamp_max(_LARGEST).exp() + 1


def _h_of_exp(u: Tensor) -> Tensor:
    """`(1+t) log1p(1/t)` at `t = e^u`."""
    small = u.clamp_max(_LARGE)
    return torch.where(u > _LARGE, 1 + (-u.clamp_min(_LARGE)).exp() / 2, (1 + small.exp()) * softplus(-small))


def _of_label(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _log(number: int) -> float:
    return math.log(number) if number else -math.inf
