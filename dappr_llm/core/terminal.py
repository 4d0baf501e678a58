"""
Text on its way to the terminal: the package's one place that prints.

Names, questions and errors come from files and repositories of others. A terminal obeys the control characters in them
(clearing the screen, changing its title, hiding text), so these are shown as escapes; secrets are masked.
"""

from __future__ import annotations

import logging
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

from .secrets import mask

# C0 and C1 controls with ESC and DEL; marks that turn the direction of text round; line and paragraph separators; lone
# surrogates, which cannot be encoded.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNSAFE = re.compile(f"[{_CONTROLS}]")
_UNSAFE_IN_LINE = re.compile(f"[{_CONTROLS}\t\n]")


def printable(text: object, one_line: bool = False) -> str:
    """
    Text in which every control character is an escape (`\\x1b`, `\\u202e`).

    Args:
        text (`object`):
            The text, or something with a text form.
        one_line (`bool`, *optional*, defaults to `False`):
            Escape tabs and line breaks too: for a name within a line or a cell.
    """
    return (_UNSAFE_IN_LINE if one_line else _UNSAFE).sub(_escape, str(text))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(match[0]) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    )


def show(text: object = "", file: TextIO | None = None) -> None:
    """
    Print text without control characters and secrets.

    Args:
        text (`object`, *optional*):
            What to print.
        file (`TextIO`, *optional*):
            The stream; stdout by default.
    """
    with _above_bars(file):
        print(printable(mask(str(text))), file=file, flush=True)


def _above_bars(file: TextIO | None) -> AbstractContextManager[object]:
    """A progress bar on the same terminal makes room for text and is drawn again below it."""
    bars = sys.modules.get("tqdm")  # not imported: there are no bars
    return bars.tqdm.external_write_mode(file or sys.stdout) if bars else nullcontext()


class MessageHandler(logging.Handler):
    """Log messages on stderr, without control characters and secrets, above any progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        try:
            show(self.format(record), sys.stderr)
        except Exception:  # as in every handler: a message that cannot be shown stops nothing
            self.handleError(record)


class PrintableFormatter(logging.Formatter):
    """Log messages, tracebacks included, without control characters and secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return printable(mask(super().format(record)))
