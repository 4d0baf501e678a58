"""What `dappr push` uploads: an allow-list of files, without names of this machine, scanned for secrets."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core import checkpoint
from ..core.errors import UserError
from ..core.files import read_json
from ..core.local_names import own_paths, portable, portable_values
from ..core.secrets import find_secrets
from ..decisions import gate
from ..decisions import rule as calibration
from ..decisions.gate import Gate
from ..decisions.rule import Decision
from ..evaluation.prediction_table import PredictionTable
from . import card

Contents = dict[str, bytes | str]  # name in the repository → content, or the local path of an unchanged file

_WEIGHTS = ("adapter_model.safetensors", "model.safetensors")
# Allow-list of files to upload: no pickles, no optimizer states, no logs.
_FILES = (
    "adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors", "generation_config.json",
    "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    checkpoint.SIDECAR, calibration.FILE, gate.FILE, gate.TENSORS, checkpoint.RECIPE, checkpoint.RESULTS,
    checkpoint.TRAINED_ROWS, "training_args.json", "reliability.png", "alpha0.png", "confusion.png",
)  # fmt: skip
# Settings of other libraries: only what names a place is changed there, since `</s>` or a chat template is no path.
_SETTINGS = ("config.json", "generation_config.json", "preprocessor_config.json", "tokenizer_config.json")
_PLACE = re.compile(r"(?:^|_)(?:path|dir|directory|file|folder|root|cache)s?$|name_or_path$")
_LARGEST_HEADER = 100 * 2**20  # safetensors' own limit


def collect(folder: str | Path, tables: bool = False) -> Contents:
    """
    The files to upload: name in the repository → local path, or content from which names of this machine were removed.

    Args:
        folder (`str` or `Path`):
            The checkpoint; its weights and decision rule are checked.
        tables (`bool`, *optional*, defaults to `False`):
            Include the prediction tables.
    """
    root, config = checkpoint.load_sidecar(folder)
    path = Path(root)
    _refuse_links(path, [*_FILES, checkpoint.TABLES])
    weights = [path / name for name in _WEIGHTS if (path / name).is_file()]
    if not weights:
        raise UserError(f"{folder} holds no weights ({' or '.join(_WEIGHTS)}); train it first")
    for each in weights:
        _check_weights(each)
    found: Contents = {name: str(path / name) for name in _FILES if (path / name).is_file()}
    base = card.hub_id(config.get("base_model"))
    for name, key in ((checkpoint.SIDECAR, "base_model"), ("adapter_config.json", "base_model_name_or_path")):
        if name in found:
            found[name] = _public_settings(path / name, {key: base})
    for name in _SETTINGS:
        if name in found:
            found[name] = _public_settings(path / name)
    for name in ("training_args.json", checkpoint.RESULTS):
        if name in found:
            found[name] = _json_bytes(portable_values(read_json(path / name, allow_nan=True)))
    if checkpoint.RECIPE in found:
        found[checkpoint.RECIPE] = _public_recipe(path)
    if calibration.FILE in found:
        found[calibration.FILE] = _public_decision(path)
    if gate.FILE in found:
        found |= _public_gate(path)
    if tables:
        files = sorted((path / checkpoint.TABLES).glob("*.npz"))
        _refuse_links(path / checkpoint.TABLES, [each.name for each in files])
        found |= {f"{checkpoint.TABLES}/{portable(each.name)}": _public_table(each) for each in files}
    return found


def check_contents(contents: Contents, folder: str | Path, token: str | None = None) -> None:
    """
    Refuse an upload with a secret or a path of this machine in it; a secret is named by file, line and kind only.

    Args:
        contents (`dict`):
            From [`collect`], and the card.
        folder (`str` or `Path`):
            The checkpoint: its own files are scanned too, since a secret that was left out still lies in them.
        token (`str`, *optional*):
            The token that is used for the upload.
    """
    local = own_paths(folder)
    # The card comes last: what it quotes is to be removed from the file that it quotes.
    for name, content in sorted(contents.items(), key=lambda each: (each[0] == "README.md", each[0])):
        source = Path(folder) / name
        texts = [(name, _searchable(name, content))]
        if isinstance(content, bytes) and name != "README.md" and source.is_file():
            texts.insert(0, (str(source), _searchable(name, str(source))))
        for shown, text in texts:
            secrets = find_secrets(text, [token] if token else [])
            if secrets:
                raise UserError(
                    f"{shown}, line {secrets[0].line} holds {secrets[0].kind}, so nothing is uploaded: remove it "
                    "there, and revoke it if others could read it"
                )
        for place in local:
            line = _line_of(texts[-1][1], place)
            if line:
                raise UserError(
                    f"{name}, line {line} holds a path of this machine (it begins with {place}), so nothing is "
                    "uploaded: remove it there, or train again with a relative path"
                )


def _refuse_links(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        if (folder / name).is_symlink():
            raise UserError(
                f"{folder / name} is a symbolic link, and links are not followed into an upload; put the file "
                "itself there"
            )


def _searchable(name: str, content: bytes | str) -> str:
    """The text in a file to upload; of weights their header, of tables ids and meta data."""
    if name.endswith(".npz"):
        table = _load_table(content)
        return "\n".join([json.dumps(table.meta, ensure_ascii=False, allow_nan=False), *table.ids])
    if name.endswith(".safetensors"):
        head = (
            _header(Path(content))
            if isinstance(content, str)
            else content[: 8 + int.from_bytes(content[:8], "little")]
        )
        return head.decode("utf-8", errors="replace")
    found = Path(content).read_bytes() if isinstance(content, str) else content
    return found.decode("utf-8", errors="replace")


def _line_of(text: str, place: str) -> int | None:
    """The line with a path, as it is or as JSON writes it; no other folder whose name begins alike."""
    for form in {place, json.dumps(place, allow_nan=False)[1:-1]}:
        found = re.search(re.escape(form) + r"(?![\w-])", text) if form in text else None
        if found:
            return text.count("\n", 0, found.start()) + 1
    return None


# --- weights --------------------------------------------------------------------------------------------------------


def _header(path: Path) -> bytes:
    with open(path, "rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        return handle.read(min(size, _LARGEST_HEADER))


def _check_weights(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as weights:
            names, facts = list(weights.keys()), weights.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}); train or fetch it again") from None
    if not names:
        raise UserError(f"{path} holds no weights")
    for key, value in facts.items():
        if portable(value) != value:
            raise UserError(
                f"{path}: its metadata {key!r} holds a path or name of this machine, so nothing is uploaded; save the "
                "weights without it"
            )


# --- content without names of this machine --------------------------------------------------------------------------


def _json_bytes(content: Any) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False).encode()


def _public_settings(path: Path, replaced: Mapping[str, str | None] | None = None) -> bytes | str:
    """The path of a file that names nothing of this machine, or else its content without that."""
    content = read_json(path, allow_nan=True)
    public = _public_places(content)
    for key, value in (replaced or {}).items():
        if isinstance(content, dict) and card.hub_id(content.get(key)) is None:
            public[key] = value
    return str(path) if public == content else _json_bytes(public)


def _public_places(value: Any, is_place: bool = False) -> Any:
    if isinstance(value, dict):
        return {key: _public_places(item, bool(_PLACE.search(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_public_places(item, is_place) for item in value]
    return portable(value) if is_place and isinstance(value, str) else value


def _public_recipe(folder: Path) -> bytes:
    import yaml

    content = card.raw_recipe(folder)
    content.get("data", {}).pop("root", None)
    return yaml.safe_dump(portable_values(content), sort_keys=False, allow_unicode=True).encode()


def _public_decision(folder: Path) -> bytes | str:
    """The decision rule, which has a checksum: it is written anew if it has to change."""
    decision = Decision.load(folder, checkpoint.weights_hash(folder))
    public = replace(decision, calibration_set=portable_values(decision.calibration_set))
    if public == decision:
        return str(folder / calibration.FILE)
    with tempfile.TemporaryDirectory() as place:
        return public.save(place).read_bytes()


def _public_gate(folder: Path) -> Contents:
    """The gate, checked; what it was fitted on may be called like a path of this machine."""
    own = Gate.load(folder, checkpoint.weights_hash(folder))
    public = replace(own, fitted_on=portable_values(own.fitted_on), calibrated_on=portable_values(own.calibrated_on))
    if (public.fitted_on, public.calibrated_on) == (own.fitted_on, own.calibrated_on):
        return {name: str(folder / name) for name in (gate.FILE, gate.TENSORS)}
    with tempfile.TemporaryDirectory() as place:
        public.save(place)
        return {name: (Path(place) / name).read_bytes() for name in (gate.FILE, gate.TENSORS)}


def _load_table(content: bytes | str) -> PredictionTable:
    if isinstance(content, str):
        return PredictionTable.load(content, allow_nan=True)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "table.npz").write_bytes(content)
        return PredictionTable.load(Path(place) / "table.npz", allow_nan=True)


def _public_table(path: Path) -> bytes | str:
    table = _load_table(str(path))
    ids = np.array([portable(name) for name in table.ids], dtype=str)
    meta = portable_values(table.meta)
    if np.array_equal(ids, table.ids) and meta == table.meta:
        return str(path)
    if len(np.unique(ids)) < len(ids):
        raise UserError(f"{path}: its ids are paths of this machine that end alike; push without --tables")
    with tempfile.TemporaryDirectory() as place:
        replace(table, ids=ids, meta=meta).save(Path(place) / "table.npz")
        return (Path(place) / "table.npz").read_bytes()
