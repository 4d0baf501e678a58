"""
Prediction tables that were computed before, found again by what they were computed from.

A table's name is a hash of everything that decides it: the weights of adapter and base model, the sidecar (method,
prompt, letters, offset), the tokenizer, dtype and device, library versions, and the questions, options, answers and
ids of the rows. Evaluating the same checkpoint on the same rows again then needs neither the model nor torch. Anything
else is another name: there is nothing to invalidate.

`DAPPR_PREDICTION_CACHE` names another folder, or is `0` for no cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import checkpoint
from ..core.checkpoint import sha256
from ..core.errors import UserError
from ..core.files import cache_dir, write_text
from ..evaluation.prediction_table import PredictionTable
from .batching import RowSet
from .modality import bundled_folder

ENVIRONMENT = "DAPPR_PREDICTION_CACHE"
_MOST_TABLES = 2000
_COLUMNS = ("id", "question", "options", "label")
_FILES = ("*.safetensors", "config.json", "adapter_config.json", "tokenizer*.json", "*.model", checkpoint.SIDECAR)


def cache_folder() -> Path | None:
    """Where tables are kept; `None` if they are not."""
    wanted = os.environ.get(ENVIRONMENT)
    if wanted == "0" or int(os.environ.get("WORLD_SIZE", "1")) > 1:  # processes must all find the same, or all compute
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
    A hash of all that a checkpoint (or an ensemble of several) is made of; `None` if that cannot be told.

    Args:
        checkpoints (`Sequence[str]`):
            Folders or Hub ids.
        base (`str`, *optional*):
            Another place of the base model than the checkpoint names.
        sidecars (`Sequence`, *optional*):
            Folder and sidecar of each checkpoint, if they were read before.
        options:
            Of `load_checkpoint`: `dtype`, `revision`, `quantization`.
    """
    parts: list[Any] = [checkpoint.versions(), platform.machine(), _has_gpu(), json.dumps(options, sort_keys=True)]
    for folder, config in sidecars or [checkpoint.load_sidecar(name, options.get("revision")) for name in checkpoints]:
        parts.append(_contents(Path(folder)))
        if (Path(folder) / "adapter_config.json").is_file():
            home = _base_folder(base or config.get("base_model"))
            if home is None:
                return None
            parts.append(_contents(home))
    return _digest(parts)


def table_key(model: str, rows: RowSet) -> str | None:
    """The name of a table: the model's key, the rows' words, and what the table is called; `None` for images."""
    columns = getattr(rows.rows, "column_names", ())
    if not set(_COLUMNS) <= set(columns):
        return None
    return _digest([model, rows.task, rows.split, rows.meta, [list(rows.rows[name]) for name in _COLUMNS]])


def cached_tables(
    sets: Sequence[RowSet], load: Callable[[], Any], model: Callable[[], str | None], cache: bool = True
) -> list[PredictionTable]:
    """
    A table for every set: from the cache, or computed in one pass over those that are missing.

    Args:
        sets (`Sequence[RowSet]`):
            The rows, and what their tables are called.
        load (`Callable`):
            Gives what predicts (`predict_tables`); called only if something is missing.
        model (`Callable`):
            Gives the model's key.
        cache (`bool`, *optional*, defaults to `True`):
            Look and keep, or compute everything.
    """
    folder = cache_folder() if cache else None
    key = model() if folder is not None else None
    names = [table_key(key, each) if key else None for each in sets]
    found = [_get(folder, name) for name in names]
    left = [number for number, table in enumerate(found) if table is None]
    if left:
        for number, table in zip(left, load().predict_tables([sets[i] for i in left]), strict=True):
            found[number] = table
            _put(folder, names[number], table)
    return found  # type: ignore[return-value]


def _get(folder: Path | None, name: str | None) -> PredictionTable | None:
    path = folder / f"{name}.npz" if folder and name else None
    if path is None or not path.is_file():
        return None
    try:
        table = PredictionTable.load(path)
    except UserError:  # damaged, or of another version
        return None
    path.touch()
    return table


def _put(folder: Path | None, name: str | None, table: PredictionTable) -> None:
    if folder is None or name is None or table.nan_rows.any():
        return
    try:
        table.save(folder / f"{name}.npz")
        tables = sorted(folder.glob("*.npz"), key=lambda path: path.stat().st_mtime)
        for path in tables[: max(0, len(tables) - _MOST_TABLES)]:
            path.unlink(missing_ok=True)
    except (UserError, OSError):
        pass  # a full or read-only disk costs the cache, not the result


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _has_gpu() -> bool:
    """Whether the model will run elsewhere than on the CPU, told without importing torch."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and Path("/dev/nvidiactl").exists()


def _base_folder(name: str | None) -> Path | None:
    """The folder of a base model that is on this machine."""
    if name is None:
        return None
    if (bundled := bundled_folder(name)) is not None:
        return bundled
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a name that the Hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None


def _contents(folder: Path) -> list[tuple[str, str]]:
    paths = sorted({path for pattern in _FILES for path in folder.glob(pattern)})
    return [(path.name, file_hash(path)) for path in paths if path.name != "model.safetensors.index.json"]


def file_hash(path: Path) -> str:
    """SHA-256 of a file, remembered for as long as its size and date stay the same."""
    blob = path.resolve()
    stat = blob.stat()
    if stat.st_size < 1 << 20:
        return sha256(blob)
    if blob.parent.name == "blobs" and len(blob.name) == 64:  # the Hub's cache names large files by their hash
        return blob.name
    folder = cache_folder()
    note = folder / "hashes" / f"{_digest([str(blob), stat.st_size, stat.st_mtime_ns])}.txt" if folder else None
    if note is not None and note.is_file():
        return note.read_text()
    found = sha256(blob)
    if note is not None:
        with contextlib.suppress(UserError):
            write_text(note, found)
    return found


def as_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `load_checkpoint` that change numbers."""
    return {key: values[key] for key in ("dtype", "revision", "quantization") if values.get(key) is not None}
