"""Questions that are typed in the terminal, and how to type them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import shorten
from typing import Any

_HELP = (
    "Type a question, then one choice per line and an empty line; or all in one line: question | choice | "
    "choice.\nCtrl-D ends."
)


def ask_help(labels: Sequence[str] | None) -> str:
    """What to type, shown once."""
    if labels is None:
        return _HELP
    return f"Type a text; the {len(labels)} labels are {shorten(', '.join(labels), 200)}.\nCtrl-D ends."


def ask_row(read: Callable[[str], str], labels: Sequence[str] | None) -> dict[str, Any] | None:
    """
    A question asked for in the terminal; `None` for an empty line.

    Args:
        read (`Callable`):
            Shows a prompt and reads a line.
        labels (`Sequence[str]`, *optional*):
            The labels of the task, if all its rows share them: then a text is enough.
    """
    if labels is not None:
        text = read("Text: ").strip()
        return {"question": text, "choices": list(labels)} if text else None
    line = read("Question: ").strip()
    if "|" in line:
        question, *choices = (part.strip() for part in line.split("|"))
        return {"question": question, "choices": choices} if question else None
    choices = []
    while line:
        choice = read(f"  choice {len(choices) + 1}: ").strip()
        if not choice:
            break
        choices.append(choice)
    return {"question": line, "choices": choices} if line else None
