"""Functions of Dirichlet parameters and one-hot targets that several methods share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

_TINY = 1e-12  # below this t, float32 autograd of t*log1p(1/t) meets inf*0


def one_hot_labels(labels: Tensor, like: Tensor) -> Tensor:
    """Class indices `[B]` as one-hot rows `[B, K]`, soft labels unchanged; in the dtype of `like` `[B, K]`."""
    if labels.dim() == like.dim():
        return labels.to(like.dtype)
    return one_hot(labels, like.shape[-1]).to(like.dtype)


def log_softplus(z: Tensor) -> Tensor:
    """`log(softplus(z))`, accurate where softplus itself underflows."""
    low = z < -15
    small = z - z.clamp_max(-15).exp() / 2
    return torch.where(low, small, softplus(z.clamp_min(-15)).log())


def psi(t: Tensor) -> Tensor:
    """`(1+t) log(1+t) - t log t` without cancellation; increasing, 0 at `t = 0`, derivative `log1p(1/t)`."""
    t = t.clamp_min(_TINY)
    return t.log1p() + t * t.reciprocal().log1p()


def evidence_gain(evidence: Tensor, target: Tensor) -> Tensor:
    """
    `alpha log alpha - (alpha-y) log(alpha-y)` for `alpha = evidence + 1` and targets `y` in [0, 1].

    For `y = 1` this is `psi(evidence)`, for `y = 0` it is 0. `alpha - y` is formed from the evidence, because
    `1 + softplus(z)` rounds to 1 in float32 below z = -16.6.
    """
    rest = (evidence + (1 - target)).clamp_min(_TINY)
    return target * evidence.log1p() + rest * (target / rest).log1p()


def kl_to_symmetric(alpha: Tensor, prior: float = 1.0) -> Tensor:
    """
    `KL(Dir(alpha) || Dir(prior, ..., prior))` `[B]` of alpha `[B, K]`; prior 1 is the uniform distribution.

    Computed in float64, since differences of large lgamma values lose their digits in float32.
    """
    a = alpha.double()
    a0 = a.sum(-1)
    reference = torch.full_like(a[..., :1], prior)
    k = a.shape[-1]
    kl = torch.lgamma(a0) - torch.lgamma(a).sum(-1)
    kl = kl - torch.lgamma(k * reference).squeeze(-1) + k * torch.lgamma(reference).squeeze(-1)
    kl = kl + ((a - prior) * (torch.digamma(a) - torch.digamma(a0).unsqueeze(-1))).sum(-1)
    return kl.to(alpha.dtype)


def without_label(alpha: Tensor, target: Tensor, prior: float = 1.0) -> Tensor:
    """`alpha` with the true class set to the prior: evidential learning's KL term penalises the remaining evidence."""
    return prior + (1 - target) * (alpha - prior)


def squared_error(mean: Tensor, target: Tensor) -> Tensor:
    """`(y_k - m_k)^2` `[B, K]`."""
    return (target - mean).square()


def mean_variance(mean: Tensor, alpha0: Tensor) -> Tensor:
    """Dirichlet variance `m_k (1 - m_k) / (alpha0 + 1)` `[B, K]`; this form neither overflows nor cancels."""
    return mean * (1 - mean) / (alpha0 + 1)


def spurious_evidence(logits: Tensor, labels: Tensor) -> Tensor:
    """`R` `[B]`: the sum of squared alpha over the wrong classes (soft labels: weighted by `1 - y`)."""
    alpha = softplus(logits) + 1
    return ((1 - one_hot_labels(labels, logits)) * alpha.square()).sum(-1)


def clamp_keeping_gradient(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp with a straight-through gradient, so that a value outside the bounds can return."""
    return x.clamp(low, high).detach() + (x - x.detach())


def kl_divergence(alpha: Tensor, other: Tensor) -> Tensor:
    """`KL(Dir(alpha) || Dir(other))` `[B]`; expects float64, since large lgamma values cancel badly in float32."""
    alpha0, other0 = alpha.sum(-1), other.sum(-1)
    normalisers = (
        torch.lgamma(alpha0) - torch.lgamma(alpha).sum(-1) - torch.lgamma(other0) + torch.lgamma(other).sum(-1)
    )
    slopes = torch.digamma(alpha) - torch.digamma(alpha0).unsqueeze(-1)
    return normalisers + ((alpha - other) * slopes).sum(-1)


def entropy(alpha: Tensor) -> Tensor:
    """Differential entropy `[B]` of `Dir(alpha)`; expects float64, since evidence reaches 1e13."""
    alpha0 = alpha.sum(-1)
    normaliser = torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha0)
    slopes = (alpha0 - alpha.shape[-1]) * torch.digamma(alpha0) - ((alpha - 1) * torch.digamma(alpha)).sum(-1)
    return normaliser + slopes


def expected_cross_entropy(alpha: Tensor, target: Tensor) -> Tensor:
    """Expected `-log p_y` under `Dir(alpha)`, `digamma(alpha0) - digamma(alpha_y)` `[B]`; expects float64."""
    return (target * (torch.digamma(alpha.sum(-1, keepdim=True)) - torch.digamma(alpha))).sum(-1)
