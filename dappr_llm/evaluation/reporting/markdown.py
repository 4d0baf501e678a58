"""Tables in Markdown, for reports, model cards and result pages alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_RULES = {"l": "---", "r": "---:", "c": ":---:"}


def escape_cell(text: str) -> str:
    """Text that may hold markup of its own: only what would end its cell or row is escaped."""
    return text.replace("|", "\\|").replace("\n", " ")


def escape_text(text: str) -> str:
    """Plain text on one line: shown letter by letter, whatever it holds."""
    for mark in "\\|`*_<>[]":
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())


def markdown_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    align: str | None = None,
    escape: Callable[[str], str] = escape_cell,
) -> str:
    """
    A table, without a newline at its end.

    Args:
        header (`Sequence[str]`): Heads of the columns.
        rows (`Iterable[Sequence[str]]`): As many cells each.
        align (`str`, *optional*): A letter per column: `l`, `r` or `c`. By default the first is left-aligned and the
            others are right-aligned, as numbers are.
        escape (`Callable`, *optional*): [`escape_cell`] by default, or [`escape_text`] for words of others.
    """
    align = align or "l" + "r" * (len(header) - 1)
    lines = [list(map(escape, header)), [_RULES[letter] for letter in align]]
    lines += [list(map(escape, row)) for row in rows]
    if wrong := [line for line in lines if len(line) != len(header)]:
        raise ValueError(f"a table of {len(header)} columns has a row of {len(wrong[0])}: {wrong[0]}")
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
