"""pandas DataFrames wherever rows are taken, without importing pandas."""

from __future__ import annotations

from typing import Any


def as_rows(data: Any) -> Any:
    """A pandas DataFrame as a list of rows, with `None` for what is missing; anything else as it is."""
    if type(data).__module__.split(".")[0] != "pandas" or not hasattr(data, "columns"):
        return data
    columns = {str(name): [_plain(value) for value in data[name].tolist()] for name in data.columns}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _plain(value: Any) -> Any:
    """A cell; pandas has three ways to say that nothing is there, of which two are not even equal to themselves."""
    if value is None or type(value).__name__ in ("NAType", "NaTType") or isinstance(value, float) and value != value:
        return None
    return value.tolist() if hasattr(value, "tolist") else value
