"""
Names that come from data and become parts of paths, and paths that files name.

A task's name, a split, a run's name: whoever wrote a table or a recipe chose them. [`safe_name`] turns each into one
part of a path that stays where it is put; [`inside`] finds the files that another file of the same folder names.
"""

from __future__ import annotations

import hashlib
import os
import stat
import unicodedata
from pathlib import Path, PurePosixPath, PureWindowsPath

from .errors import UserError
from .files import PathLike, kind_of

ID_LIMIT = 1000  # characters of an item's id; tables hold all ids at the width of the longest
_LONGEST = 100  # bytes: a file system takes 255, of which endings, temporary names and a second part need some
_MARK = "~"  # stands only in names that were changed, before their hash: none of them can equal an unchanged one
_ALSO_ALLOWED = frozenset("._-+=,@() ")
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in "0123456789¹²³")}


def safe_name(name: object, without: str = "") -> str:
    """
    A name as one part of a path: no folder, not hidden, not too long, and a file's name on every system.

    Names that are one already stay as they are. All others lose what cannot stand there and get a hash of the whole
    name, so that two names never become one.

    Args:
        name (`str` or `int`):
            The name.
        without (`str`, *optional*):
            Further characters that must not stand in it.
    """
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise UserError(f"A name of a file or folder is a text, not {type(name).__name__}: {str(name)[:80]!r}")
    text = str(name)
    kept = "".join(c if (c.isalnum() or c in _ALSO_ALLOWED) and c not in without else "_" for c in text)
    kept = unicodedata.normalize("NFC", kept)
    if kept.startswith("."):
        kept = "_" + kept[1:]
    if kept.endswith((".", " ")):
        kept = kept[:-1] + "_"
    if kept.split(".")[0].strip().lower() in _RESERVED:
        kept = f"_{kept}"
    if len(kept.encode()) > _LONGEST:
        kept = kept.encode()[: _LONGEST - 20].decode(errors="ignore")
    if kept == text and text:
        return text
    return f"{kept}{_MARK}{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]}"


def safe_path(name: object) -> Path:
    """A name that may hold `/` as a relative path, each part of it a [`safe_name`]."""
    return Path(*(safe_name(part) for part in str(name).split("/")))


def table_name(task: object, split: object) -> str:
    """The file of a prediction table; a split holds no `-`, so that `a-b` of `c` and `a` of `b-c` differ."""
    return f"{safe_name(task)}-{safe_name(split, without='-')}.npz"


def inside(folder: PathLike, name: object) -> Path:
    """
    The path of a regular file, or of nothing yet, that a file of the same folder names; nothing is opened.

    A `ValueError` says why a name is refused: absolute, with `..`, or a link, device or FIFO. Links are followed only
    inside the folder, and from a snapshot in the Hub's cache to the blobs beside it.

    Args:
        folder (`str` or `os.PathLike`):
            The folder.
        name (`str`):
            The relative path of a file below it, with `/`.
    """
    if not isinstance(name, str) or not name or not name.isprintable() or "\\" in name:
        raise ValueError(f"{str(name)[:80]!r} is not a relative path")
    parts = PurePosixPath(name).parts
    if ".." in parts or PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive:
        raise ValueError(f"{name[:80]!r} leads out of the folder")
    path, home = Path(folder) / name, Path(folder).resolve()
    homes = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    try:
        real = path.resolve()
        if not any(real.is_relative_to(each) for each in homes):
            raise ValueError(f"{name[:80]!r} is a link out of the folder")
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return path
    except (OSError, RuntimeError) as error:  # a link to itself, a name that is too long
        raise ValueError(f"{name[:80]!r} cannot be found ({getattr(error, 'strerror', None) or error})") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{name[:80]!r} is {kind_of(mode)}, not a regular file")
    return path


def check_id(name: object, where: str) -> str:
    """An item's id as text; a `UserError` that begins with `where` if it is too long."""
    text = str(name)
    if len(text) > ID_LIMIT:
        raise UserError(f"{where}: the id {text[:20]!r}… has {len(text):,} characters; at most {ID_LIMIT:,} are read")
    return text
