"""Gaussian class densities over features, with shrunk covariances so that a few rows per class are enough."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.errors import UserError


def shrunk(covariance: Tensor, rows: int, shrinkage: float | None = None) -> Tensor:
    """
    A covariance `[D, D]` shrunk towards a multiple of the identity, hence always invertible.

    Args:
        covariance (`Tensor`):
            The sample covariance.
        rows (`int`):
            Number of rows that the covariance was estimated from.
        shrinkage (`float`, *optional*):
            Weight of the identity, in [0, 1]. By default the oracle approximating shrinkage of Chen et al. 2010
            (https://arxiv.org/abs/0907.4698): large for few rows, close to 0 for many.
    """
    size = covariance.shape[-1]
    trace, squares = covariance.diagonal().sum(), covariance.square().sum()
    if shrinkage is None:
        spread = squares - trace.square() / size
        share = ((1 - 2 / size) * squares + trace.square()) / ((rows + 1 - 2 / size) * spread).clamp_min(1e-300)
        share = share.clamp(0, 1)
    else:
        share = covariance.new_tensor(shrinkage)
    identity = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    floor = max(1e-9 * float(trace) / size, 1e-12)  # keeps it invertible even if all rows are equal
    return (1 - share) * covariance + (share * trace / size + floor) * identity


def fit_gaussians(
    features: Tensor, labels: Tensor, num_classes: int, shared: bool = False, shrinkage: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Fit one Gaussian per class; means and whitening matrices in float64.

    Args:
        features (`Tensor`):
            `[N, D]`.
        labels (`Tensor`):
            `[N]`, all in `0..K-1`.
        num_classes (`int`):
            K.
        shared (`bool`, *optional*, defaults to `False`):
            One within-class covariance pooled over all classes instead of one per class.
        shrinkage (`float`, *optional*):
            See `shrunk`.

    Returns:
        Means `[K, D]`; whitening matrices `[K, D, D]` (shared: `[1, D, D]`), for which `W (x - mean)` is standard
        normal; and a mask `[K]` of the classes with at least one row. A class with a single row gets the pooled
        within-class covariance.
    """
    if not features.isfinite().all():
        raise UserError("The features hold NaN or Inf: no density can be fitted; train with a smaller learning rate")
    features = features.double()
    counts = torch.bincount(labels, minlength=num_classes)
    means = features.new_zeros(num_classes, features.shape[-1]).index_add_(0, labels, features)
    means = means / counts.clamp_min(1).unsqueeze(-1)
    within = features - means[labels]
    classes = int((counts > 0).sum())
    pooled = within.T @ within / max(len(features) - classes, 1)
    common = _whitening(shrunk(pooled, len(features), shrinkage))
    if shared:
        return means, common.unsqueeze(0), counts > 0
    each = [common] * num_classes
    for k, count in enumerate(counts.tolist()):
        if count > 1:
            rows = within[labels == k]
            each[k] = _whitening(shrunk(rows.T @ rows / (count - 1), count, shrinkage))
    return means, torch.stack(each), counts > 0


def _whitening(covariance: Tensor) -> Tensor:
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), identity, upper=False)


def squared_distances(x: Tensor, means: Tensor, whitening: Tensor) -> Tensor:
    """Squared Mahalanobis distance of rows `[B, D]` to each class, `[B, K]`."""
    if len(whitening) == 1:  # whiten once; [B, K, D] would not fit into memory for many classes
        return torch.cdist(x @ whitening[0].T, means @ whitening[0].T).square()
    each = [((x - mean) @ matrix.T).square().sum(-1) for mean, matrix in zip(means, whitening, strict=True)]
    return torch.stack(each, dim=-1)


def log_density(x: Tensor, means: Tensor, whitening: Tensor, present: Tensor) -> Tensor:
    """`log sum_c N(x; mean_c, cov_c)` `[B]` of rows `[B, D]`; classes are weighted equally, without a class prior."""
    log_norm = whitening.diagonal(dim1=-2, dim2=-1).log().sum(-1) - x.shape[-1] / 2 * math.log(2 * math.pi)
    each = log_norm - squared_distances(x, means, whitening) / 2  # [B, K]
    return each.masked_fill(~present, -torch.inf).logsumexp(-1)
