"""
The letter readout: K numbers per prompt, in float32, from a native causal LM.

A forward hook on the output embeddings takes the last hidden state and multiplies it with just the rows of the
answer letters, LoRA path included. Everything after the head that works element-wise (soft-capping, logit
scales) then acts on those K numbers as the model's authors meant. Parameter names stay PEFT's own, nothing with
parameters runs outside the model's forward, and half-precision logits, whose spacing is 0.125 for values in
[16, 32), never arise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..forward_call import CURRENT


class LetterReadout:
    """
    Reads the vocabulary rows that the current [`ForwardCall`] names, instead of the whole vocabulary.

    A forward pass without one (by anybody else) returns the model's own logits.

    Args:
        model (`nn.Module`):
            A causal LM, or a `PeftModel` around one.
    """

    def __init__(self, model: nn.Module):
        head = model.get_output_embeddings()  # type: ignore[operator]
        if head is None:
            raise TypeError(f"{type(model).__name__} has no output embeddings: a causal language model is needed")
        self.vocab_size: int = getattr(head, "out_features", None) or head.weight.shape[0]
        # Once per head, however many backends are made for one model.
        installed = any(hook is _read_letters for hook in head._forward_hooks.values())
        self._handle = None if installed else head.register_forward_hook(_read_letters)

    def remove(self) -> None:
        """Remove the hook, if this object installed it."""
        if self._handle is not None:
            self._handle.remove()


def _read_letters(head: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    call = CURRENT.get()
    if call is None:
        return output
    hidden = args[0]
    call.hidden = hidden
    # Autocast would turn the float32 product back into half precision.
    with torch.autocast(hidden.device.type, enabled=False):
        logits = read_rows(head, hidden.float(), call.token_ids, call.adapters)
    return output[..., call.token_ids].float() if logits is None else logits


def read_rows(head: nn.Module, hidden: Tensor, ids: Tensor, adapters: Sequence[str] | None = None) -> Tensor | None:
    """
    `hidden @ W[ids].T` in float32, with bias and LoRA updates: the active adapters', or of each row's own.

    Returns `None` for heads whose weights cannot be read row by row (quantised, or adapted in another way than
    by plain LoRA): the caller then takes the columns of the head's own output.
    """
    base = head.get_base_layer() if hasattr(head, "get_base_layer") else head
    weight = getattr(base, "weight", None)
    # `ds_id`: DeepSpeed ZeRO-3 holds only a part of each weight outside of its own module's forward pass.
    if weight is None or not weight.is_floating_point() or weight.dim() != 2 or hasattr(weight, "ds_id"):
        return None
    logits = nn.functional.linear(hidden, weight[ids].float())
    if getattr(base, "bias", None) is not None:
        logits = logits + base.bias[ids].float()
    if base is head or head.merged or head.disable_adapters:
        return logits
    for name in dict.fromkeys(adapters or head.active_adapters):
        if name not in getattr(head, "lora_A", {}):
            continue
        if name in getattr(head, "lora_variant", {}):  # DoRA and others change the product itself
            return None
        if adapters is None:
            logits = logits + _update(head, name, hidden, ids)
        else:
            own = [row for row, adapter in enumerate(adapters) if adapter == name]
            logits[own] += _update(head, name, hidden[own], ids)
    return logits


def _update(head: nn.Module, name: str, hidden: Tensor, ids: Tensor) -> Tensor:
    """What one LoRA adapter adds to the chosen rows of the head."""
    down = head.lora_dropout[name](hidden) @ head.lora_A[name].weight.float().T
    up = head.lora_B[name]
    update = down @ up.weight[ids].float().T
    if up.bias is not None:
        update = update + up.bias[ids].float()
    return head.scaling[name] * update
