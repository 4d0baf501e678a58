"""Choosing the sets of classes of a random-set network: those whose features overlap most."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.errors import UserError
from .class_gaussians import fit_gaussians, squared_distances

_RADIUS = 7.815  # squared Mahalanobis radius that holds 95 % of a 3-dimensional Gaussian
_POINTS = 50_000  # Monte-Carlo points over all classes


def choose_sets(
    features: Tensor, labels: Tensor, num_classes: int, budget: int, embedding: str = "tsne", rows: int = 3000
) -> list[tuple[int, ...]]:
    """
    The `budget` sets of two or more classes that overlap most; fewer if there are not that many overlapping sets.

    Args:
        features (`Tensor`):
            Features of training rows, `[N, D]`.
        labels (`Tensor`):
            `[N]`.
        num_classes (`int`):
            K.
        budget (`int`):
            How many sets to keep.
        embedding (`str`, *optional*, defaults to `"tsne"`):
            How features are reduced to 3 dimensions: `"tsne"` or the much faster, linear `"pca"`.
        rows (`int`, *optional*, defaults to 3000):
            Maximum number of rows to embed, equally many of each class.

    Returns:
        Sets as sorted tuples of class indices, largest overlap first.
    """
    keep = _balanced(labels, rows)
    points = embed(features[keep], embedding)
    means, whitening, present = fit_gaussians(points, labels[keep], num_classes)
    inside, weights = ellipsoid_points(means, whitening, present)
    return [chosen for _, chosen in grow_sets(inside, weights, budget)]


def _balanced(labels: Tensor, rows: int) -> Tensor:
    """Indices of at most `rows` rows, equally many per class, drawn with a fixed seed."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(labels.device)
    classes = labels.unique()
    part = max(rows // len(classes), 1)
    return torch.cat([order[labels[order] == k][:part] for k in classes])


def embed(features: Tensor, kind: str) -> Tensor:
    """Features `[N, D]` reduced to `[N, 3]` by `kind`; on the CPU."""
    features = features.detach().double().cpu()
    if len(features) < 8:
        raise UserError(f"rs_nn chooses its sets from training rows, and found only {len(features)}")
    centred = features - features.mean(0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    if kind == "pca":
        reduced = centred @ directions[:3].T
        return torch.nn.functional.pad(reduced, (0, 3 - reduced.shape[-1]))
    from sklearn.manifold import TSNE

    reduced = centred @ directions[:50].T  # t-SNE uses distances only; 50 principal components keep nearly all of them
    perplexity = min(30.0, (len(features) - 1) / 3)
    return torch.from_numpy(TSNE(3, perplexity=perplexity, random_state=0, init="pca").fit_transform(reduced.numpy()))


def ellipsoid_points(means: Tensor, whitening: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """
    Monte-Carlo points in the union of the classes' 95 % ellipsoids.

    Points are drawn uniformly from each ellipsoid and weighted by the inverse of their total density (importance
    sampling), so that sums of weights estimate volumes of intersections and unions without a grid.

    Returns:
        A mask `[P, K]` of the ellipsoids that contain each point, and weights `[P]` (volumes up to a common factor).
    """
    draw = torch.Generator().manual_seed(0)
    classes, size = int(present.sum()), means.shape[-1]
    points_each = min(max(_POINTS // classes, 50), 2000)
    direction = torch.randn(classes, points_each, size, generator=draw, dtype=means.dtype)
    radius = torch.rand(classes, points_each, 1, generator=draw, dtype=means.dtype) ** (1 / size)
    ball = radius * direction / direction.norm(dim=-1, keepdim=True)
    back = torch.linalg.inv(whitening[present])  # [C, D, D]
    points = means[present].unsqueeze(1) + math.sqrt(_RADIUS) * ball @ back.mT
    inside = (squared_distances(points.flatten(0, 1), means, whitening) <= _RADIUS * (1 + 1e-9)) & present
    log_volume = -whitening.diagonal(dim1=-2, dim2=-1).log().sum(-1)  # up to a constant
    density = inside.double() @ (log_volume[present].max() - log_volume).exp()
    return inside, 1 / density


def grow_sets(inside: Tensor, weights: Tensor, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """
    The `budget` sets with the largest overlap (intersection over union); a beam search that adds one class at a time.

    A set never overlaps more than its subsets, so that only sets among the best so far are extended.

    Args:
        inside (`Tensor`):
            Mask `[P, K]` of the classes that contain each point.
        weights (`Tensor`):
            Volume `[P]` of each point.
        budget (`int`):
            Number of sets to keep.
    """
    member = inside.double()
    grown: list[tuple[int, ...]] = [(k,) for k in range(member.shape[-1])]
    best: list[tuple[float, tuple[int, ...]]] = []
    while grown:
        found: dict[tuple[int, ...], float] = {}
        for chosen in grown:
            common, any_of = inside[:, list(chosen)].all(-1), inside[:, list(chosen)].any(-1)
            intersection = (weights * common) @ member
            union = (weights * any_of).sum() + (weights * ~any_of) @ member
            overlap = (intersection / union.clamp_min(1e-300)).tolist()
            for k, value in enumerate(overlap):
                if k not in chosen and value > 0:
                    found[tuple(sorted((*chosen, k)))] = value
        ranked = sorted([*best, *((value, chosen) for chosen, value in found.items())], key=lambda p: (-p[0], p[1]))
        best = ranked[:budget]
        grown = [chosen for _, chosen in best if chosen in found]
    return best
