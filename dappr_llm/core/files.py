"""Atomic file writes, a lock that lets one process at a time write a folder, and which rank writes and prints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .errors import UserError

PathLike = str | os.PathLike[str]


def cache_dir() -> Path:
    """The folder for what can be computed again: `DAPPR_CACHE`, or `dappr_llm` in the user's cache folder."""
    if os.environ.get("DAPPR_CACHE"):
        return Path(os.environ["DAPPR_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dappr_llm"


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
    for path in Path(folder).glob(".*.tmp"):
        path.unlink(missing_ok=True)


LOCK = ".lock"


def is_empty(folder: PathLike) -> bool:
    """Whether a folder does not exist or holds nothing but our lock."""
    path = Path(folder)
    return not path.exists() or not any(entry.name != LOCK for entry in path.iterdir())


@contextmanager
def folder_lock(folder: PathLike) -> Iterator[None]:
    """
    Lock a folder for this process; raises a `UserError` if another process holds the lock.

    The operating system releases the lock when the process ends, also if it is killed.
    """
    path = Path(folder) / LOCK
    try:
        import fcntl
    except ImportError:  # no fcntl on this platform: run without a lock
        yield
        return
    created = [parent for parent in (path.parent, *path.parent.parents) if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(path, "a")  # noqa: SIM115 - held open for as long as the lock
    except OSError as error:
        raise UserError(f"Cannot write into {folder}: {error.strerror or error}.") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is being written by another process; wait for it, or choose another") from None
        except OSError:
            pass  # a file system without locks
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            for parent in created:  # a run that failed before it wrote anything leaves no empty folders
                if parent.is_dir() and not any(parent.iterdir()):
                    parent.rmdir()


# --- ranks ----------------------------------------------------------------------------------------------------------


def is_main_process() -> bool:
    """Whether this process has rank 0; the launcher says so before any process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def say(text: str) -> None:
    """Print on rank 0 only."""
    if is_main_process():
        print(text, flush=True)
