"""
`manifest.json`: size and SHA-256 of every file of a saved model, so that a damaged one is never taken for whole.

Folders are written under a hidden name and renamed when their manifest is on the disk: what bears its final name is
complete, whatever happened to the process that wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import UserError
from .files import write_text

NAME = "manifest.json"
PARTIAL = ".partial"  # ending of a folder that is being written
_FORMAT = 1
_REMEDY = "fetch or train it again (a file you changed on purpose: remove manifest.json beside it)"


def sha256(path: str | Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write(folder: str | Path, names: Iterable[str] | None = None) -> None:
    """
    Write the manifest of a folder, after making sure that its files have reached the disk.

    Args:
        folder (`str` or `Path`):
            The folder.
        names (`Iterable[str]`, *optional*):
            The files it vouches for; by default every file below the folder.
    """
    folder = Path(folder)
    if names is None:
        names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    files = {}
    for name in sorted(set(names) - {NAME, "README.md"}):  # a card is for reading, and often edited
        _to_disk(folder / name)
        files[name] = {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    content = {"format_version": _FORMAT, "files": files}
    write_text(folder / NAME, json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n")


def problem(folder: str | Path, required: bool = False) -> str | None:
    """
    What is wrong with a folder's files, naming the first bad one; `None` if they are what was saved.

    Args:
        folder (`str` or `Path`):
            The folder.
        required (`bool`, *optional*, defaults to `False`):
            Whether a folder without a manifest is bad too; those of the Hub and of older versions have none.
    """
    folder = Path(folder)
    path = folder / NAME
    if not path.is_file():
        return f"{path} is missing" if required else None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        checksum = content.pop("checksum")
        files = content["files"]
        whole = checksum == _checksum(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        return f"{path} is damaged"
    for name, facts in files.items():
        try:
            size = (folder / name).stat().st_size
            if size != facts["size"]:
                return f"{folder / name} is damaged ({size} bytes, {facts['size']} were saved)"
            if sha256(folder / name) != facts["sha256"]:
                return f"{folder / name} is damaged (its content is not what was saved)"
        except FileNotFoundError:
            return f"{folder / name} is missing"
        except OSError as error:
            return f"{folder / name} cannot be read ({error.strerror or error})"
    return None


def check(folder: str | Path) -> None:
    """Raises a `UserError` that names the bad file, if there is one."""
    found = problem(folder)
    if found:
        raise UserError(f"{found}; {_REMEDY}")


def staging(final: str | Path) -> Path:
    """Where a folder is written before it gets its name."""
    final = Path(final)
    return final.with_name(f".{final.name}{PARTIAL}")


def publish(source: Path, final: Path) -> None:
    """Give a folder that was written whole its name; an older one of that name goes only when the new one is there."""
    write(source)
    aside = None
    if final.exists():
        aside = final.with_name(f".{final.name}.old{PARTIAL}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
    os.rename(source, final)
    _to_disk(final.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def publish_into(source: Path, final: Path) -> None:
    """Move the files of a folder into another that holds more; the manifest is taken away first and put last."""
    names = sorted(p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file())
    write(source)
    final.mkdir(parents=True, exist_ok=True)
    (final / NAME).unlink(missing_ok=True)
    for name in [*(name for name in names if name != NAME), NAME]:
        (final / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, final / name)
    _to_disk(final)
    shutil.rmtree(source, ignore_errors=True)


def tidy(output_dir: str | Path) -> None:
    """
    Clean up after a killed process: folders that were complete but not yet named get their name, others are removed.
    """
    for path in sorted(Path(output_dir).glob(f".*{PARTIAL}")):
        name = path.name[1 : -len(PARTIAL)].removesuffix(".old")
        final = path.with_name(name)
        if name.startswith("checkpoint-") and not final.exists() and problem(path, required=True) is None:
            os.rename(path, final)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _to_disk(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # folders cannot be opened on every system
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
