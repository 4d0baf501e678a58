"""
Cross-entropy: the baseline that every other method is compared with.

Loss: `-log softmax(z)_y`. Needs logits only. Scores: aleatoric `1 - max p`, epistemic the entropy of `p`. Unlike the
Dirichlet methods it has no total evidence: adding a constant to all logits changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cross_entropy

from ..core.outputs import Outputs, Prediction, from_log_probs, upcast
from .base import Method, Progress


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Method):
    """Softmax cross-entropy on the class logits; labels may be soft, `[B, K]`."""

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        return {"fit": cross_entropy(upcast(out.logits), labels, reduction="none")}

    def predict(self, out: Outputs) -> Prediction:
        return from_log_probs(upcast(out.logits).log_softmax(-1))
