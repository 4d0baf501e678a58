"""
Fixed labels, any number of them, read from the head of a sequence classifier.

Of a decoder the head is given the last token of each row alone, wherever a packed or padded batch has it, and its
product is computed in float32; transformers' own forward would compute it for every token. An encoder pools by itself;
there the last layer's product alone is computed in float32. Parameters, their names and the saved files are
transformers' and PEFT's own, and a forward pass by anybody else gets the model's own logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ...core.outputs import Outputs
from ..classifier import is_encoder, score_layers
from ..forward_call import CURRENT, ForwardCall
from ..packing.layers import unwrapped
from .base import Readout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...methods import Method


class HeadReadout(Readout):
    """
    Reads a sequence classifier.

    Args:
        model (`nn.Module`):
            A sequence classifier or a `PeftModel` around one; its last layer gets the hooks.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer.
        labels (`Sequence[str]`):
            Names of the classes.
        method (`Method`):
            Says how many outputs the head must have.
    """

    name = "head"
    truncation = "end"
    padding_side = "right"  # plain transformers finds the last token then, whatever the model's kind of positions

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], method: Method):
        self.labels: tuple[str, ...] = tuple(labels)
        base = unwrapped(model)
        self.causal = not is_encoder(base.config)
        layers = score_layers(model)
        wanted = method.num_outputs(len(self.labels))
        if layers[-1].out_features != wanted:
            raise UserError(
                f"The head of {type(base).__name__} has {layers[-1].out_features} outputs, but {len(self.labels)} "
                f"labels need {wanted}; load the model with num_labels={wanted}"
            )
        special = set(tokenizer.all_special_ids)
        self._tokens = [number for number in range(base.config.get_text_config().vocab_size) if number not in special]
        for layer in layers:
            _hook(layer.register_forward_pre_hook, layer._forward_pre_hooks, _enter)
            _hook(layer.register_forward_hook, layer._forward_hooks, _read)
        _hook(base.register_forward_hook, base._forward_hooks, _hand_over)

    def call(self, method: Method, width: int, device: torch.device, adapters: Sequence[str] | None) -> ForwardCall:
        if width > len(self.labels):
            raise UserError(f"{width} options, but this model has {len(self.labels)} labels")
        return ForwardCall(adapters=adapters)

    def select(self, logits: Tensor, width: int) -> Tensor:
        return Outputs(logits).narrow(len(self.labels), width).logits

    def check_tokens(self) -> list[int]:
        return self._tokens[:2]

    def option_names(self, count: int) -> list[str]:
        return list(self.labels)

    def config(self, method: Method, width: int) -> dict[str, Any]:
        return {"readout": self.name, "labels": list(self.labels)}

    def check_saved(self, sidecar: Path, config: Mapping[str, Any], method: Method) -> None:
        if len(self.labels) != config["num_choices"]:
            raise UserError(
                f"{sidecar}: num_choices is {config['num_choices']}, but there are {len(self.labels)} labels; fetch "
                "or train the checkpoint again"
            )

    def score_layer(self, model: nn.Module) -> nn.Linear | None:
        return next((layer for layer in reversed(score_layers(model)) if layer.weight.requires_grad), None)


def _hook(register: Any, installed: Mapping[int, Any], function: Any) -> None:
    """Register a hook once, however many backends are made for one model."""
    if not any(hook is function for hook in installed.values()):
        register(function)


def _enter(layer: nn.Linear, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the last layer only what is read, in its own dtype; PEFT copies these hooks to the layers of adapters."""
    hidden, call = args[0], CURRENT.get()
    if call is not None and call.token_ids is None:
        call.shape = hidden.shape[:-1]
        if hidden.dim() == 3:  # a decoder's states at every token; a packed batch is one row
            hidden = hidden[:, -1] if call.last is None else hidden[0, call.last]
        call.hidden = hidden
    # `float()` keeps the gradient; a head in float32 stands above a base model in half precision.
    return (hidden.to(layer.weight.dtype) if layer.weight.is_floating_point() else hidden, *args[1:])


def _read(layer: nn.Linear, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    call = CURRENT.get()
    if call is None or call.token_ids is not None or call.hidden is None:
        return None
    call.logits = output.float()
    # `ds_id`: DeepSpeed ZeRO-3 holds only a part of each weight outside of its own module's forward pass.
    if layer.weight.is_floating_point() and not hasattr(layer.weight, "ds_id"):
        bias = None if layer.bias is None else layer.bias.float()
        # Autocast would turn the float32 product back into half precision.
        with torch.autocast(call.hidden.device.type, enabled=False):
            call.logits = nn.functional.linear(call.hidden.float(), layer.weight.float(), bias)
    assert call.shape is not None
    if len(call.shape) == 1:
        return call.logits
    # What transformers' pooling picks from this is replaced by `_hand_over`; a view, which takes no memory.
    return call.logits[:1].unsqueeze(0).expand(*call.shape, -1)


def _hand_over(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The logits that were read as the model's own output, where what processes put around a model looks for it."""
    call = CURRENT.get()
    if call is None or call.logits is None:
        return None
    output.logits = call.logits
    return output
