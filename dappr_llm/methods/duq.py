"""
DUQ: deterministic uncertainty quantification by distance to class centroids (van Amersfoort et al. 2020,
https://arxiv.org/abs/2003.02037).

    d_c  = |W_c f - e_c|^2 / (2 m length_scale^2),   K_c = exp(-d_c),   e_c in R^m
    loss = mean_c BCE(K_c, y_c) + penalty_weight * (|grad_x sum_c K_c| - 1)^2
    centroids: N_c <- decay N_c + (1 - decay) n_c,  S_c <- decay S_c + (1 - decay) sum of W_c f_i,  e_c = S_c / N_c

Needs `features`, `input_grad` (the penalty is differentiated twice) and `after_step` (the centroids); the model has no
linear classifier of its own. Scores: aleatoric `1 - max K`, epistemic `min_c d_c = -log max K`, which ranks as
`1 - max K` does but has no ties where K saturates. Kernels do not sum to 1, so that an input can be far from all
classes; probabilities are the normalised kernels.

Differs from the paper, whose code runs a second forward pass after each step to update the centroids: ours are updated
from the features of the training step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.outputs import Outputs, Prediction
from ..core.schemas.method_options import DUQOptions
from .base import HeadInfo, Method, Progress
from .dirichlet import one_hot_labels

_CLOSEST = 1e-6  # d below this: log(1 - K) would be infinite
_START_COUNT = 13.0


def kernel_loss(distance: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy `[B]` of kernels `exp(-distance)`, averaged over classes; stable where they underflow."""
    distance = distance.clamp_min(_CLOSEST)
    return (target * distance - (1 - target) * (-torch.expm1(-distance)).log()).mean(-1)


def gradient_penalty(distance: Tensor, inputs: Tensor) -> Tensor:
    """`(|grad_x sum_c K_c| - 1)^2` `[B]`; the L2 norm over all entries of an input."""
    total = torch.exp(-distance).sum()
    (slope,) = torch.autograd.grad(total, inputs, create_graph=True)
    norm = (slope.flatten(1).square().sum(-1) + 1e-12).sqrt()  # the gradient of a plain norm is NaN at 0
    return (norm - 1).square()


class DUQHead(nn.Module):
    """Features `[B, D]` → `distance` `[B, K]` to the class centroids, which are buffers."""

    def __init__(self, dim: int, num_classes: int, centroid_dim: int, length_scale: float, centroid_std: float = 0.05):
        super().__init__()
        self.length_scale = length_scale
        self.weight = nn.Parameter(torch.randn(centroid_dim, num_classes, dim) * math.sqrt(2 / (num_classes * dim)))
        self.register_buffer("counts", torch.full((num_classes,), _START_COUNT))
        self.register_buffer("sums", _START_COUNT * centroid_std * torch.randn(num_classes, centroid_dim))
        self.counts: Tensor
        self.sums: Tensor

    def forward(self, features: Tensor, logits: Tensor | None = None) -> dict[str, Tensor]:
        centroids = self.sums / self.counts.unsqueeze(-1)
        embedded = torch.einsum("bd,mkd->bkm", features, self.weight)
        return {"distance": (embedded - centroids).square().mean(-1) / (2 * self.length_scale**2)}

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor, decay: float) -> None:
        """Update the moving averages behind the centroids with one batch of features `[B, D]`."""
        present = one_hot_labels(labels, features.new_empty(len(labels), len(self.counts)))  # [B, K]
        per_class = present.T @ features  # summed over rows first: W_c f of each would take B times the memory
        moved = torch.einsum("kd,mkd->km", per_class, self.weight)
        self.counts.mul_(decay).add_((1 - decay) * present.sum(0))
        self.sums.mul_(decay).add_((1 - decay) * moved)


@dataclass(frozen=True, kw_only=True)
class DUQ(Method):
    """
    Classification by distance to class centroids.

    Args:
        length_scale (`float`, *optional*, defaults to 0.1):
            Length scale of the RBF kernel.
        penalty_weight (`float`, *optional*, defaults to 0.75):
            Weight of the gradient penalty; 0 saves the double backward pass.
        decay (`float`, *optional*, defaults to 0.999):
            Decay of the centroids' moving averages.
        centroid_dim (`int`, *optional*):
            Dimension m of the centroids; by default that of the features. The weights are m x K x features: choose 32
            for wide features and many classes.
        centroid_std (`float`, *optional*, defaults to 0.05):
            Standard deviation of the initial centroids. For features without normalisation a small value lets training
            collapse to one point where every kernel is 1/K; 1.0, the original code's value for a small CNN, does not.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"features", "input_grad", "after_step"})
    soft_labels: ClassVar[bool] = False  # centroids are means of the rows of one class
    schema: ClassVar[Any] = DUQOptions
    length_scale: float = 0.1
    penalty_weight: float = 0.75
    decay: float = 0.999
    centroid_dim: int | None = None
    centroid_std: float = 0.05

    def num_outputs(self, num_classes: int) -> int:
        return 0

    def build_head(self, info: HeadInfo) -> nn.Module:
        dim = info.features()
        return DUQHead(dim, info.num_classes, self.centroid_dim or dim, self.length_scale, self.centroid_std)

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        distance = out.of_head("distance")
        terms = {"fit": kernel_loss(distance, one_hot_labels(labels, distance))}
        # In evaluation the input has no gradient, and the loss has no penalty.
        if self.penalty_weight and out.inputs is not None and out.inputs.requires_grad and distance.requires_grad:
            terms["penalty"] = self.penalty_weight * gradient_penalty(distance, out.inputs)
        return terms

    def predict(self, out: Outputs) -> Prediction:
        distance = out.of_head("distance")
        nearest = distance.amin(-1)
        return Prediction((-distance).softmax(-1), None, -torch.expm1(-nearest), nearest)

    def after_step(self, head: nn.Module, out: Outputs, labels: Tensor) -> None:
        assert isinstance(head, DUQHead)
        assert out.features is not None, "backends fill Outputs.features for methods that need them"
        head.update(out.features.to(head.weight.dtype), labels, self.decay)
