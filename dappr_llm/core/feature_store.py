"""
Hidden states or features on disk: one array of rows per key, appended by any number of processes, read memory-mapped.

Each process appends to files of its own and writes an index when the states are on disk, so a killed process leaves
nothing that is taken for whole. Keys are hashes of what the states were computed from.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import uuid
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_FLUSH_KEYS = 256


class FeatureStore:
    """
    Arrays `[T, D]` by key.

    Args:
        folder (`str` or `Path`):
            Where they are kept; shared by the runs of a sweep.
        dtype (`torch.dtype`):
            Of every array.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.dtype = dtype
        self._rows: dict[bytes, tuple[np.ndarray, int, int]] = {}
        self._pending: dict[bytes, Tensor] = {}
        self._read: set[Path] = set()
        self.refresh()
        atexit.register(_flush, weakref.ref(self))

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows or key in self._pending

    def __getitem__(self, key: bytes) -> Tensor:
        if key in self._pending:
            return self._pending[key]
        states, start, length = self._rows[key]
        found = torch.from_numpy(np.array(states[start : start + length]))
        return found.view(torch.bfloat16) if self.dtype == torch.bfloat16 else found

    def add(self, key: bytes, states: Tensor) -> None:
        """Keep one array; it reaches the disk with the next `flush`."""
        self._pending[key] = states
        if len(self._pending) >= _FLUSH_KEYS:
            self.flush()

    def refresh(self) -> None:
        """Take in what other processes have finished; an index is written after its states."""
        for index in sorted(self.folder.glob("*.npz")):
            if index in self._read:
                continue
            self._read.add(index)
            with np.load(index, allow_pickle=False) as found:
                keys, starts, lengths, width = found["keys"], found["starts"], found["lengths"], int(found["width"])
            kind = np.uint16 if self.dtype == torch.bfloat16 else np.dtype(str(self.dtype).removeprefix("torch."))
            states = np.memmap(index.with_suffix(".bin"), dtype=kind, mode="r").reshape(-1, width)
            for key, start, length in zip(keys, starts.tolist(), lengths.tolist(), strict=True):
                self._rows[key.tobytes()] = (states, start, length)

    def flush(self) -> None:
        """Write what was added since the last time, and read it from there from now on."""
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
        self.refresh()


def content_key(values: np.ndarray) -> bytes:
    """The key of an array of numbers: 16 bytes of its SHA-256."""
    return hashlib.sha256(values.tobytes()).digest()[:16]


def _flush(store: weakref.ref[FeatureStore]) -> None:
    found = store()
    if found is not None and found.folder.is_dir():  # nothing is kept for a folder that is gone
        found.flush()
