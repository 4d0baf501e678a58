"""
K numbers per prompt, in float32, from rows of a native causal LM's vocabulary: what `letters` and `tokens` share.

A forward hook on the output embeddings takes the last hidden state and multiplies it with just the rows of the
answers, LoRA path included. Everything after the head that works element-wise (soft-capping, logit
scales) then acts on those K numbers as the model's authors meant. Parameter names stay PEFT's own, nothing with
parameters runs outside the model's forward, and half-precision logits, whose spacing is 0.125 for values in
[16, 32), never arise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ..adapter_files import compare_extra, compare_ids
from ..forward_call import CURRENT, ForwardCall
from ..lm import check_causal
from .base import Readout

if TYPE_CHECKING:
    from ...methods import Method


class VocabularyHead:
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
        config: Any = getattr(model, "config", None)
        check_causal(getattr(config, "name_or_path", "") or type(model).__name__, config)
        self.vocab_size: int = getattr(head, "out_features", None) or head.weight.shape[0]
        # Once per head, however many backends are made for one model.
        installed = any(hook is _read_vocabulary for hook in head._forward_hooks.values())
        self._handle = None if installed else head.register_forward_hook(_read_vocabulary)

    def remove(self) -> None:
        """Remove the hook, if this object installed it."""
        if self._handle is not None:
            self._handle.remove()


def _read_vocabulary(head: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    call = CURRENT.get()
    if call is None or call.token_ids is None:
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


class VocabularyReadout(Readout):
    """
    Reads K rows of the vocabulary, and for methods with more than one output per option further blocks of K rows.

    Args:
        model (`nn.Module`):
            A causal LM or `PeftModel`; its output embeddings get the hook.
        extra_token_ids (`Sequence[Sequence[int]]`, *optional*):
            The vocabulary rows of each further block, as a checkpoint stores them. By default the last rows of the
            vocabulary.
    """

    ids_key: str  # where the sidecar keeps the rows

    def __init__(self, model: nn.Module, extra_token_ids: Sequence[Sequence[int]] | None = None):
        self.head = VocabularyHead(model)
        self._extra = [list(block) for block in extra_token_ids or ()]
        self._rows: dict[tuple[int, int], list[int]] = {}  # vocabulary rows by width and outputs, looked up once
        self._index: dict[tuple[int, int, torch.device], Tensor] = {}

    @abstractmethod
    def token_ids(self, width: int) -> list[int]:
        """The vocabulary rows of the first `width` options."""

    def check_tokens(self) -> list[int]:
        return self.token_ids(2)

    def call(self, method: Method, width: int, device: torch.device, adapters: Sequence[str] | None) -> ForwardCall:
        key = (width, method.num_outputs(width), device)
        if key not in self._index:  # copied to the device once and not at every step
            self._index[key] = torch.tensor(self._vocabulary_rows(method, width), device=device)
        return ForwardCall(self._index[key], adapters)

    def _vocabulary_rows(self, method: Method, width: int) -> list[int]:
        """Vocabulary rows to read: the options', then each further block of the method's outputs."""
        key = (width, method.num_outputs(width))
        if key not in self._rows:
            blocks = self.extra_blocks(method, width)
            self._rows[key] = self.token_ids(width) + [row for block in blocks for row in block]
        return self._rows[key]

    def _extra_rows(self, block: int, blocks: int, width: int) -> list[int]:
        """
        One row per choice, from the end of the vocabulary; blocks take turns.

        Reading more choices adds rows and moves none: the last K rows, as others read them, would shift every choice
        by one between K = 4 and K = 5.
        """
        rows = list(self._extra[block][:width]) if block < len(self._extra) else []
        taken = {*self.token_ids(width), *rows}
        candidate = self.head.vocab_size - 1 - block
        while len(rows) < width:
            if candidate < 0:
                raise UserError(f"The vocabulary has no room for {blocks + 1} outputs per choice")
            if candidate not in taken:
                rows.append(candidate)
                taken.add(candidate)
            candidate -= blocks
        return rows

    def extra_blocks(self, method: Method, width: int) -> list[list[int]]:
        """The vocabulary rows of a method's further outputs, block by block."""
        blocks = method.num_outputs(width) // width - 1
        return [self._extra_rows(block, blocks, width) for block in range(blocks)]

    def config(self, method: Method, width: int) -> dict[str, Any]:
        return {self.ids_key: self.token_ids(width), "extra_token_ids": self.extra_blocks(method, width)}

    def check_saved(self, sidecar: Path, config: Mapping[str, Any], method: Method) -> None:
        width = config["num_choices"]
        compare_ids(sidecar, config, self.ids_key, self.token_ids(width))
        # Kept from here on: reading more choices than were trained must not move a row.
        self._extra = compare_extra(sidecar, config, self.extra_blocks(method, width))
