"""
Cross-entropy: the baseline that every other method is compared with.

Loss: `-log softmax(z)_y`. Needs nothing. Scores: aleatoric `1 - max p`, epistemic the entropy of `p`. With
`passes > 1` it is MC dropout (Gal and Ghahramani 2016, https://arxiv.org/abs/1506.02142): the same training,
dropout left on at prediction, probabilities averaged over the passes, epistemic the mutual information.
Unlike the Dirichlet methods it has no notion of total evidence: a common shift of the logits changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..outputs import Outputs, Prediction, from_log_probs, upcast
from .base import Method, Progress


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Method):
    """Softmax cross-entropy on the class logits; soft labels `[B, K]` work as well."""

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        logits = upcast(out.logits)
        return {"fit": torch.nn.functional.cross_entropy(logits, labels, reduction="none")}

    def predict(self, out: Outputs) -> Prediction:
        log_probs = upcast(out.logits).log_softmax(-1)
        if self.passes == 1:
            return from_log_probs(log_probs)
        # [B, M, K]: average probabilities, not logits.
        each = from_log_probs(log_probs)
        mean = from_log_probs(log_probs.logsumexp(-2) - torch.log(log_probs.new_tensor(log_probs.shape[-2])))
        mean.epistemic = (mean.epistemic - each.epistemic.mean(-1)).clamp_min(0)
        mean.members = each.probs.movedim(-2, 0)
        return mean
