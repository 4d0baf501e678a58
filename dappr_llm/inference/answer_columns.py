"""Files of answers: our columns beside the user's own, which keep their order; as JSONL, CSV or Parquet."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeAlias

from ..core.csv_files import write_csv
from ..core.files import atomic_write

OwnRow: TypeAlias = Mapping[str, Any]
COLUMNS = ("id", "answer", "letter", "choices", "probs", "alpha", "aleatoric", "epistemic", "prediction_set",
            "abstain", "density", "familiarity", "label", "correct")  # fmt: skip
SUFFIX = "_given"  # of a column of the user's that is called like one of ours
_CHUNK = 10_000  # rows of one Parquet row group
# Type of a Parquet column by the types of its values in JSON; any other mixture is written as text.
_TYPES = {("bool",): "bool", ("int",): "int64", ("float",): "float64", ("float", "int"): "float64"}


def merged(own: OwnRow, answer: Mapping[str, Any]) -> dict[str, Any]:
    """
    One record: the user's columns, then ours.

    Args:
        own (`Mapping`):
            The user's row.
        answer (`Mapping`):
            Our columns, of which some may be missing.
    """
    names = {*COLUMNS, *own}
    found: dict[str, Any] = {}
    for name, value in own.items():
        new = str(name)
        while new in COLUMNS or (new != name and new in names) or new in found:
            new += SUFFIX
        found[new] = _json_value(value)
    return {**found, **answer}


def _json_value(value: Any) -> Any:
    """A value that JSON can hold; NaN is nothing, dates and the like are texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    return str(value)


def own_columns(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """
    The user's columns in records, in their order, with Arrow's names of their types.

    Args:
        records (`Iterable[Mapping]`):
            From [`merged`].
    """
    kinds: dict[str, set[str]] = {}
    for record in records:
        for name, value in record.items():
            if name not in COLUMNS:
                own = kinds.setdefault(name, set())
                if value is not None:
                    own.add(_kind(value))
    return {name: _TYPES.get(tuple(sorted(own)), "string") for name, own in kinds.items()}


def _kind(value: Any) -> str:
    big = isinstance(value, int) and not -(2**63) <= value < 2**63
    return "text" if big else type(value).__name__


def _plain(value: Any, kind: str | None) -> Any:
    """A value for a column of that type; `None` for columns of ours, which are as they should be."""
    if kind != "string" or value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def write_records(records: Callable[[], Iterator[dict[str, Any]]], out: Path) -> None:
    """
    Write answers to a file, in the format that its name says.

    Args:
        records (`Callable`):
            Starts an iteration over the records of [`merged`]; there may be more of them than fit into memory.
        out (`Path`):
            The file, which is there when all is written.
    """
    with atomic_write(out) as handle:
        kind = out.suffix.lower()
        if kind == ".jsonl":
            for record in records():
                handle.write((json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode())
        elif kind == ".csv":
            _write_csv(records, handle)
        else:
            _write_parquet(records, handle)


def _write_csv(records: Callable[[], Iterator[dict[str, Any]]], handle: IO[bytes]) -> None:
    text = io.TextIOWrapper(handle, encoding="utf-8", newline="", write_through=True)
    names = [*own_columns(records()), *COLUMNS]
    write_csv(text, names, ([_csv_value(record.get(name)) for name in names] for record in records()))
    text.detach()


def _csv_value(value: Any) -> Any:
    """Lists as JSON, so that readers can parse them."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, list | dict) else value


def _write_parquet(records: Callable[[], Iterator[dict[str, Any]]], handle: IO[bytes]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts, numbers = pa.list_(pa.string()), pa.list_(pa.float64())
    kinds = [pa.string()] * 3 + [
        texts,
        numbers,
        numbers,
        pa.float64(),
        pa.float64(),
        texts,
        pa.bool_(),
        pa.float64(),
        pa.float64(),
        pa.int64(),
        pa.bool_(),
    ]
    own = own_columns(records())
    schema = pa.schema(
        [*((name, pa.type_for_alias(kind)) for name, kind in own.items()), *zip(COLUMNS, kinds, strict=True)]
    )
    left = records()
    with pq.ParquetWriter(handle, schema) as writer:
        while chunk := list(islice(left, _CHUNK)):
            columns = {name: [_plain(record.get(name), own.get(name)) for record in chunk] for name in schema.names}
            writer.write_table(pa.table(columns, schema=schema))
