"""Which of several launched processes writes files and prints. No torch."""

from __future__ import annotations

import os


def is_main_process() -> bool:
    """Whether this process has rank 0; the launcher says so before any process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def say(text: str) -> None:
    """Print on rank 0 only."""
    if is_main_process():
        print(text, flush=True)
