"""Checks of datasets that do not depend on text or images."""

from __future__ import annotations

from typing import Any


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterable-style: it can be read from its start only and has no length; `None` is not."""
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__len__")
