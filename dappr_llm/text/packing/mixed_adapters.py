"""
Members of an ensemble side by side: one batch in which every row has its own adapter.

A single question is a few dozen tokens, which leave a GPU idle and make a CPU wait for the weights: all members then
cost little more than one. PEFT routes rows to adapters; the readout does the same for the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core.backend import to_device

if TYPE_CHECKING:
    from ..backend import TextBackend

# Beyond this many tokens batches fill the machine anyway, and packed ones, which members can only read in turn, win.
_TOKENS = 2048


def can_mix(model: nn.Module, adapters: Iterable[str]) -> bool:
    """Whether PEFT can give every row of a batch an adapter of its own: plain LoRA alone."""
    configs = [getattr(model, "peft_config", {}).get(name) for name in adapters]
    return all(_is_plain(config) for config in configs)


def _is_plain(config: Any) -> bool:
    if config is None or str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        return False
    special = ("use_dora", "modules_to_save", "trainable_token_indices", "alora_invocation_tokens", "lora_bias")
    return config.bias == "none" and not any(getattr(config, name, None) for name in special)


def fits(rows: Sequence[Mapping[str, Any]], members: int) -> bool:
    """Whether the members' rows together are few enough to be read at once."""
    return members * len(rows) * max(len(row["input_ids"]) for row in rows) <= _TOKENS


@torch.no_grad()
def read_members(
    backend: TextBackend, model: nn.Module, rows: Sequence[Mapping[str, Any]], adapters: Sequence[str], width: int
) -> Tensor:
    """
    Logits `[M, B, C]` of every adapter for the same rows, from one forward pass.

    Args:
        backend ([`TextBackend`]): What reads the model; its evidence offset is added to all members.
        model (`PeftModel`): The model, in evaluation mode, with all adapters loaded.
        rows (`Sequence[Mapping]`): Prepared rows.
        adapters (`Sequence[str]`): PEFT's names of the members.
        width (`int`): How many options each row offers.
    """
    batch = backend.collate([row for _ in adapters for row in rows], pack=False)
    names = [name for name in adapters for _ in rows]
    found = backend.read(model, to_device(batch, next(model.parameters()).device), width, adapters=names)
    return found.logits.unflatten(0, (len(adapters), len(rows))).cpu()
