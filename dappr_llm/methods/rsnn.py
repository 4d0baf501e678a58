"""
RS-NN: random-set network, which predicts beliefs of sets of classes (Manchingal et al. 2023,
https://arxiv.org/abs/2307.05772).

    b_A  = sigmoid(linear(features))_A,  for every single class and `budget` sets of classes
    m_A  = sum over considered B in A of (-1)^(|A| - |B|) b_B            (mass, by Moebius inversion)
    loss = mean_A BCE(b_A, [y in A]) + mass_weight * mean_A max(0, -m_A)
           + sum_weight * max(0, batch mean of sum_A m_A - 1)
    BetP_c = sum over A with c in A of m_A / |A|   (pignistic probability; masses are clamped at 0, and what is missing
                                                    to a sum of 1 goes to the set of all classes)

Needs `features` and `fit_before`: before training, the sets are chosen whose classes overlap most in a 3-dimensional
embedding of the features; they are buffers of the head. Scores: aleatoric `1 - max BetP`, epistemic the entropy of
BetP. Where Dirichlet methods assign ignorance to all classes at once, this one can assign it to the few that it
confuses.

Differs from the paper, which takes the features of a trained softmax network to choose the sets: ours are those of the
model before training; start from a trained checkpoint (`model.adapter`) for the published procedure. Overlaps are
Monte-Carlo estimates of ellipsoid volumes instead of counts on a grid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ..core.outputs import Outputs, Prediction
from ..core.schemas.method_options import RSNNOptions
from .base import HeadInfo, Method, Progress
from .dirichlet import one_hot_labels
from .rsnn_class_sets import choose_sets


def mobius(members: Tensor) -> Tensor:
    """Moebius matrix `[S, S]` of sets given as 0/1 rows `[S, K]`: `(-1)^(|A| - |B|)` if B is a subset of A, else 0."""
    size = members.sum(-1)
    subset = (members @ members.T == size.unsqueeze(-1)) & (size > 0).unsqueeze(-1)
    sign = 1 - 2 * ((size - size.unsqueeze(-1)) % 2)
    return subset * sign


class RandomSetHead(nn.Module):
    """
    Features `[B, D]` → `set_loss` `[B, K]` (the BCE for each possible label), `negative_mass` and `total_mass` `[B]`,
    and the pignistic probabilities `probs` `[B, K]`.

    Only the head knows the S sets; its outputs, which are gathered over processes, do not grow with S.
    """

    def __init__(self, dim: int, num_classes: int, budget: int):
        super().__init__()
        self.num_classes = num_classes
        slots = num_classes + min(budget, 2 ** min(num_classes, 30) - num_classes - 1)
        self.beliefs = nn.Linear(dim, slots)
        members = torch.zeros(slots, num_classes)
        members[:num_classes] = torch.eye(num_classes)
        self.register_buffer("members", members)  # [S, K]; unused sets are rows of zeros
        self.register_buffer("mobius", mobius(members))
        self.members: Tensor
        self.mobius: Tensor

    @torch.no_grad()
    def use(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Set the sets of two or more classes, each a tuple of class indices."""
        self.members[self.num_classes :] = 0
        for slot, chosen in enumerate(sets, self.num_classes):
            self.members[slot, list(chosen)] = 1
        self.mobius.copy_(mobius(self.members))

    def forward(self, features: Tensor, logits: Tensor | None = None) -> dict[str, Tensor]:
        return self.read(self.beliefs(features))

    def read(self, scores: Tensor) -> dict[str, Tensor]:
        """The head's outputs from belief logits `[B, S]`."""
        used = self.members.any(-1)
        count = used.sum()
        inside, outside = softplus(-scores) * used, softplus(scores) * used
        mass = scores.sigmoid() @ self.mobius  # [B, S]; 0 for unused sets
        cut = self.masses(mass)
        size = self.members.sum(-1).clamp_min(1)
        return {
            "set_loss": (inside @ self.members + outside @ (1 - self.members)) / count,
            "negative_mass": (-mass).clamp_min(0).sum(-1) / count,
            "total_mass": mass.sum(-1),
            "probs": cut[:, :-1] / size @ self.members + cut[:, -1:] / self.num_classes,
        }

    @staticmethod
    def masses(mass: Tensor) -> Tensor:
        """Masses `[B, S + 1]` that sum to 1: clamped at 0; the last column, the set of all classes, takes the rest."""
        cut = mass.clamp_min(0)
        cut = torch.cat([cut, (1 - cut.sum(-1, keepdim=True)).clamp_min(0)], dim=-1)
        return cut / cut.sum(-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class RSNN(Method):
    """
    Random-set network.

    Args:
        budget (`int`, *optional*, defaults to 20):
            Number of sets of two or more classes.
        mass_weight (`float`, *optional*, defaults to 1e-3):
            Weight of the penalty on negative masses.
        sum_weight (`float`, *optional*, defaults to 1e-3):
            Weight of the penalty on masses that sum to more than 1.
        embedding (`str`, *optional*, defaults to `"tsne"`):
            How features are reduced to 3 dimensions to choose the sets: `"tsne"` or the much faster `"pca"`.
        embedding_rows (`int`, *optional*, defaults to 3000):
            Maximum number of training rows to choose the sets from.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"features", "fit_before"})
    schema: ClassVar[Any] = RSNNOptions
    budget: int = 20
    mass_weight: float = 1e-3
    sum_weight: float = 1e-3
    embedding: str = "tsne"
    embedding_rows: int = 3000

    def num_outputs(self, num_classes: int) -> int:
        return 0

    def build_head(self, info: HeadInfo) -> nn.Module:
        return RandomSetHead(info.features(), info.num_classes, self.budget)

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        set_loss = out.of_head("set_loss")
        excess = (out.of_head("total_mass").mean() - 1).clamp_min(0)  # a batch mean, hence the same for every row
        return {
            "fit": (one_hot_labels(labels, set_loss) * set_loss).sum(-1),
            "mass": self.mass_weight * out.of_head("negative_mass"),
            "sum": self.sum_weight * excess.expand(len(set_loss)),
        }

    def predict(self, out: Outputs) -> Prediction:
        probs = out.of_head("probs")
        return Prediction(probs, None, 1 - probs.amax(-1), torch.special.entr(probs).sum(-1))

    def fit_head(self, head: nn.Module, features: Tensor, labels: Tensor) -> None:
        assert isinstance(head, RandomSetHead)
        slots = len(head.members) - head.num_classes
        if slots:
            head.use(choose_sets(features, labels, head.num_classes, slots, self.embedding, self.embedding_rows))
