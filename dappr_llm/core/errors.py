"""The one exception that the command line shows as a sentence instead of a traceback."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """An error the user can fix: the message names the bad file, row or key and what to do about it."""


_MOST_NAMES = 12


@contextmanager
def explained(what: str, cure: str = "") -> Iterator[None]:
    """
    Turn whatever a library raises while it reads what others wrote into a `UserError`.

    For seams only: a tokenizer, a config or weights that some library parses, and which may raise anything. With
    `DAPPR_TRACEBACK=1` the library's own exception passes.

    Args:
        what (`str`):
            What could not be done, with the file or key; the first line of the library's message follows.
        cure (`str`, *optional*):
            What to do about it.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if os.environ.get("DAPPR_TRACEBACK"):
            raise
        raise UserError(f"{what}: {first_line(error)}{f'; {cure}' if cure else ''}") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's message without its full stop, or its class if it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    wrong = [line.strip() for line in lines if "size mismatch" in line]  # torch names the weight below its headline
    return (wrong or lines)[0].rstrip(".")[:500]


def close_names(name: object, valid: Iterable[object], limit: int = 3) -> list[str]:
    """The valid names that look like a wrong one, best first; none if nothing does."""
    return difflib.get_close_matches(str(name), sorted(str(v) for v in valid), n=limit, cutoff=0.5)


def did_you_mean(names: Iterable[str]) -> str:
    """Suggested names as a question."""
    return "did you mean " + " or ".join(repr(name) for name in names) + "?"


def nearest(name: object, valid: Iterable[object], limit: int = 3) -> str:
    """
    Say which valid names come closest to a wrong one.

    Args:
        name (`object`):
            What was given.
        valid (`Iterable`):
            What would have been accepted.
        limit (`int`, *optional*, defaults to 3):
            How many suggestions at the most; with none close enough, up to 12 valid names are listed.
    """
    names = sorted(str(v) for v in valid)
    close = close_names(name, names, limit)
    if close:
        return did_you_mean(close)
    rest = f", …, {len(names)} in all" if len(names) > _MOST_NAMES else ""
    return "valid: " + ", ".join(names[:_MOST_NAMES]) + rest
