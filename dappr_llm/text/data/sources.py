"""Raw rows from the Hub, a local copy of a Hub dataset, or a file, each with its place (file and line) for errors."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from ...core.errors import UserError, nearest
from ...core.hub_revisions import dataset_to_load

SUFFIXES = (".jsonl.gz", ".jsonl", ".json.gz", ".json", ".csv", ".tsv", ".parquet")
Row = tuple[str, dict[str, Any]]  # (place, row)
_DEFAULT = "utf-8-sig"  # UTF-8, with or without a mark at its start
_ENCODINGS = ("utf-8", "utf-16", "latin-1", "cp1252", "shift_jis", "gb18030")
_LONGEST_FIELD = 10_000_000  # characters; Python's csv refuses more than 131,072 unless told
_SEPARATORS = ",;\t|"


def is_data_file(path: str | Path) -> bool:
    """Whether a path ends in one of `SUFFIXES`, hence is a data file and not a Hub id."""
    return str(path).lower().endswith(SUFFIXES)


def read_file(path: str | Path, encoding: str | None = None, class_names: bool = False) -> Iterator[Row]:
    """
    Iterate over the rows of a JSONL, JSON, CSV, TSV or Parquet file (JSON may be gzipped).

    Args:
        path (`str` or `Path`):
            The file. Fields of a CSV file may be separated by commas, semicolons, tabs or bars.
        encoding (`str`, *optional*):
            How a text file is encoded; by default UTF-8.
        class_names (`bool`, *optional*, defaults to `False`):
            Give the names of classes instead of their numbers, where a Parquet file of the Hub has them.

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
            yield from _read_parquet(path, class_names)
            return
        with _open_text(path, _known(encoding)) as lines:
            if name.endswith((".csv", ".tsv")):
                yield from _read_csv(path, lines, "\t" if name.endswith(".tsv") else None)
            else:
                yield from _read_json(path, lines) if ".jsonl" not in name else _read_jsonl(path, lines)
    except (gzip.BadGzipFile, EOFError):
        raise UserError(f"{path}: the gzip file is damaged or cut short") from None
    except UnicodeError:
        raise _wrong_encoding(path, encoding) from None
    except PermissionError:
        raise UserError(f"{path}: no permission to read it") from None


def _known(encoding: str | None) -> str:
    try:
        found = codecs.lookup(encoding or _DEFAULT)
        "".encode(found.name)  # refuses codecs that are none of text, such as hex
    except LookupError:
        raise UserError(f"Unknown encoding {encoding!r}; {nearest(encoding, _ENCODINGS)}") from None
    return _DEFAULT if found.name == "utf-8" else found.name


def _open_text(path: Path, encoding: str) -> TextIO:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding=encoding)  # type: ignore[return-value]
    with path.open("rb") as file:
        start = file.read(4096)
    # ASCII text in UTF-16 is valid UTF-8 too, with a zero after every character.
    if encoding == _DEFAULT and b"\0" in start:
        raise _wrong_encoding(path, None)
    return path.open(encoding=encoding, newline="" if path.name.lower().endswith((".csv", ".tsv")) else None)


def _wrong_encoding(path: Path, encoding: str | None) -> UserError:
    """Names the encoding that a file seems to have, and how to say so or to convert it."""
    if encoding is not None:
        return UserError(f"{path}: not {encoding} text, as `encoding` says; remove it, or name the right one")
    with path.open("rb") as file:
        start = file.read(4096)
    wide = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or b"\0" in start
    looks = "utf-16" if wide else "latin-1"
    shown = "UTF-16" if wide else "Latin-1 or Windows-1252 (cp1252)"
    return UserError(
        f"{path}: not UTF-8 text, it looks like {shown}; add `encoding: {looks}` to the description of the data "
        f"(data.train: {{path: {path.name}, encoding: {looks}}}; --encoding {looks}), or convert the file: "
        f"iconv -f {looks} -t utf-8 {path.name} > utf8-{path.name}"
    )


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


def _read_csv(path: Path, lines: TextIO, delimiter: str | None) -> Iterator[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))
    if delimiter is None:
        delimiter = _separator(lines.readline())
        lines.seek(0)
    reader = csv.DictReader(lines, delimiter=delimiter)
    try:
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            if None in row:
                raise UserError(f"{place}: more fields than the header has columns")
            yield place, row
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not valid CSV ({error})") from None


def _separator(header: str) -> str:
    """What separates the names of the columns: the mark that is most frequent outside quotes, a comma if none is."""
    counts = Counter(mark for part in header.split('"')[::2] for mark in part if mark in _SEPARATORS)
    return max(_SEPARATORS, key=lambda mark: counts[mark])


def _read_parquet(path: Path, class_names: bool) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = _class_names(file.schema_arrow.metadata) if class_names else {}
        number = 0
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", _decoded(row, names) if names else row
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None


def _class_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, list[str]]:
    """Names of the classes of each `ClassLabel` column, from the metadata that `datasets` writes into Parquet."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return {
            column: [str(name) for name in feature["names"]]
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and "names" in feature
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _decoded(row: dict[str, Any], names: Mapping[str, list[str]]) -> dict[str, Any]:
    """A row with the names of its classes instead of their numbers; -1 stands for no label."""
    found = {}
    for column, of_class in names.items():
        value = row.get(column)
        if isinstance(value, int):
            found[column] = of_class[value] if 0 <= value < len(of_class) else None
    return {**row, **found}


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


def read_hub(
    path: str, config: str | None, split: str, revision: str | None = None, class_names: bool = False
) -> Iterator[Row]:
    """
    Iterate over `(place, row)` of a Hub dataset (or its local cache), without running its loading script.

    Args:
        path, config, split, revision:
            Hub id, configuration, split, and commit or tag.
        class_names (`bool`, *optional*, defaults to `False`):
            Give the names of classes instead of their numbers.
    """
    import datasets

    try:
        wanted = dataset_to_load(path, revision)
        rows: Any = datasets.load_dataset(path, config, split=split, revision=wanted)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"Could not load {path}{f' ({config})' if config else ''}, split {split!r}, from the Hub: {first}. "
            "Check the name and the network, or point data.root (--data-root, DAPPR_DATA_ROOT) at a local copy"
        ) from None
    features = rows.features.items() if class_names else ()
    names = {column: list(kind.names) for column, kind in features if isinstance(kind, datasets.ClassLabel)}
    for number, row in enumerate(rows):
        place = f"{path}{f' ({config})' if config else ''}, {split}, row {number}"
        yield place, _decoded(row, names) if names else row
