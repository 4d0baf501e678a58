"""Raw rows from the Hub, a local copy of a Hub dataset, or a file, each with its place (file and line) for errors."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from ...core.errors import UserError
from ...core.hub_revisions import dataset_to_load

SUFFIXES = (".jsonl.gz", ".jsonl", ".json.gz", ".json", ".csv", ".tsv", ".parquet")
Row = tuple[str, dict[str, Any]]  # (place, row)


def is_data_file(path: str | Path) -> bool:
    """Whether a path ends in one of `SUFFIXES`, hence is a data file and not a Hub id."""
    return str(path).lower().endswith(SUFFIXES)


def read_file(path: str | Path) -> Iterator[Row]:
    """
    Iterate over the rows of a JSONL, JSON, CSV, TSV or Parquet file (JSON may be gzipped).

    Args:
        path (`str` or `Path`):
            The file.

    Returns:
        An iterator of `(place, row)`; the place is file and line.
    """
    path = Path(path)
    name = path.name.lower()
    if not is_data_file(path):
        raise UserError(f"{path}: unknown kind of file; use one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        if name.endswith(".parquet"):
            yield from _read_parquet(path)
        elif name.endswith((".csv", ".tsv")):
            with path.open(encoding="utf-8-sig", newline="") as lines:
                yield from _read_csv(path, lines, "\t" if name.endswith(".tsv") else ",")
        else:
            with _open_text(path) as lines:
                yield from _read_json(path, lines) if ".jsonl" not in name else _read_jsonl(path, lines)
    except (gzip.BadGzipFile, EOFError):
        raise UserError(f"{path}: the gzip file is damaged or cut short") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except PermissionError:
        raise UserError(f"{path}: no permission to read it") from None


def _open_text(path: Path) -> TextIO:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")  # type: ignore[return-value]
    return path.open(encoding="utf-8-sig")


def _read_jsonl(path: Path, lines: TextIO) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: not valid JSON ({error.msg}, column {error.colno})") from None
        except (ValueError, RecursionError):
            raise UserError(f"{place}: JSON that is nested too deeply, or a number too long") from None
        yield place, _as_row(row, place)


def _read_json(path: Path, lines: TextIO) -> Iterator[Row]:
    try:
        rows = json.load(lines)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from None
    except RecursionError:
        raise UserError(f"{path}: JSON that is nested too deeply") from None
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected a JSON list of rows (or name the file .jsonl, one object per line)")
    for number, row in enumerate(rows, start=1):
        place = f"{path}, row {number}"
        yield place, _as_row(row, place)


def _as_row(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{place}: expected a JSON object, found {type(row).__name__}")
    return row


def _read_csv(path: Path, lines: TextIO, delimiter: str) -> Iterator[Row]:
    reader = csv.DictReader(lines, delimiter=delimiter)
    try:
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            if None in row:
                raise UserError(f"{place}: more fields than the header has columns")
            yield place, row
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not valid CSV ({error})") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None


def find_local(root: str | Path, path: str, config: str | None, split: str) -> Path:
    """
    The file of one split in a local folder with copies of Hub datasets.

    Searches `<root>/<name>/[<config>/]<split>.<suffix>`, with or without the organisation before the name, and the
    Hub's own `<split>-00000-of-00001.parquet`.

    Args:
        root (`str` or `Path`):
            The folder with the copies.
        path (`str`):
            Hub id of the dataset.
        config (`str`, *optional*):
            Hub configuration.
        split (`str`):
            The dataset's name of the split.
    """
    root = Path(root)
    if not root.is_dir():
        raise UserError(f"{root}: the data root is not a folder")
    bases = [root / path, root / path.split("/")[-1]]
    folders = [folder for base in bases for folder in ([base / config] if config else []) + [base, base / "data"]]
    for folder in folders:
        for suffix in SUFFIXES:
            if (folder / f"{split}{suffix}").is_file():
                return folder / f"{split}{suffix}"
        shards = sorted(folder.glob(f"{split}-00000-of-00001.parquet"))
        if shards:
            return shards[0]
    looked = root / path.split("/")[-1] / (config or "")
    raise UserError(
        f"No {split!r} split of {path} under {root}; expected for example {looked / (split + '.jsonl.gz')}"
    )


def read_hub(path: str, config: str | None, split: str, revision: str | None = None) -> Iterator[Row]:
    """Iterate over `(place, row)` of a Hub dataset (or its local cache), without running its loading script."""
    import datasets

    try:
        wanted = dataset_to_load(path, revision)
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(path, config, split=split, revision=wanted)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"Could not load {path}{f' ({config})' if config else ''}, split {split!r}, from the Hub: {first}. "
            "Check the name and the network, or point data.root (--data-root, DAPPR_DATA_ROOT) at a local copy"
        ) from None
    for number, row in enumerate(rows):
        yield f"{path}{f' ({config})' if config else ''}, {split}, row {number}", row
