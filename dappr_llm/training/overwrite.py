"""`--overwrite`: removes a run from its output folder, and refuses a folder that holds anything else. No torch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from ..core import checkpoint
from ..core.errors import UserError
from ..core.files import LEFTOVER, LOCK, read_json
from ..core.manifest import PARTIAL
from ..core.recipe import read_yaml

# What a run writes, beside what its manifest lists; a checkpoint's folder holds Trainer's state too.
_MODEL = (
    *("adapter_config.json", "adapter_model.safetensors", "config.json", "generation_config.json", "README.md"),
    *("model*.safetensors", "model.safetensors.index.json", "preprocessor_config.json", "chat_template.jinja"),
    *("tokenizer*.json", "*.model", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("training_args.json", checkpoint.SIDECAR, checkpoint.TRAINED_ROWS, checkpoint.MANIFEST, LEFTOVER),
)
_RUN = (
    checkpoint.RECIPE,
    checkpoint.RESULTS,
    checkpoint.TRAIN_LOG,
    "decision.json",
    "gate.json",
    "gate.safetensors",
    "*.png",
    "trainer_state.json",
    LOCK,
)
_STATE = ("trainer_state.json", "optimizer*", "scheduler*", "scaler.pt", "rng_state*", "pytorch_model_fsdp*", "latest")
_TABLE = ("*.npz", "*.items.jsonl", "*.parquet", LEFTOVER)
_LATER = (
    "report",
    "evaluations",
    "audits",
    "answers",
    "tables",
    "runs",
)  # of later commands and of TensorBoard: left alone
_CHECKPOINT = re.compile(r"checkpoint-\d+")


def remove_run(folder: Path) -> None:
    """
    Remove what a run wrote; a `UserError`, and nothing removed, if that is not all there is.

    Args:
        folder (`Path`):
            The output folder of an older run.
    """
    _refuse_place(folder)
    content = read_yaml(folder / checkpoint.RECIPE)
    if not {"data", "method"} <= set(content):
        raise UserError(f"{folder} holds no run of ours: its {checkpoint.RECIPE} has no data or no method")
    foreign = next(_foreign(folder), None)
    if foreign is not None:
        raise UserError(
            f"--overwrite: {foreign} was not written by a run of ours; move it away, or choose another "
            "train.output_dir"
        )
    # The recipe last: without it the folder would not be recognised as a run after an interruption.
    for entry in sorted(folder.iterdir(), key=lambda path: path.name == checkpoint.RECIPE):
        if entry.is_dir() and entry.name not in _LATER:
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.is_file() and entry.name != LOCK:
            entry.unlink(missing_ok=True)


def _refuse_place(folder: Path) -> None:
    """Refuse links, and folders below which people keep more than a run."""
    if folder.is_symlink():
        raise UserError(f"--overwrite: {folder} is a link; name the folder that it points to")
    place = folder.resolve()
    for kept in (Path.cwd(), Path.home()):
        if kept.resolve().is_relative_to(place):
            raise UserError(f"--overwrite: {folder} holds {kept}; give train.output_dir a folder of its own")


def _foreign(folder: Path) -> Iterator[Path]:
    """The entries of a run's folder that no run of ours writes."""
    own = (*_MODEL, *_RUN, *_listed(folder))
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink() or not (entry.is_dir() or entry.is_file()):
            yield entry
        elif entry.is_file():
            if not _is_one_of(entry.name, own):
                yield entry
        elif _CHECKPOINT.fullmatch(entry.name):
            yield from _others(entry, (*_MODEL, *_STATE, *_listed(entry)))
        elif entry.name in (checkpoint.TABLES, checkpoint.BASELINES):
            yield from _others(entry, _TABLE)
        elif entry.name not in _LATER and not fnmatchcase(entry.name, f".*{PARTIAL}"):
            yield entry


def _others(folder: Path, own: tuple[str, ...]) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or (not path.is_dir() and not (path.is_file() and _is_one_of(name, own))):
            yield path


def _is_one_of(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listed(folder: Path) -> list[str]:
    """The files that a manifest lists, as patterns; none if there is no readable one."""
    try:
        files = read_json(folder / checkpoint.MANIFEST)["files"]
        return [re.sub(r"([*?[])", r"[\1]", name) for name in files if isinstance(name, str)]
    except (UserError, KeyError, TypeError):
        return []
