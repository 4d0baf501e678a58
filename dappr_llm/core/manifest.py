"""
`manifest.json`: size and SHA-256 of every file of a saved model, so that damaged checkpoints are detected.

A folder is written under a hidden temporary name and renamed once its manifest is on disk: a folder with its final
name is complete, even if the process that wrote it was killed.
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
PARTIAL = ".partial"  # suffix of a folder that is being written
_FORMAT = 1
_REMEDY = "fetch or train it again (a file you changed on purpose: remove manifest.json beside it)"


def sha256(path: str | Path) -> str:
    """SHA-256 of a file, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write(folder: str | Path, names: Iterable[str] | None = None) -> None:
    """
    Flush a folder's files to disk (fsync), then write its manifest.

    Args:
        folder (`str` or `Path`):
            The folder.
        names (`Iterable[str]`, *optional*):
            The files to list; by default every file below the folder.
    """
    folder = Path(folder)
    if names is None:
        names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    files = {}
    for name in sorted(set(names) - {NAME, "README.md"}):  # a model card is often edited by hand
        _to_disk(folder / name)
        files[name] = {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    content = {"format_version": _FORMAT, "files": files}
    write_text(folder / NAME, json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n")


def problem(folder: str | Path, required: bool = False) -> str | None:
    """
    Compare a folder's files with its manifest; a message that names the first bad file, or `None` if all match.

    Args:
        folder (`str` or `Path`):
            The folder.
        required (`bool`, *optional*, defaults to `False`):
            Report a missing manifest as well; folders from the Hub and of older versions have none.
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
    """Raise a `UserError` that names the first bad file of a folder, see [`problem`]."""
    found = problem(folder)
    if found:
        raise UserError(f"{found}; {_REMEDY}")


def staging(final: str | Path) -> Path:
    """The temporary path under which a folder is written before [`publish`] renames it."""
    final = Path(final)
    return final.with_name(f".{final.name}{PARTIAL}")


def publish(source: Path, final: Path) -> None:
    """Write the manifest of `source` and rename it to `final`; an existing folder is removed only after that."""
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
    """Move the files of a folder into an existing one; its old manifest is removed first, the new one written last."""
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
    """Clean up after a killed process: rename checkpoints that are complete to their final name, remove the others."""
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
    except OSError:  # not every system can open folders
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
