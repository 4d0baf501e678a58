"""How much memory a training step takes, and whether gradients are checkpointed because of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.backend import evaluating, is_stream, to_device

if TYPE_CHECKING:
    from .trainer import DAPPrTrainer

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_SPARE = 0.1  # share of free memory kept back for fragmentation and kernel workspaces
_STATE_BYTES = 12  # per trained weight: its gradient and two moments in float32


def settle_gradient_checkpointing(trainer: DAPPrTrainer) -> None:
    """`gradient_checkpointing: auto`: on, on every rank, if a batch of the longest rows would not fit."""
    args, model = trainer.args, trainer.model
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        # The model is not on a device yet, so memory cannot be measured; sharding suggests that it is short.
        args.gradient_checkpointing = True
        logger.info("Weights are sharded over devices: gradient checkpointing is on (false turns it off)")
        return
    free = free_bytes(args.device)
    if free is None:
        logger.info("How much memory is free is not known here: gradient checkpointing stays off")
        return
    needed = step_bytes(trainer)
    short = trainer.any_rank(needed > (1 - _SPARE) * free)
    args.gradient_checkpointing = short and getattr(model, "supports_gradient_checkpointing", True)
    text = f"A step needs up to {needed / _GIB:.2f} GiB above the loaded model, {free / _GIB:.2f} GiB are free"
    if short and not args.gradient_checkpointing:
        logger.warning(
            f"{text}, and {type(model).__name__} cannot checkpoint gradients: take fewer rows at a time "
            "(train.per_device_train_batch_size) and more of them per step (train.gradient_accumulation_steps)"
        )
    else:
        logger.info(f"{text}: gradient checkpointing is {'on' if short else 'off'}")


def step_bytes(trainer: DAPPrTrainer) -> int:
    """Bytes of the activations of a batch of the longest rows, plus gradients and optimizer state."""
    row, times = longest_row(trainer.train_dataset, trainer.args.max_length)
    model: Any = trainer.model
    inputs = to_device(trainer.backend.collate([row]), trainer.args.device)
    with evaluating(model):  # no random numbers are drawn, no running mean moves
        kept = kept_bytes(model, lambda: trainer.backend.read(model, inputs))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return round(kept * times * trainer.args.per_device_train_batch_size) + _STATE_BYTES * trained


def longest_row(dataset: Any, max_length: int) -> tuple[Any, float]:
    """The longest row and 1.0; for a stream its first row and the ratio of `max_length` to its length."""
    if not is_stream(dataset):
        columns = getattr(dataset, "column_names", None) or ()
        return dataset[int(np.argmax(dataset["length"])) if "length" in columns else 0], 1.0
    row = next(iter(dataset))
    return row, max_length / len(row["input_ids"]) if "input_ids" in row else 1.0


def kept_bytes(model: nn.Module, work: Callable[[], Any]) -> int:
    """
    Bytes that `work` keeps for a backward pass, weights not counted: the same on every device.

    Args:
        model (`nn.Module`):
            Whose weights are left out.
        work (`Callable`):
            A forward pass, or a whole step.
    """
    return kept_bytes_by_block(model, work)[0]


def kept_bytes_by_block(
    model: nn.Module,
    work: Callable[[], Any],
    blocks: Sequence[nn.Module] = (),
    ignore: Callable[[Tensor], bool] = lambda tensor: False,
) -> tuple[int, list[int]]:
    """
    Bytes that `work` keeps for a backward pass, in all and within each block; meta and fake tensors count too.

    Args:
        model, work:
            As in `kept_bytes`.
        blocks (`Sequence[nn.Module]`, *optional*):
            Submodules that are counted on their own as well.
        ignore (`Callable[[Tensor], bool]`, *optional*):
            Saved tensors that do not count.
    """
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Any] = {}  # storages, held on to so that no address is used twice
    within = [0] * len(blocks)
    current: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and storage._cdata not in kept and not ignore(tensor):
            kept[storage._cdata] = storage
            if current:
                within[current[-1]] += storage.nbytes()
        return tensor

    handles = []
    for number, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(lambda *_, n=number: current.append(n)))
        handles.append(block.register_forward_hook(lambda *_: (current.pop(), None)[1]))
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            work()
    finally:
        for handle in handles:
            handle.remove()
    return sum(storage.nbytes() for storage in kept.values()), within


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; `None` if unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "cpu" and Path("/proc/meminfo").is_file():
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
