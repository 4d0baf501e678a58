"""
On-disk cache of prediction tables, addressed by a hash of their inputs.

The hash covers everything that determines a table: the weights of adapter and base model (every file of them), the
sidecar (method, prompt, letters, offset), the tokenizer, dtype and device, library versions, and the questions,
options, labels and ids of the rows. Evaluating the same checkpoint on the same rows again needs neither the model nor
torch. Any change gives another hash, so entries never have to be invalidated; the least recently used are deleted. An
entry is used only if it holds the ids, labels and numbers of options that are asked for, and the folder is open to its
owner alone: whoever could write there could answer for every model.

The environment variable `DAPPR_PREDICTION_CACHE` names another folder; `0` turns the cache off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import checkpoint
from ..core.checkpoint import sha256
from ..core.errors import UserError
from ..core.files import cache_dir, write_text
from ..decisions import gate
from ..evaluation.prediction_table import PredictionTable
from .batching import RowSet
from .modality import base_of, bundled_folder

if TYPE_CHECKING:
    from .ensemble import EnsemblePredictor
    from .table_predictor import TablePredictor

logger = logging.getLogger(__name__)

ENVIRONMENT = "DAPPR_PREDICTION_CACHE"
_MOST_TABLES = 2000
_ARRAYS = 2  # counts on when tables hold more arrays than before, so that older entries are predicted again
_COLUMNS = ("id", "question", "options", "label")
# Weights in every format that transformers reads, their indices, and all that makes tokens of a text.
_FILES = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.index.json"),
    *("config.json", "adapter_config.json", checkpoint.SIDECAR, gate.FILE),
    *("tokenizer*", "*.model", "*.tiktoken", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
)
_LARGE = 1 << 20  # bytes from which on the hash of a file is remembered
_HASHES: dict[str, str] = {}  # those of this process, also where the cache is off
_SETTLED = 2.0  # seconds after its last change before a file's hash is remembered


def cache_folder() -> Path | None:
    """Folder of the cache; `None` if it is off."""
    wanted = os.environ.get(ENVIRONMENT)
    if wanted == "0" or int(os.environ.get("WORLD_SIZE", "1")) > 1:  # all ranks must hit or miss alike
        return None
    if wanted:
        return Path(wanted)
    return cache_dir() / "predictions"


def model_key(
    checkpoints: Sequence[str],
    base: str | None = None,
    sidecars: Sequence[tuple[str, dict[str, Any]]] | None = None,
    **options: Any,
) -> str | None:
    """
    Hash of a checkpoint, or of several of an ensemble, and its base model; `None` if the latter is not found locally.

    Args:
        checkpoints (`Sequence[str]`):
            Folders or Hub ids.
        base (`str`, *optional*):
            Name or path of the base model, if not the one that the checkpoint names.
        sidecars (`Sequence`, *optional*):
            Folder and sidecar of each checkpoint, if they are already loaded.
        options:
            Arguments of `load_checkpoint` that change predictions: `dtype`, `revision`, `quantization`.
    """
    parts: list[Any] = [
        _ARRAYS,
        checkpoint.versions(),
        platform.machine(),
        _has_gpu(),
        json.dumps(options, sort_keys=True, allow_nan=False),
    ]
    for folder, config in sidecars or [checkpoint.load_sidecar(name, options.get("revision")) for name in checkpoints]:
        parts.append(_contents(Path(folder)))
        if (Path(folder) / "adapter_config.json").is_file():
            home = base_folder(*base_of(Path(folder), config, base))
            if home is None:
                return None
            parts.append(_contents(home))
    return _digest(parts)


def table_key(model: str, rows: RowSet) -> str | None:
    """Hash of a table: model key, item texts, labels and meta data; `None` for images, which are not cached."""
    columns = getattr(rows.rows, "column_names", ())
    if not set(_COLUMNS) <= set(columns):
        return None
    return _digest([model, rows.task, rows.split, rows.meta, [list(rows.rows[name]) for name in _COLUMNS]])


def cached_tables(
    sets: Sequence[RowSet],
    load: Callable[[], TablePredictor | EnsemblePredictor],
    model: Callable[[], str | None],
    cache: bool = True,
) -> list[PredictionTable]:
    """
    One table per row set, from the cache where possible; all others are predicted together.

    Args:
        sets (`Sequence[RowSet]`):
            The row sets.
        load (`Callable`):
            Loads the predictor; called only if a table is missing.
        model (`Callable`):
            Returns the model's hash, see [`model_key`]; called only if the cache is on.
        cache (`bool`, *optional*, defaults to `True`):
            Read and write the cache; otherwise predict everything.
    """
    folder = _private(cache_folder()) if cache else None
    key = model() if folder is not None else None
    names = [table_key(key, each) if key else None for each in sets]
    found = [_get(folder, name, rows) for name, rows in zip(names, sets, strict=True)]
    left = [number for number, table in enumerate(found) if table is None]
    if left:
        for number, table in zip(left, load().predict_tables([sets[i] for i in left]), strict=True):
            found[number] = table
            _put(folder, names[number], table)
    return found  # type: ignore[return-value]


def _get(folder: Path | None, name: str | None, rows: RowSet) -> PredictionTable | None:
    path = folder / f"{name}.npz" if folder and name else None
    if path is None or not path.is_file():
        return None
    try:
        table = PredictionTable.load(path)
    except UserError:  # damaged, or written by another version
        return None
    if not _answers(table, rows):
        return None
    path.touch()  # entries are deleted by age
    return table


def _answers(table: PredictionTable, rows: RowSet) -> bool:
    """Whether a table holds these rows: the name of an entry says so, but anybody can rename a file."""
    wanted = {name: list(rows.rows[name]) for name in _COLUMNS}
    return (
        table.ids.tolist() == [str(each) for each in wanted["id"]]
        and table.labels.tolist() == [int(each) for each in wanted["label"]]
        and table.num_options.tolist() == [len(each) for each in wanted["options"]]
        and (table.meta.get("task"), table.meta.get("split")) == (rows.task, rows.split)
    )


def _put(folder: Path | None, name: str | None, table: PredictionTable) -> None:
    if folder is None or name is None or table.nan_rows.any():
        return
    try:
        table.save(folder / f"{name}.npz")
        tables = sorted(folder.glob("*.npz"), key=lambda path: path.stat().st_mtime)
        for path in tables[: max(0, len(tables) - _MOST_TABLES)]:
            path.unlink(missing_ok=True)
    except (UserError, OSError):
        pass  # with a full or read-only disk, only the cache entry is lost


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str, allow_nan=False).encode()).hexdigest()


def _has_gpu() -> bool:
    """Whether the model will run on a GPU, determined without importing torch."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and Path("/dev/nvidiactl").exists()


