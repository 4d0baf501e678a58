"""Where the decoder layers of a causal LM are, with or without an adapter around it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...core.torch_utils import without_wrapper

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
    choose its positions (`last_layer.py`).

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
