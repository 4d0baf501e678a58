"""What a forward pass gives to a method, and what a method gives back. Tensors only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


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
    """

    logits: Tensor = None  # type: ignore[assignment]  # missing only where a head returns something else
    features: Tensor | None = None
    inputs: Tensor | None = None
    head: dict[str, Any] | None = None

    def narrow(self, num_classes: int, keep: int) -> Outputs:
        """Keep the first `keep` of `num_classes` classes in every block of `num_classes` outputs."""
        if keep == num_classes or self.logits is None:
            return self
        blocks = self.logits.unflatten(-1, (-1, num_classes))  # [B, C/K, K]
        return Outputs(blocks[..., :keep].flatten(-2), self.features, self.inputs, self.head)

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

    def _each(self, change: Callable[[Tensor], Tensor]) -> Outputs:
        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        head = None if self.head is None else {key: changed(value) for key, value in self.head.items()}
        return Outputs(changed(self.logits), changed(self.features), changed(self.inputs), head)


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
    """

    probs: Tensor
    alpha: Tensor | None
    aleatoric: Tensor
    epistemic: Tensor
    members: Tensor | None = None

    def keys(self) -> tuple[str, ...]:
        return ("probs", "alpha", "aleatoric", "epistemic")

    def __getitem__(self, key: str) -> Tensor | None:
        if key not in self.keys() and key != "members":
            raise KeyError(key)
        return getattr(self, key)


def option_rows(num_options: Sequence[int]) -> dict[int, Tensor]:
    """Which rows offer how many options, from counts that the host knows."""
    counts = sorted(set(num_options))
    return {count: torch.tensor([i for i, found in enumerate(num_options) if found == count]) for count in counts}


def to_device(value: Any, device: torch.device | str) -> Any:
    """A batch, with whatever is nested in it, on a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(entry, device) for key, entry in value.items()}
    if isinstance(value, list):
        return [to_device(entry, device) for entry in value]
    return value


def without_wrapper(model: nn.Module) -> Any:
    """A model without what several processes put around it."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; every module's own mode is restored."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def repeat_rows(inputs: Mapping[str, Any], times: int) -> dict[str, Any]:
    """A collated batch several times over; what is not per row stays as it is."""
    rows = next(iter(inputs.values())).shape[0]

    def repeated(value: Any) -> Any:
        if times == 1 or not isinstance(value, Tensor) or value.shape[:1] != (rows,):
            return value
        return value.repeat(times, *[1] * (value.dim() - 1))

    return {key: repeated(value) for key, value in inputs.items()}


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
