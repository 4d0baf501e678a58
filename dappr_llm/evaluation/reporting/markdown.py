"""Markdown tables, for reports, model cards and comparison tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_RULES = {"l": "---", "r": "---:", "c": ":---:"}


def escape_cell(text: str) -> str:
    """Escapes only what would end a table cell or row; other Markdown in the text stays markup."""
    return text.replace("|", "\\|").replace("\n", " ")


def escape_text(text: str) -> str:
    """Escapes all Markdown, so that the text is shown literally, on one line."""
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
    A Markdown table, without a trailing newline.

    Args:
        header (`Sequence[str]`): Column headers.
        rows (`Iterable[Sequence[str]]`): Cells of each row, as many as headers.
        align (`str`, *optional*): A letter per column: `l`, `r` or `c`. By default the first is left-aligned and the
            others are right-aligned, as numbers are.
        escape (`Callable`, *optional*): [`escape_cell`] by default, or [`escape_text`] for text from the user's data.
    """
    align = align or "l" + "r" * (len(header) - 1)
    lines = [list(map(escape, header)), [_RULES[letter] for letter in align]]
    lines += [list(map(escape, row)) for row in rows]
    if wrong := [line for line in lines if len(line) != len(header)]:
        raise ValueError(f"a table of {len(header)} columns has a row of {len(wrong[0])}: {wrong[0]}")
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
