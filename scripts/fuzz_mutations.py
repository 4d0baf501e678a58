"""Seeded mutations of values, texts, bytes and command lines, for scripts/fuzz.py."""

from __future__ import annotations

import copy
import random
from typing import Any

# Values that readers tend to forget: wrong types, ends of ranges, not finite, paths, control characters, templates.
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3.5, -0.0, 1e-9, 1e9, 1e308, 10**30, -(10**18), float("nan"), float("inf"),
    -float("inf"), "", " ", "no", "yes", "auto", "none", "null", "nan", "1", "-1", "2e-4", "fast", "é", "𝔘", "\u202e",
    "\x1b[31m", "a\x00b", "\n", "../../victim", "/etc/passwd", "/dev/zero", "C:\\Users\\x", "file:///etc/passwd",
    "hf-hub:a/b", "{question}", "{question:2000000000}", "{question!r}", "{0.__class__}", "%s", "$(id)", "<script>",
    "=1+1", "(a+)+$", "[", "a" * 300, "a" * 100_000, "all-linear", "dappr", "ce", "train", "test", [], [[]], [None],
    [1, "a"], ["a"] * 50, {}, {"a": 1}, {"name": "x"}, {"": ""}, {1: 2}, {"path": "x"}, [0.1], [-1], [10**12],
)  # fmt: skip
KEYS = ("name", "path", "a", "", "__class__", "token", "x" * 300, "train", "base", "rows", "é", "r.t", 3)
TEXTS = (
    "\t", "\x00", "&a ", "*a", "!!python/object:os.system ", "<<: ", "- ", ": ", "{", "}", "[", "]", "'", '"', "|",
    ">", "%", "@", "`", "#", "---\n", "\xff", "\ufeff", "1e999", "0x", "~", ", ", "\\", "\r", "2026-13-45",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of every value in nested mappings and lists."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def mutate_value(draw: random.Random, value: Any) -> Any:
    """Nested values with one to three of them replaced, removed, renamed, wrapped, repeated or added."""
    changed = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found = places(changed)
        if not found:
            return draw.choice(HOSTILE)
        path = draw.choice(found)
        above = changed
        for key in path[:-1]:
            above = above[key]
        _change(draw, above, path[-1])
    return changed


def _change(draw: random.Random, above: Any, key: Any) -> None:
    kind = draw.random()
    if kind < 0.6:
        above[key] = copy.deepcopy(draw.choice(HOSTILE))
    elif kind < 0.7:
        del above[key]
    elif kind < 0.8 and isinstance(above, dict):
        above[draw.choice(KEYS)] = copy.deepcopy(draw.choice(HOSTILE))
    elif kind < 0.87 and isinstance(above, dict):
        above[draw.choice(KEYS)] = above.pop(key)
    elif kind < 0.94:
        above[key] = [above[key]] if draw.random() < 0.5 else {"a": above[key]}
    else:
        number = above[key]
        above[key] = number * draw.choice((-1, 0, 10**6)) if isinstance(number, int | float) else [number] * 3


def mutate_text(draw: random.Random, text: str) -> str:
    """A text with pieces cut out, moved, repeated or put in."""
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, length = draw.randrange(len(text) + 1), draw.choice((1, 1, 3, 20, 200))
        kind = draw.random()
        if kind < 0.35:
            text = text[:at] + draw.choice(TEXTS) + text[at:]
        elif kind < 0.55:
            text = text[:at] + text[at + length :]
        elif kind < 0.7:
            text = text[:at] + text[at : at + length] * 2 + text[at + length :]
        elif kind < 0.85:
            text = text[:at] + chr(draw.choice((*range(128), 0x85, 0x2028, 0xFFFD))) + text[at + 1 :]
        else:
            text = text[:at]
    return text


def mutate_bytes(draw: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut, repeated, put in or gone."""
    kind = draw.random()
    if kind < 0.1:
        return draw.choice((b"", b"\x00", b"{}", b"[]", b"null", b"PK\x03\x04", b"\x80\x04\x95", b"\xff" * 64))
    changed = bytearray(data)
    if kind < 0.3:
        return bytes(changed[: draw.randrange(len(changed) + 1)])
    head = min(len(changed), draw.choice((64, 2000, len(changed))))  # headers say how the rest is read
    for _ in range(draw.choice((1, 1, 4, 64))):
        at = draw.randrange(max(head, 1))
        if not changed:
            break
        if kind < 0.75:
            changed[at % len(changed)] = draw.choice((0, 255, draw.randrange(256), changed[at % len(changed)] ^ 1))
        elif kind < 0.9:
            changed[at:at] = draw.randbytes(draw.choice((1, 8, 100)))
        else:
            del changed[at : at + draw.choice((1, 8, 100))]
    return bytes(changed)


def mutate_words(draw: random.Random, words: list[str], options: list[str]) -> list[str]:
    """A command line with words replaced, dropped, repeated, and options that take what they should not."""
    changed = list(words)
    for _ in range(draw.choice((1, 1, 2, 3))):
        at = draw.randrange(len(changed) + 1)
        kind = draw.random()
        if kind < 0.45 and options:
            changed[at:at] = [draw.choice(options), _word(draw)]
        elif kind < 0.6 and options:
            changed.insert(at, draw.choice(options))
        elif kind < 0.8 and at < len(changed):
            changed[at] = _word(draw)
        elif kind < 0.9 and at < len(changed):
            del changed[at]
        else:
            changed.insert(at, _word(draw))
    return changed


def _word(draw: random.Random) -> str:
    word = str(draw.choice(HOSTILE))
    return word.replace("\x00", "") if draw.random() < 0.95 else word
