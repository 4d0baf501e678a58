"""
Regular expressions of files that others wrote, such as `adapter_config.json`: refused if matching may take for ever.

Python's `re` backtracks, so that a pattern of a dozen characters can take years on a module's name. A pattern is
parsed here and never run. What is allowed takes milliseconds per name of a module.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from .errors import UserError

if sys.version_info >= (3, 11):
    from re import _constants as codes  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
else:
    import sre_constants as codes
    import sre_parse as parser

MOST_CHARACTERS = 1000
MOST_UNBOUNDED = 4  # `*`, `+` and `{n,}` on one way through the pattern
MOST_WAYS = 32  # in which bounded repeats and alternatives can match the same text
MOST_COUNT = 1000  # in `{n}` and `{n,m}`

_REPEATS = {codes.MAX_REPEAT, codes.MIN_REPEAT, getattr(codes, "POSSESSIVE_REPEAT", None)}
_REFERENCES = {codes.GROUPREF, codes.GROUPREF_EXISTS}


class _Refused(Exception):
    """What is wrong with a pattern, in words."""


def problem(text: str) -> str | None:
    """What is wrong with a pattern, in words; `None` if it is valid and surely fast."""
    if len(text) > MOST_CHARACTERS:
        return f"is a regular expression of {len(text)} characters; at most {MOST_CHARACTERS} are allowed"
    try:
        unbounded, ways = _cost(parser.parse(text), repeated=False)
        if unbounded > MOST_UNBOUNDED:
            raise _Refused(f"has {unbounded} unbounded repeats (`*`, `+`), {MOST_UNBOUNDED} are allowed")
        if ways > MOST_WAYS:
            raise _Refused(f"can match one text in {ways} ways, {MOST_WAYS} are allowed")
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a valid regular expression ({error})"
    except _Refused as error:
        return f"{error}: matching it could take for ever; name the modules in a list"
    return None


def check_regex(text: object, where: str, key: str) -> None:
    """
    Raise a `UserError` unless a regular expression is valid and surely fast.

    Args:
        text (`object`):
            The pattern.
        where (`str`):
            The file or recipe that it stands in.
        key (`str`):
            Its key there, such as `target_modules`.
    """
    found = problem(text) if isinstance(text, str) else f"is {type(text).__name__}, not a regular expression"
    if found:
        raise UserError(f"{where}: {key} ({str(text)[:80]!r}) {found}")


def _cost(tokens: Any, repeated: bool) -> tuple[int, int]:
    """Unbounded repeats on the worst way through a parsed pattern, and the number of ways to match the same text."""
    unbounded, ways = 0, 1
    for code, value in tokens:
        more, times = _one(code, value, repeated)
        unbounded, ways = unbounded + more, ways * times
    return unbounded, ways


def _one(code: Any, value: Any, repeated: bool) -> tuple[int, int]:
    if code in _REFERENCES:
        raise _Refused("refers back to a group")
    if code in _REPEATS:
        least, most, body = value
        return _repeat(least, most, body, repeated)
    if code is codes.BRANCH:
        if repeated:
            raise _Refused("repeats alternatives")
        costs = [_cost(branch, repeated) for branch in value[1]]
        return max(n for n, _ in costs), _overlap(value[1]) * max(ways for _, ways in costs)
    if code is codes.SUBPATTERN:
        return _cost(value[-1], repeated)
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return _cost(value[1], repeated)
    if code is getattr(codes, "ATOMIC_GROUP", None):
        return _cost(value, repeated)
    return 0, 1  # a character, a class of characters or a position


def _repeat(least: int, most: Any, body: Any, repeated: bool) -> tuple[int, int]:
    endless = most is codes.MAXREPEAT
    if least > MOST_COUNT or (not endless and most > MOST_COUNT):
        raise _Refused(f"repeats more than {MOST_COUNT} times")
    if repeated and least != most:
        raise _Refused("repeats what already repeats")
    unbounded, ways = _cost(body, repeated or endless or most > 1)
    return unbounded + endless, ways if endless else ways * (int(most) - least + 1)


def _overlap(branches: list[Any]) -> int:
    """How many alternatives can match at one place; of plain words only those that begin with each other."""
    words = []
    for branch in branches:
        if any(code is not codes.LITERAL for code, _ in branch):
            return len(branches)
        words.append("".join(chr(value) for _, value in branch))
    return max(sum(word.startswith(other) for other in words) for word in words)
