"""NumPy files that anybody may have written: what a header and an archive announce is checked before it is read."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Collection, Sequence
from typing import IO, Any

import numpy as np

from .files import PathLike, file_size
from .names import ID_LIMIT, check_id

ARCHIVE_LIMIT = 2**36  # bytes of all arrays of an archive, 64 GiB
_UNSUSPICIOUS = 2**28  # bytes: up to 256 MiB, arrays may be packed as tightly as they like
_RATIO = 200  # beyond, an archive may unpack to this many times its own size; float outputs pack to about a half
_MOST_MEMBERS = 1000
_HOW = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # all that NumPy writes


def load_npz(
    path: PathLike, names: Collection[str] | None = None, limit: int = ARCHIVE_LIMIT
) -> dict[str, np.ndarray]:
    """
    The arrays of a `.npz` archive by name; a `ValueError` says what is wrong with it. Never unpickles.

    Args:
        path (`str` or `os.PathLike`):
            A regular file.
        names (`Collection[str]`, *optional*):
            The arrays to read; by default all of them.
        limit (`int`, *optional*, defaults to 64 GiB):
            How many bytes the arrays may take.
    """
    most = min(limit, max(_UNSUSPICIOUS, _RATIO * file_size(path)))
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            found = {info.filename.removesuffix(".npy"): info for info in members}
            if len(members) > _MOST_MEMBERS or len(found) < len(members):
                raise ValueError(
                    f"it holds {len(members):,} files, some of the same name or more than {_MOST_MEMBERS:,}"
                )
            wanted = {name: info for name, info in found.items() if names is None or name in names}
            total = sum(info.file_size for info in wanted.values())
            if total > most:
                raise ValueError(
                    f"it would unpack to {total:,} bytes; at most {most:,} are read from a file of its size"
                )
            return {name: _read(archive, info, name) for name, info in wanted.items()}
    except (OSError, EOFError, NotImplementedError, RuntimeError, MemoryError, zipfile.BadZipFile) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def load_npy(path: PathLike) -> np.ndarray:
    """The array of a `.npy` file, memory-mapped; a `ValueError` says what is wrong with it."""
    size = file_size(path)
    try:
        with open(path, "rb") as handle:
            check_header(handle, size, os.path.basename(path))
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> np.ndarray:
    import zlib

    if info.compress_type not in _HOW or info.flag_bits & 1:
        raise ValueError(f"{name} is encrypted, or packed in a way that NumPy does not write")
    try:
        with archive.open(info) as handle:
            check_header(handle, info.file_size, name)
        with archive.open(info) as handle:
            return np.lib.format.read_array(handle, allow_pickle=False)
    except zlib.error as error:
        raise ValueError(f"{name}: {error}") from None


def check_header(handle: IO[bytes], size: int, name: str) -> None:
    """
    Refuse an array whose header announces anything but the data behind it; NumPy would allocate what it announces.

    Args:
        handle:
            At the start of a `.npy` file.
        size (`int`):
            Bytes of the whole file.
        name (`str`):
            What errors call the array.
    """
    version = np.lib.format.read_magic(handle)
    readers: dict[Any, Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"{name} is stored in version {version} of NumPy's format; 1.0 and 2.0 are read")
    try:
        shape, _, dtype = readers[version](handle)
    except ValueError:
        raise
    except Exception as error:  # of Python's tokenizer and parser, to which NumPy gives the header
        raise ValueError(f"the header of {name} is damaged ({type(error).__name__})") from None
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which are not read")
    items, behind = math.prod(shape), size - handle.tell()
    if min(shape, default=0) < 0 or (dtype.itemsize == 0 and items > 1) or items * dtype.itemsize != behind:
        raise ValueError(f"{name} has {behind:,} bytes of data, but its header announces {shape} of {dtype}"[:300])


def id_array(ids: Sequence[str] | np.ndarray) -> np.ndarray:
    """Ids as an array of texts; their limit is checked first, since each takes as much memory as the longest."""
    long = np.char.str_len(ids) > ID_LIMIT if isinstance(ids, np.ndarray) and ids.dtype.kind == "U" else None
    for row, name in enumerate(ids) if long is None else ((row, ids[row]) for row in np.flatnonzero(long).tolist()):
        check_id(name, f"row {row}")
    return np.asarray(ids, dtype=str)
