"""
Folders that are complete or not there: written with a manifest of their files, then renamed.

A folder is written under a hidden temporary name and renamed once its manifest is on disk: a folder with its final
name is complete, even if the process that wrote it was killed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from .checkpoint import MANIFEST, MANIFEST_VERSION, checkpoints, file_problem, manifest_checksum, sha256
from .files import write_text

logger = logging.getLogger(__name__)

PARTIAL = ".partial"  # suffix of a folder that is being written


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
    for name in sorted(set(names) - {MANIFEST, "README.md"}):  # a model card is often edited by hand
        _to_disk(folder / name)
        files[name] = {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    content = {"format_version": MANIFEST_VERSION, "files": files}
    write_text(
        folder / MANIFEST,
        json.dumps({**content, "checksum": manifest_checksum(content)}, indent=1, allow_nan=False) + "\n",
    )


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
    (final / MANIFEST).unlink(missing_ok=True)
    for name in [*(name for name in names if name != MANIFEST), MANIFEST]:
        (final / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, final / name)
    _to_disk(final)
    shutil.rmtree(source, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a folder that was published: hidden first, so that one half removed is never taken for a whole one."""
    aside = folder.with_name(f".removed-{folder.name}{PARTIAL}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(folder, aside)
    except OSError as error:
        logger.warning(f"{folder} cannot be removed: {error.strerror or error}")
        return
    shutil.rmtree(aside, ignore_errors=True)


def rotate(output_dir: str | Path, limit: int | None, newest: Path, best: str | None = None) -> None:
    """
    Remove older checkpoints, by step and never by a file's time, since clocks can be set back.

    The one just written and the best one always stay. Damaged ones (files missing or of another size) count as
    nothing: they are removed instead of a whole one.

    Args:
        output_dir (`str` or `Path`):
            Folder of the checkpoints.
        limit (`int`, *optional*):
            How many to keep; all if `None` or below 1.
        newest (`Path`):
            The one just written, whatever its step.
        best (`str`, *optional*):
            The best one.
    """
    if limit is None or limit < 1:
        return
    protected = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    found = [path for path in checkpoints(output_dir) if not path.is_symlink()]  # the newest first
    kept = sum(path.resolve() in protected for path in found)
    for path in found:
        if path.resolve() in protected:
            continue
        if kept < limit and file_problem(path, required=True, hashes=False) is None:
            kept += 1
        else:
            remove(path)


def tidy(output_dir: str | Path) -> None:
    """Clean up after a killed process: rename checkpoints that are complete to their final name, remove the others."""
    for path in sorted(Path(output_dir).glob(f".*{PARTIAL}")):
        name = path.name[1 : -len(PARTIAL)].removesuffix(".old")
        final = path.with_name(name)
        if name.startswith("checkpoint-") and not final.exists() and file_problem(path, required=True) is None:
            os.rename(path, final)
        else:
            shutil.rmtree(path, ignore_errors=True)


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
