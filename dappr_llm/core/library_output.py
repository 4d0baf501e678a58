"""What other libraries print: progress bars in terminals only, and no warnings that nobody can act on."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Logger of a library → how a message begins that is of no use: bitsandbytes, which PEFT imports whether or not a model
# is quantised, misses a kernel for 4-bit weights on CPUs.
_USELESS = {"bitsandbytes.backends.cpu.ops": ("Failed to load CPU gemm_4bit_forward",)}


class _Without(logging.Filter):
    """Drops the messages that begin in one of some ways."""

    def __init__(self, beginnings: tuple[str, ...]):
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is kept."""
        return not record.getMessage().startswith(self.beginnings)


def drop_useless_messages() -> None:
    """Drop the messages of `_USELESS`, and no others of these loggers; calling it again changes nothing."""
    for name, beginnings in _USELESS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(found, _Without) for found in logger.filters):
            logger.addFilter(_Without(beginnings))


def in_terminal() -> bool:
    """Whether stderr, where bars are drawn, is a terminal."""
    return bool(sys.stderr and sys.stderr.isatty())


def hide_bars_in_files() -> None:
    """For a whole process that has not imported tqdm yet: no bars unless stderr is a terminal."""
    if not in_terminal():
        os.environ.setdefault("TQDM_DISABLE", "1")


@contextmanager
def no_bars_in_files() -> Iterator[None]:
    """Without transformers' progress bars, `Loading weights` among them, unless stderr is a terminal."""
    from transformers.utils import logging as library

    if in_terminal() or not library.is_progress_bar_enabled():
        yield
        return
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.enable_progress_bar()
