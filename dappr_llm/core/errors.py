"""The one exception that the command line shows as a sentence instead of a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend: the message names the bad file, row or key and what to do about it."""


def nearest(name: object, valid: Iterable[object], limit: int = 3) -> str:
    """
    Say which valid names come closest to a wrong one.

    Args:
        name (`object`):
            What was given.
        valid (`Iterable`):
            What would have been accepted.
        limit (`int`, *optional*, defaults to 3):
            How many suggestions at the most; with none close enough, all valid names are listed.
    """
    names = sorted(str(v) for v in valid)
    close = difflib.get_close_matches(str(name), names, n=limit, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "valid: " + ", ".join(names)
