"""
Hidden states for the gate, pooled while the model runs: one vector per row, layer and pooling, none per token.

The rule is fixed: states after one third, one half and two thirds of the layers, each at the last token of a row and
as the mean over its content tokens (`content_tokens`); the mean of what enters the last layer; and the state that the
answer is read from. The last layer is computed at the read positions alone, so there is no mean of its outputs, and
what enters it is the same padded and packed. Encoders attend to both sides, and no token of theirs is the last: they
have the means, and what their head pools.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..core.errors import UserError
from .forward_call import CURRENT
from .packing.layers import decoder_layers

_SHARES = (1 / 3, 1 / 2, 2 / 3)  # of the depth
_WATCHED: WeakSet[nn.Module] = WeakSet()


@dataclass
class Pooling:
    """
    What one forward pass pools, and what it found.

    Args:
        tokens (`Tensor`):
            Content tokens of all rows, `[M]`, as places in the flattened batch; one that rows share is named by each.
        offsets (`Tensor`):
            Where each row's tokens begin, `[B]`.
        last (`Tensor`, *optional*):
            The place of each row's last token, `[B]`; `None` for encoders.
        found (`dict`):
            Filled by the hooks: the vectors `[B, D]` by the number of the layer that they enter.
    """

    tokens: Tensor
    offsets: Tensor
    last: Tensor | None
    found: dict[int, list[Tensor]] = field(default_factory=dict)

    def take(self, layer: int, states: Tensor, both: bool) -> None:
        """Pool what enters a layer, `[rows, tokens, D]`; `both`: at the last token too."""
        flat = states.flatten(0, 1)
        # In float32: a mean over many tokens in half precision depends on their order.
        mean = nn.functional.embedding_bag(self.tokens, flat.float(), self.offsets, mode="mean")
        last = [flat[self.last].float()] if both and self.last is not None else []
        self.found[layer] = [*last, mean]

    def features(self, read: Tensor | None) -> Tensor:
        """All vectors `[B, G, D]`, from the lowest layer up; `read`: the states `[B, D]` that answers come from."""
        vectors = [vector for layer in sorted(self.found) for vector in self.found[layer]]
        vectors += [] if read is None else [read.float()]
        if not vectors:
            raise UserError("This model gives no hidden states for a gate; set gate: false")
        width = max(vector.shape[-1] for vector in vectors)  # a few heads read a projection of other width
        return torch.stack([nn.functional.pad(each, (0, width - each.shape[-1])) for each in vectors], dim=1)


def pooled_layers(count: int) -> dict[int, bool]:
    """Before which of `count` layers states are pooled, and whether at the last token too; from the lowest up."""
    middle = {min(max(1, int(count * share + 0.5)), count - 1) for share in _SHARES}
    return {number: number in middle for number in sorted({*middle, count - 1})}


def watch_layers(model: nn.Module) -> None:
    """Install the hooks that pool, once per model; where its layers are not found, the state that is read is all."""
    layers = decoder_layers(model)
    if layers is None or layers in _WATCHED:
        return
    _WATCHED.add(layers)
    for number, both in pooled_layers(len(layers)).items():
        layers[number].register_forward_pre_hook(_hook(number, both), with_kwargs=True)


def _hook(number: int, both: bool) -> Any:
    def pool(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = CURRENT.get()
        if call is not None and call.pooling is not None:
            call.pooling.take(number, args[0] if args else kwargs["hidden_states"], both)

    return pool


def group_names(model: nn.Module, causal: bool) -> tuple[str, ...]:
    """Names of the groups that [`Pooling.features`] gives, in their order."""
    layers = decoder_layers(model)
    names: list[str] = []
    for number, both in pooled_layers(len(layers)).items() if layers is not None else ():
        names += [f"layer {number}, last token"] if both and causal else []
        names.append(f"layer {number}, mean")
    return (*names, "read state")
