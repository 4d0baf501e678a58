"""
Hidden states at the frozen boundary, computed once and kept on disk.

With `lora.layers_to_transform` on the top layers only, what the layers below make of a prompt never changes: not in
the next epoch, not with another seed, not with another method. Each prompt goes through them once; from then on
training and prediction start at the boundary. Results equal those without the cache (to rounding) as long as the
layers below are without dropout, which is so in all common models.

States are appended to files of their own per process and read memory-mapped, under a hash of exactly the weights that
made them: runs of a sweep share one folder, one after the other or side by side.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ...core.outputs import evaluating, to_device
from . import layout as packing
from .decoder_layers import decoder_layers, unwrapped

_FLUSH_ROWS = 256


class TrunkCache:
    """
    The states that enter the lowest trained layer, by prompt.

    Args:
        model (`nn.Module`):
            A `PeftModel`, or any causal LM whose lower layers are frozen.
        folder (`str` or `Path`):
            Where states are kept. A prompt takes `tokens * hidden_size` numbers.
    """

    def __init__(self, model: nn.Module, folder: str | Path):
        self.model = model
        self.layers = _layers(model)
        self.boundary = frozen_boundary(model, self.layers)
        self._rows: dict[bytes, tuple[np.ndarray, int, int]] = {}
        self._pending: dict[bytes, Tensor] = {}
        self.computed = 0  # prompts that went through the lower layers in this process
        self._dtype = next(self.layers[0].parameters()).dtype
        self.folder = Path(folder) / self._key()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._read = set[Path]()
        self._load()
        atexit.register(_flush, weakref.ref(self))

    def _key(self) -> str:
        """A hash of all that the states depend on: configuration, embeddings, lower layers, dtype."""
        base = unwrapped(self.model)
        config = {key: value for key, value in base.config.to_dict().items() if not key.startswith("_")}
        digest = hashlib.blake2b(json.dumps([config, self.boundary], sort_keys=True, default=str).encode())
        with ThreadPoolExecutor() as pool:  # gigabytes for a large model, and hashing lets other threads run
            for found in pool.map(_weights_hash, (base.get_input_embeddings(), *self.layers[: self.boundary])):
                digest.update(found)
        return digest.hexdigest()[:32]

    # --- files ----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Take in what finished files hold; an index is written after its states, so what it names is there."""
        for index in sorted(self.folder.glob("*.npz")):
            if index in self._read:
                continue
            self._read.add(index)
            with np.load(index, allow_pickle=False) as found:
                keys, starts, lengths, width = found["keys"], found["starts"], found["lengths"], int(found["width"])
            kind = np.uint16 if self._dtype == torch.bfloat16 else np.dtype(str(self._dtype).removeprefix("torch."))
            states = np.memmap(index.with_suffix(".bin"), dtype=kind, mode="r").reshape(-1, width)
            for key, start, length in zip(keys, starts.tolist(), lengths.tolist(), strict=True):
                self._rows[key.tobytes()] = (states, start, length)

    def flush(self) -> None:
        """Write what was computed since the last time, and read it from there from now on."""
        if not self._pending:
            return
        path = self.folder / f"{os.getpid()}-{uuid.uuid4().hex}"
        lengths = [len(states) for states in self._pending.values()]
        with open(path.with_suffix(".bin"), "wb") as handle:
            for states in self._pending.values():
                states = states.view(torch.uint16) if states.dtype == torch.bfloat16 else states
                states.numpy().tofile(handle)
        scratch = path.with_suffix(".tmp")
        with open(scratch, "wb") as handle:
            np.savez(
                handle,
                keys=np.stack([np.frombuffer(key, dtype=np.uint8) for key in self._pending]),
                starts=np.cumsum([0, *lengths[:-1]]),
                lengths=np.asarray(lengths),
                width=np.asarray(next(iter(self._pending.values())).shape[1]),
            )
        os.replace(scratch, path.with_suffix(".npz"))
        self._pending.clear()
        self._load()

    # --- states ---------------------------------------------------------------------------------------------------

    def states(self, rows: Sequence[Sequence[int]], plan: Mapping[str, Any]) -> Tensor:
        """
        What enters the boundary layer for every token of a packed batch, `[1, N, D]`.

        Args:
            rows (`Sequence[Sequence[int]]`):
                Token ids of the batch.
            plan (`Mapping`):
                Their layout.
        """
        keys = [_row_key(row) for row in rows]
        missing = {key: row for key, row in zip(keys, rows, strict=True) if key not in self}
        if missing:
            self._load()  # another process may have been here
            missing = {key: row for key, row in missing.items() if key not in self}
        if missing:
            self._compute(missing)
        return torch.cat([self._one(keys[row])[start:end] for row, start, end in plan["owners"]]).unsqueeze(0)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows or key in self._pending

    def _one(self, key: bytes) -> Tensor:
        if key in self._pending:
            return self._pending[key]
        states, start, length = self._rows[key]
        found = torch.from_numpy(np.array(states[start : start + length]))
        return found.view(torch.bfloat16) if self._dtype == torch.bfloat16 else found

    @torch.no_grad()
    def _compute(self, missing: Mapping[bytes, Sequence[int]]) -> None:
        rows = [list(row) for row in missing.values()]
        device = next(self.layers[0].parameters()).device
        plan = packing.layout(rows)
        with evaluating(self.layers[: self.boundary]):
            below = _run_below(self.model, self.layers, self.boundary, to_device(plan, device))
        self.computed += len(rows)
        states = below[0].to("cpu", self._dtype)
        keys, path = list(missing), states[:0]
        parts = states.split([end - start for _, start, end in plan["owners"]])
        for (number, start, end), part in zip(plan["owners"], parts, strict=True):
            path = torch.cat([path[:start], part])  # what a row shares with the rows before it, and its own
            if end == len(rows[number]):
                self._pending[keys[number]] = path
        if len(self._pending) >= _FLUSH_ROWS:
            self.flush()

    @contextmanager
    def feeding(self, states: Tensor) -> Iterator[None]:
        """The model starts at the boundary, with these states; whatever it computes of its input is not used."""
        lower = list(self.layers[: self.boundary])
        for number, layer in enumerate(lower):
            self.layers[number] = _StandIn(layer, states if number == self.boundary - 1 else None)
        try:
            yield
        finally:
            for number, layer in enumerate(lower):
                self.layers[number] = layer


