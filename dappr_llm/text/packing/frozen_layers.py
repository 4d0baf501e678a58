"""
Hidden states below the lowest trained layer, computed once per prompt and kept on disk.

With `lora.layers_to_transform` on the top layers only, what the layers below make of a prompt never changes: not in
the next epoch, not with another seed, not with another method. Each prompt goes through them once; from then on
training and prediction start at the lowest trained layer. Results equal those without the cache (to rounding) as long
as the layers below have no dropout, as in all common models.

States are kept under a hash of exactly the weights that made them: the runs of a sweep share one folder, one after
the other or side by side.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...core.backend import evaluating, to_device
from ...core.errors import UserError
from ...core.feature_store import FeatureStore, content_key
from ..forward_call import CURRENT
from .layers import decoder_layers, unwrapped
from .layout import layout


class FrozenLayers:
    """
    The states that enter the lowest trained layer, by prompt.

    The frozen layers' `forward` is wrapped once: in a call that brings states (`ForwardCall.states`) they are skipped.

    Args:
        model (`nn.Module`):
            A `PeftModel`, or any causal LM whose lower layers are frozen.
        folder (`str` or `Path`):
            Where states are kept. A prompt takes `tokens * hidden_size` numbers.
        read (`Callable`):
            A forward pass of a packed batch that stops below the lowest trained layer (`ForwardCall.stop_below`).
    """

    def __init__(self, model: nn.Module, folder: str | Path, read: Callable[[Mapping[str, Any]], Any]):
        self.model = model
        self.layers = _layers(model)
        self.boundary = frozen_boundary(model, self.layers)
        self.computed = 0  # prompts that went through the lower layers in this process
        self._read = read
        dtype = next(self.layers[0].parameters()).dtype
        self.store = FeatureStore(Path(folder) / self._key(), dtype)
        for number, layer in enumerate(self.layers[: self.boundary]):
            layer.forward = _skippable(layer.forward, last=number == self.boundary - 1)
        self.layers[self.boundary].register_forward_pre_hook(_stop, with_kwargs=True)

    def _key(self) -> str:
        """A hash of all that the states depend on: configuration, embeddings, lower layers, dtype."""
        base = unwrapped(self.model)
        config = {key: value for key, value in base.config.to_dict().items() if not key.startswith("_")}
        digest = hashlib.blake2b(
            json.dumps([config, self.boundary], sort_keys=True, default=str, allow_nan=False).encode()
        )
        with ThreadPoolExecutor() as pool:  # gigabytes for a large model, and hashing releases the GIL
            for found in pool.map(_weights_hash, (base.get_input_embeddings(), *self.layers[: self.boundary])):
                digest.update(found)
        return digest.hexdigest()[:32]

    def states(self, rows: Sequence[Sequence[int]], plan: Mapping[str, Any]) -> Tensor:
        """
        What enters the lowest trained layer for every token of a packed batch, `[1, N, D]`.

        Args:
            rows (`Sequence[Sequence[int]]`):
                Token ids of the batch.
            plan (`Mapping`):
                Their layout.
        """
        keys = [content_key(np.asarray(row, dtype=">u4")) for row in rows]
        missing = {key: row for key, row in zip(keys, rows, strict=True) if key not in self.store}
        if missing:
            self.store.refresh()  # another process may have computed them
            missing = {key: row for key, row in missing.items() if key not in self.store}
        if missing:
            self._compute(missing)
        return torch.cat([self.store[keys[row]][start:end] for row, start, end in plan["owners"]]).unsqueeze(0)

    @torch.no_grad()
    def _compute(self, missing: Mapping[bytes, Sequence[int]]) -> None:
        rows = [list(row) for row in missing.values()]
        device = next(self.layers[0].parameters()).device
        plan = layout(rows)
        with evaluating(self.layers[: self.boundary]):
            below = self._run_below(to_device(plan, device))
        self.computed += len(rows)
        states = below[0].to("cpu", self.store.dtype)
        keys, path = list(missing), states[:0]
        parts = states.split([end - start for _, start, end in plan["owners"]])
        for (number, start, end), part in zip(plan["owners"], parts, strict=True):
            path = torch.cat([path[:start], part])  # what a row shares with the rows before it, and its own
            if end == len(rows[number]):
                self.store.add(keys[number], path)

    def _run_below(self, plan: Mapping[str, Any]) -> Tensor:
        try:
            self._read(plan)
        except _Reached as reached:
            return reached.states
        raise UserError("train.trunk_cache: this model's layers are not called one after the other")


class _Reached(Exception):
    """Raised where the lowest trained layer would begin: nothing above it is needed."""

    def __init__(self, states: Tensor):
        super().__init__()
        self.states = states


def _stop(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    call = CURRENT.get()
    if call is not None and call.stop_below:
        raise _Reached(args[0] if args else kwargs["hidden_states"])


def _skippable(forward: Callable[..., Any], last: bool) -> Callable[..., Any]:
    """A frozen layer's forward that, in a call with cached states, hands on its input or (the last one) the states."""

    def skippable(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = CURRENT.get()
        if call is None or call.states is None:
            return forward(hidden_states, *args, **kwargs)
        return call.states if last else hidden_states

    return skippable


def _layers(model: nn.Module) -> nn.ModuleList:
    found = decoder_layers(model)
    if found is None:
        raise UserError(f"train.trunk_cache: {type(unwrapped(model)).__name__} has no list of layers to start within")
    return found


def frozen_boundary(model: nn.Module, layers: nn.ModuleList) -> int:
    """The index of the lowest layer that trains; an error if nothing below it is frozen."""
    base = unwrapped(model)
    trained = [any(p.requires_grad for p in layer.parameters()) for layer in layers]
    boundary = trained.index(True) if True in trained else len(layers) - 1
    embeddings = any(p.requires_grad for p in base.get_input_embeddings().parameters())
    if boundary == 0 or embeddings:
        what = "the embeddings train" if embeddings else "the lowest layer trains"
        raise UserError(
            f"train.trunk_cache: nothing is frozen below the adapter, since {what}; put it on the top layers only, "
            f"e.g. lora.layers_to_transform: [{len(layers) - 2}, {len(layers) - 1}]"
        )
    return boundary


def _weights_hash(part: nn.Module) -> bytes:
    digest = hashlib.blake2b()
    for name, value in part.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.digest()
