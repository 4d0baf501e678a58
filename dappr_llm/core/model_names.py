"""The name of the bundled model, and names that are meant to be it."""

from __future__ import annotations

import difflib
from pathlib import Path

BUNDLED = "smollm2-135m"
_ALIKE = 0.7  # of difflib's ratio: "smollm2" and "smollm-135" are, "gpt2" and "bert-base-uncased" are not


def misspelt(name: str) -> str:
    """
    What is wrong with a name that is like the bundled model's; empty for that name, folders and all other names.

    A name with an owner (`owner/name`) is one of the Hub, which says itself if it does not know it.
    """
    if name == BUNDLED or "/" in name or "\\" in name or Path(name[:200]).exists():
        return ""
    alike = difflib.SequenceMatcher(None, name[:200].lower(), BUNDLED).ratio()
    return (
        f"no folder and no Hub id (owner/name); did you mean {BUNDLED!r}, the bundled model?" if alike > _ALIKE else ""
    )
