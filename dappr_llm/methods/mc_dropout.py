"""
MC dropout (Gal and Ghahramani 2016, https://arxiv.org/abs/1506.02142).

    loss  = -log softmax(z)_y, as cross-entropy
    p     = mean over M passes of softmax(z^m), dropout left on in each of them

Needs a model with dropout (text: `lora_dropout` above 0). Scores: aleatoric `1 - max p`, epistemic the mutual
information `H(p) - mean_m H(p^m)`. Training is the same as cross-entropy; prediction takes M forward passes, whose
probabilities (not logits) are averaged. Members of a deep ensemble are averaged in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.schemas.method_options import MCDropoutOptions
from .cross_entropy import CrossEntropy


@dataclass(frozen=True, kw_only=True)
class MCDropout(CrossEntropy):
    """
    Cross-entropy whose predictions average the probabilities of several forward passes with dropout on.

    Args:
        passes (`int`, *optional*, defaults to 10):
            Stochastic forward passes M at prediction time.
    """

    schema: ClassVar[Any] = MCDropoutOptions
    passes: int = 10
