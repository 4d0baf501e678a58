"""What a forward pass gives to a method, and what a method gives back. Tensors only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

LOGITS = "logits"  # key of the logits among gathered outputs
_MOST_LOG_ALPHA = 60.0
Gathered: TypeAlias = "Tensor | dict[str, Tensor]"


@dataclass
class Outputs:
    """
    One forward pass, always float32 (or float64).

    Args:
        logits (`Tensor`, *optional*):
            `[B, C]` with `C = method.num_outputs(K)`; the first `K` columns are the classes.
        features (`Tensor`, *optional*):
            `[B, D]`, filled when the method needs `features`.
        inputs (`Tensor`, *optional*):
            The differentiable input, filled when the method needs `input_grad`.
        head (`dict`, *optional*):
            What the method's own head returned.
        gate (`Tensor`, *optional*):
            `[B, G, D]`, filled when it is asked for: hidden states of G kinds, of which densities are made.
    """

    logits: Tensor = None  # type: ignore[assignment]  # missing only where a head returns something else
    features: Tensor | None = None
    inputs: Tensor | None = None
    head: dict[str, Any] | None = None
    gate: Tensor | None = None

    def narrow(self, num_classes: int, keep: int) -> Outputs:
        """Keep the first `keep` of `num_classes` classes in every block of `num_classes` outputs."""
        if keep == num_classes or self.logits is None:
            return self
        blocks = self.logits.unflatten(-1, (-1, num_classes))  # [B, C/K, K]
        return Outputs(blocks[..., :keep].flatten(-2), self.features, self.inputs, self.head, self.gate)

    def of_head(self, name: str) -> Tensor:
        """What the method's own head returned under `name`, in float32 or better."""
        if self.head is None or name not in self.head:
            raise KeyError(f"this method's head must give {name!r}; build it with method.build_head")
        return upcast(self.head[name])

    def select(self, index: Tensor) -> Outputs:
        """Rows `index` of the batch."""
        return self._each(lambda value: value[index])

    def detach(self) -> Outputs:
        """The same numbers without their history; what is measured on them trains nothing."""
        return self._each(lambda value: value.detach())

    def gathered(self) -> Gathered:
        """What is kept of a forward pass: the logits, and the values of the method's own head if there is one."""
        if self.head is None:
            return self.logits
        return self.head if self.logits is None else {LOGITS: self.logits, **self.head}

    def _each(self, change: Callable[[Tensor], Tensor]) -> Outputs:
        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        head = None if self.head is None else {key: changed(value) for key, value in self.head.items()}
        return Outputs(changed(self.logits), changed(self.features), changed(self.inputs), head, changed(self.gate))


def as_outputs(found: Any) -> Outputs:
    """What [`Outputs.gathered`] gave, of tensors or arrays, for `method.predict` and `method.loss`."""
    if not isinstance(found, Mapping):
        return Outputs(logits=torch.as_tensor(found))
    values = {key: torch.as_tensor(value) for key, value in found.items()}
    logits = values.pop(LOGITS, None)
    return Outputs(logits=logits, head=values)  # type: ignore[arg-type]


def map_values(found: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to gathered logits, or to every value of a gathered dictionary."""
    if isinstance(found, Mapping):
        return {key: change(value) for key, value in found.items()}
    return change(found)


@dataclass
class Prediction:
    """
    What a method says about a batch; in both uncertainties larger means less certain.

    Args:
        probs (`Tensor`):
            `[B, K]`, rows sum to 1.
        alpha (`Tensor`, *optional*):
            `[B, K]` Dirichlet parameters, for methods that have them.
        aleatoric (`Tensor`):
            `[B]`, uncertainty of the answer given what the model knows.
        epistemic (`Tensor`):
            `[B]`, how little the model knows about this input.
        members (`Tensor`, *optional*):
            `[M, B, K]` probabilities of each stochastic pass.
        density (`Tensor`, *optional*):
            `[B]`, how typical the input is of those that were trained on, where the checkpoint has a gate.
        familiarity (`Tensor`, *optional*):
            `[B]` in (0, 1], the share of held-out inputs that are at most as typical.
    """

    probs: Tensor
    alpha: Tensor | None
    aleatoric: Tensor
    epistemic: Tensor
    members: Tensor | None = None
    density: Tensor | None = None
    familiarity: Tensor | None = None

    def keys(self) -> tuple[str, ...]:
        return ("probs", "alpha", "aleatoric", "epistemic")

    def __getitem__(self, key: str) -> Tensor | None:
        if key not in self.keys() and key != "members":
            raise KeyError(key)
        return getattr(self, key)


def upcast(logits: Tensor) -> Tensor:
    """Half precision ruins every special function used here; float64 is kept for tests and careful users."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def from_log_probs(log_probs: Tensor) -> Prediction:
    """
    Softmax reading: aleatoric `1 - max p`, epistemic the entropy in nats.

    Of several passes, `[B, M, K]`: probabilities are averaged, and epistemic is the mutual information.
    """
    if log_probs.dim() == 2:
        return _softmax_reading(log_probs)
    each = _softmax_reading(log_probs)
    mean = _softmax_reading(log_probs.logsumexp(-2) - math.log(log_probs.shape[-2]))
    mean.epistemic = (mean.epistemic - each.epistemic.mean(-1)).clamp_min(0)
    mean.members = each.probs.movedim(-2, 0)
    return mean


def _softmax_reading(log_probs: Tensor) -> Prediction:
    probs = log_probs.exp()
    # -inf log-probabilities have p = 0 and contribute nothing; 0 * -inf would be NaN.
    entropy = -(probs * log_probs.clamp_min(torch.finfo(log_probs.dtype).min)).sum(-1)
    return Prediction(probs=probs, alpha=None, aleatoric=1 - probs.amax(-1), epistemic=entropy)


def from_alpha(alpha: Tensor, scale: float = 1.0) -> Prediction:
    """
    Dirichlet reading: `p = alpha/alpha0`, aleatoric `1 - max p`, epistemic `scale * K/alpha0`.

    Of several passes, `[B, M, K]`, alpha is averaged first, as ensembles of Dirichlet models are.
    """
    alpha = alpha if alpha.dim() == 2 else alpha.mean(-2)
    alpha0 = alpha.sum(-1)
    probs = alpha / alpha0.unsqueeze(-1)
    epistemic = scale * alpha.shape[-1] / alpha0
    return Prediction(probs=probs, alpha=alpha, aleatoric=1 - probs.amax(-1), epistemic=epistemic)


def from_log_alpha(log_alpha: Tensor) -> Prediction:
    """
    The Dirichlet reading of `log alpha`, for evidence that would overflow.

    Of several passes, `[B, M, K]`, alpha is averaged first.
    """
    if log_alpha.dim() > 2:
        log_alpha = log_alpha.logsumexp(-2) - math.log(log_alpha.shape[-2])
    probs = log_alpha.softmax(-1)
    epistemic = log_alpha.shape[-1] * (-log_alpha.logsumexp(-1)).exp()
    alpha = log_alpha.clamp_max(_MOST_LOG_ALPHA).exp()  # finite, as tables and files need it
    return Prediction(probs=probs, alpha=alpha, aleatoric=1 - probs.amax(-1), epistemic=epistemic)