def base_folder(name: str | None, revision: str | None = None) -> Path | None:
    """Local folder of a base model: bundled, a path, or in the Hub's cache; `None` if there is none."""
    if name is None:
        return None
    if (bundled := bundled_folder(name)) is not None:
        return bundled
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # not a valid Hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def _private(folder: Path | None) -> Path | None:
    """The folder of the cache, open to its owner alone; `None` if that cannot be had, which turns the cache off."""
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        if hasattr(os, "getuid") and found.st_uid != os.getuid():
            logger.warning(f"{folder} belongs to somebody else and is not used; name another in {ENVIRONMENT}")
            return None
        if found.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError:
        return None
    return folder


def _contents(folder: Path) -> list[tuple[str, str]]:
    """Name and hash of every file that changes predictions."""
    paths = sorted({path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()})
    return [(path.name, file_hash(path)) for path in paths]


def contents_hash(folder: Path) -> str:
    """One hash of all files of a folder that change predictions."""
    return _digest(_contents(folder))


def file_hash(path: Path) -> str:
    """
    SHA-256 of a file; that of a large one is remembered until the file is written to or replaced.

    It is found again by inode and time of change (ctime) besides path, size and time of modification. Programs can set
    the latter back after a change, but not the ctime, which the kernel sets at every write, and another file in its
    place has another inode. A file that changed a moment ago is hashed again next time, since a second write within
    one tick of the clock would leave its ctime as it is.
    """
    blob = path.resolve()
    stat = blob.stat()
    if stat.st_size < _LARGE:
        return sha256(blob)
    name = _digest([str(blob), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    folder = _private(cache_folder())
    note = folder / "hashes" / f"{name}.txt" if folder else None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if note is not None and note.is_file() and re.fullmatch("[0-9a-f]{64}", found := note.read_text()):
            return found
    if name in _HASHES:
        return _HASHES[name]
    found = sha256(blob)
    if time.time() - stat.st_ctime > _SETTLED and blob.stat().st_ctime_ns == stat.st_ctime_ns:
        _HASHES[name] = found
        if note is not None:
            with contextlib.suppress(UserError, OSError):
                write_text(note, found)
    return found


def as_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `load_checkpoint` that change predictions, without those that are `None`."""
    return {key: values[key] for key in ("dtype", "revision", "quantization", "gate") if values.get(key) is not None}
