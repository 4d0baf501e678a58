"""Bounded reads, atomic writes, a lock that lets one process write a folder, and which rank writes and prints."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .errors import UserError
from .terminal import show

if TYPE_CHECKING:
    from filelock import BaseFileLock

PathLike = str | os.PathLike[str]
LOCK = ".lock"
_ATTEMPTS = 100  # to lock a folder that others make and remove meanwhile
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # of file systems without locks
LEFTOVER = ".*.tmp"  # what `atomic_write` writes before it renames
JSON_LIMIT = 16 * 2**20  # bytes; such a file takes up to some hundred MB of memory when it is read


def cache_dir() -> Path:
    """The folder for what can be computed again: `DAPPR_CACHE`, or `dappr_llm` in the user's cache folder."""
    if os.environ.get("DAPPR_CACHE"):
        return Path(os.environ["DAPPR_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dappr_llm"


# --- reading --------------------------------------------------------------------------------------------------------


def file_size(path: PathLike) -> int:
    """The size of a regular file, which is not opened: opening a FIFO would wait forever, a device may act."""
    try:
        found = os.stat(path)  # follows links: the Hub's cache is made of them
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.") from None
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"Cannot read {path}: it is {kind_of(found.st_mode)}, not a regular file.")
    return found.st_size


def kind_of(mode: int) -> str:
    """What a file mode that is no regular file stands for, in words."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_bytes(path: PathLike, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    size = file_size(path)
    if size > limit:
        raise UserError(f"{path} holds {size:,} bytes, and such a file may hold {limit:,} at most.")
    try:
        # Not blocking: the file may have become a FIFO since it was looked at.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from None
    if len(data) > limit:
        raise UserError(f"{path} grew beyond {limit:,} bytes while it was read.")
    return data


def read_json(path: PathLike, limit: int = JSON_LIMIT, *, allow_nan: bool = False) -> Any:
    """
    The content of a JSON file; whatever is wrong with it is a `UserError` that names the file.

    Args:
        path (`str` or `os.PathLike`):
            A regular file, in UTF-8.
        limit (`int`, *optional*, defaults to 16 MiB):
            How many bytes it may hold.
        allow_nan (`bool`, *optional*, defaults to `False`):
            Accept NaN and infinite numbers, which JSON lacks and other libraries write.
    """
    try:
        return parse_json(read_bytes(path, limit), allow_nan=allow_nan)
    except ValueError as error:  # also of UTF-8
        raise UserError(f"{path} is not a valid JSON file: {error}.") from None


def parse_json(data: str | bytes, *, allow_nan: bool = False) -> Any:
    """
    A JSON value; a `ValueError` says what is wrong with it.

    Stricter than `json.loads`: keys that appear twice (the readers of a file would disagree about it), numbers
    that are not finite and halves of surrogate pairs (which cannot be printed or written again) are refused.
    """
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    numbers: dict[str, Any] = {} if allow_nan else {"parse_constant": _not_a_number, "parse_float": _finite}
    try:
        found = json.loads(text, object_pairs_hook=_unique_keys, **numbers)
        if "\\ud" in text.lower():
            json.JSONEncoder(ensure_ascii=False).encode(found).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} appears twice")
    return found


def _not_a_number(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


# --- writing --------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: PathLike) -> Iterator[IO[bytes]]:
    """Open a temporary binary file that is renamed to `path` on success; a failure leaves an older file unchanged."""
    path = Path(path)
    # In the same folder, since `os.replace` is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):  # a parent that is a file: the error above says so
            temporary.unlink(missing_ok=True)


def write_text(path: PathLike, text: str) -> None:
    """Write a text file atomically, see [`atomic_write`]."""
    with atomic_write(path) as handle:
        handle.write(text.encode())


def remove_leftovers(folder: PathLike) -> None:
    """Remove temporary files of killed processes from a folder; call it only while no process writes there."""
    for path in Path(folder).glob(LEFTOVER):
        path.unlink(missing_ok=True)


def is_empty(folder: PathLike) -> bool:
    """Whether a folder does not exist or holds nothing but our lock and leftovers of killed processes."""
    path = Path(folder)
    if not path.exists():
        return True
    try:
        entries = [entry for entry in path.iterdir() if not entry.name.startswith(LOCK)]
    except OSError as error:
        raise UserError(f"Cannot read the folder {path}: {error.strerror or error}.") from None
    return all(entry.match(LEFTOVER) for entry in entries)


@contextmanager
def folder_lock(folder: PathLike) -> Iterator[None]:
    """
    Lock a folder for this process; raises a `UserError` at once if another process holds the lock.

    The operating system releases the lock when the process ends, also if it is killed. The lock's file stays: a
    process that had opened a removed one would lock nothing. Only with a folder that was made for the lock and is
    still empty it is removed, while the lock is held; `_lock` notices that.
    """
    path = Path(folder) / LOCK
    created = [parent for parent in (path.parent, *path.parent.parents) if not parent.exists()]
    lock = _lock(path)
    try:
        yield
    finally:
        with suppress(OSError):  # Windows keeps open files
            if created and all(entry.name.startswith(LOCK) for entry in path.parent.iterdir()):
                path.unlink()
        lock.release()
        with suppress(OSError):  # not empty: `rmdir` never removes what another process just wrote
            for parent in created:
                parent.rmdir()


def _lock(path: Path) -> BaseFileLock:
    """A held lock on the file that is at `path` now."""
    import filelock

    kind: type[BaseFileLock] = filelock.FileLock
    for _ in range(_ATTEMPTS):
        lock = kind(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise UserError(
                f"{path.parent} is being written by another process; wait for it, or choose another"
            ) from None
        except OSError as error:
            if isinstance(error, FileNotFoundError | FileExistsError) and not path.parent.is_file():
                continue  # the folder was removed meanwhile, by a process that had made it
            if error.errno in _NO_LOCKS and kind is filelock.FileLock:
                # A marker under another name: the file just made would look like somebody else's.
                kind, path = filelock.SoftFileLock, path.with_name(f"{LOCK}-soft")
                continue
            raise UserError(f"Cannot write into {path.parent}: {error.strerror or error}.") from error
        if _is_at(path, lock):
            return lock
        lock.release()
    raise UserError(f"{path.parent} is being written by another process, which keeps making and removing it")


def _is_at(path: Path, lock: BaseFileLock) -> bool:
    """Whether the locked file is the one that other processes would find."""
    handle = lock._context.lock_file_fd
    try:
        return handle is None or os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


# --- ranks ----------------------------------------------------------------------------------------------------------


def is_main_process() -> bool:
    """Whether this process has rank 0; the launcher says so before any process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def say(text: str) -> None:
    """Print on rank 0 only."""
    if is_main_process():
        show(text)