class _StandIn(nn.Module):
    """In place of a frozen layer: hands on what it gets, or states that are known already."""

    def __init__(self, layer: nn.Module, states: Tensor | None):
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not a submodule: parameters stay where they are
        object.__setattr__(self, "states", states)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states if self.states is None else self.states

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "layer"), name)


class _Reached(Exception):
    """The boundary is reached: nothing above it is needed."""


def _run_below(model: nn.Module, layers: nn.ModuleList, boundary: int, plan: Mapping[str, Any]) -> Tensor:
    from .self_check import read_packed

    found: list[Tensor] = []

    def stop(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])
        raise _Reached

    handle = layers[boundary].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        read_packed(model, plan)
    except _Reached:
        return found[0]
    finally:
        handle.remove()
    raise UserError("train.trunk_cache: this model's layers are not called one after the other")


def _layers(model: nn.Module) -> nn.ModuleList:
    found = decoder_layers(model)
    if found is None:
        raise UserError(f"train.trunk_cache: {type(unwrapped(model)).__name__} has no list of layers to start within")
    return found


def frozen_boundary(model: nn.Module, layers: nn.ModuleList) -> int:
    """The lowest layer that trains; an error if nothing below it is frozen."""
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


def _flush(cache: weakref.ref[TrunkCache]) -> None:
    found = cache()
    if found is not None and found.folder.is_dir():  # nothing is kept for a folder that is gone
        found.flush()


def _weights_hash(part: nn.Module) -> bytes:
    digest = hashlib.blake2b()
    for name, value in part.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.digest()


def _row_key(row: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(row, dtype=">u4").tobytes()).digest()[:16]
