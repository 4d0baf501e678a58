"""
The decoder layers of a causal LM: where they are, which of their blocks are compiled, and less work in the last one.

Answers are read at one position per row, so of all other positions the last layer needs keys and values only. Its
query and output projections and its feed-forward block, together nine tenths of that layer's work, are computed for
the read positions alone. These modules work on each token by itself, so the answers stay the same; the states at other
positions of the last layer are never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from ...core.backend import without_wrapper
from ..forward_call import CURRENT

# Blocks of a layer that work on each token by itself, by parts of the names that models give them.
_TOKENWISE = ("norm", "ln_", "mlp", "feed_forward", "ffn")


def unwrapped(model: nn.Module) -> Any:
    """A causal LM without what processes and an adapter put around it."""
    model = without_wrapper(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_layers(model: nn.Module) -> nn.ModuleList | None:
    """The layers of a causal LM, lowest first; `None` where they are not in a list of their own."""
    base = unwrapped(model)
    config = getattr(base, "config", None)
    if config is None:
        return None
    count = config.get_text_config().num_hidden_layers
    return next((part for part in base.modules() if isinstance(part, nn.ModuleList) and len(part) == count), None)


def keep_differentiable(model: nn.Module) -> None:
    """
    Keep 4-bit weights in the form that gradients pass through.

    On CPUs with AVX512-BF16 bitsandbytes rewrites them at the first look in evaluation mode into a form whose product
    has no gradient: trained on after that, an adapter would miss all that comes through the layers above it, and
    nothing would say so.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def compile_blocks(model: nn.Module, **options: Any) -> int:
    """
    `torch.compile` norms and feed-forward blocks in place, once for any number of tokens; returns how many.

    Compiled as a whole, a model would be compiled again for nearly every packed batch, whose attention has as many
    groups, and its last layer as many positions, as the batch needs. The last layer is left as it is, since hooks
    choose its positions.

    Args:
        model (`nn.Module`):
            A causal LM or `PeftModel`.
        options:
            Of `torch.compile`: `backend`, `mode`.
    """
    layers = decoder_layers(model)
    blocks = [
        block
        for layer in list(layers or ())[:-1]
        for name, block in layer.named_children()
        if any(part in name for part in _TOKENWISE)
    ]
    for block in blocks:
        block.compile(dynamic=True, **options)
    return len(blocks)


# --- the last layer -------------------------------------------------------------------------------------------------

_BLOCKS = ("mlp", "self_attn.q_proj", "self_attn.o_proj")  # only the first has to be there
_HOOKED: WeakSet[nn.Module] = WeakSet()


class LastLayer:
    """
    Hooks on the token-wise modules of a causal LM's last layer that keep only the positions of the current call.

    Calls without `ForwardCall.positions` are not touched.

    Args:
        layer (`nn.Module`):
            The last decoder layer, from [`find_last_layer`].
    """

    def __init__(self, layer: nn.Module):
        self.layer = layer
        self._handles: list[Any] = []
        if layer in _HOOKED:  # by another backend of the same model
            return
        _HOOKED.add(layer)
        for block in _token_wise(layer):
            self._handles.append(block.register_forward_pre_hook(self._keep_positions))
            self._handles.append(block.register_forward_hook(self._put_back))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            _HOOKED.discard(self.layer)

    def _positions(self, block: nn.Module) -> Tensor | None:
        call = CURRENT.get()
        if call is None or call.positions is None:
            return None
        # Gradient checkpointing runs the layer once more in the backward pass, outside of the call.
        if self.layer.training and getattr(self.layer, "gradient_checkpointing", False):
            return None
        return None if _drops(block) else call.positions

    def _keep_positions(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        positions = self._positions(block)
        return None if positions is None else (args[0].index_select(1, positions), *args[1:])

    def _put_back(self, block: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        positions = self._positions(block)
        if positions is None:
            return None
        call = CURRENT.get()
        assert call is not None and call.length is not None
        whole = output.new_zeros((output.shape[0], call.length, output.shape[-1]))
        return whole.index_copy(1, positions, output)


def find_last_layer(model: nn.Module) -> nn.Module | None:
    """The last layer of a causal LM, if its feed-forward block is called `mlp` as in most models."""
    layers = decoder_layers(model)
    return layers[-1] if layers and isinstance(getattr(layers[-1], _BLOCKS[0], None), nn.Module) else None


def _token_wise(layer: nn.Module) -> Iterator[nn.Module]:
    for path in _BLOCKS:
        block: Any = layer
        for name in path.split("."):
            block = getattr(block, name, None)
        if isinstance(block, nn.Module):
            yield block


def _drops(block: nn.Module) -> bool:
    """Whether a block draws dropout masks: with fewer positions every later random number would change."""
    return any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in block.modules())
