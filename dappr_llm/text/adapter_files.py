"""
The two files of a LoRA adapter, checked before PEFT and torch read them; a sidecar's token ids and base, compared.

An adapter may change the base model through its LoRA matrices and the modules that its config names, and through
nothing else: PEFT would load any tensor whose name is a parameter's of the base model, silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import read_json
from ..core.lora_options import check_lora_options, largest_rank
from ..core.schemas.lora_section import MOST_RANKS
from .bundled_model import public_name
from .data.items import LETTERS

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LORA = re.compile(r".*\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.weight|\.bias)?")
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
_REVISION = re.compile(r"[\w][\w./-]{0,254}")


def read_config(folder: Path) -> dict[str, Any]:
    """The `adapter_config.json` of a folder, checked; a `UserError` names the key that is not valid."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder}: no {CONFIG} in that folder, so it is not an adapter we can load")
    config = read_json(path)
    if not isinstance(config, dict):
        raise UserError(f"{path} is damaged: it holds {type(config).__name__}, not an object of settings")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{path}: peft_type is {str(kind)[:80]!r}; only LORA adapters can be loaded")
    check_lora_options(config, str(path))
    base = config.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise UserError(f"{path}: base_model_name_or_path is {str(base)[:80]!r}; it is a text")
    check_revision(config.get("revision"), path, "revision")
    return config


def check_revision(value: object, path: Path, key: str) -> None:
    """Raise a `UserError` unless there is no revision or it is one: the Hub's cache makes paths of them."""
    if value is None or (isinstance(value, str) and _REVISION.fullmatch(value) and ".." not in value):
        return
    raise UserError(f"{path}: {key} is {str(value)[:80]!r}; it is a commit, branch or tag on the Hub")


def check_adapter(folder: str | Path, values: bool = True) -> None:
    """
    Raise a `UserError` unless an adapter's files hold LoRA weights as its config describes them, and nothing else.

    Names, types and shapes are read from the header of the safetensors file; then its numbers, one tensor at a time.

    Args:
        folder (`str` or `Path`):
            With `adapter_config.json` and `adapter_model.safetensors`.
        values (`bool`, *optional*, defaults to `True`):
            Also read every number, of which none may be NaN or infinite; otherwise the header only.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder}: no {WEIGHTS} in that folder, so it is not an adapter we can load")
    config = read_config(folder)
    try:
        with safe_open(path, "pt") as weights:
            headers = {name: weights.get_slice(name) for name in sorted(weights.keys())}  # noqa: SIM118 - no mapping
            _check_header({name: (s.get_dtype(), list(s.get_shape())) for name, s in headers.items()}, config, path)
            for name in headers if values else ():
                if not bool(weights.get_tensor(name).float().isfinite().all()):
                    raise UserError(f"{path}: {name} holds NaN or infinite numbers; train the adapter again")
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {str(error).splitlines()[0]}; fetch or train the adapter again") from None


def _check_header(tensors: Mapping[str, tuple[str, list[int]]], config: Mapping[str, Any], path: Path) -> None:
    ranks = set()
    for name, (dtype, shape) in tensors.items():
        found = _LORA.fullmatch(name)
        if not found and not _is_named(name, config):
            raise UserError(
                f"{path}: {name} is a weight of the base model, or of another kind of adapter; an adapter may hold "
                "LoRA weights and what its modules_to_save names (save it with save_embedding_layers=False)"
            )
        if dtype not in _FLOATS:
            raise UserError(f"{path}: {name} holds numbers of type {dtype}; weights are floating-point numbers")
        if found and found[2] != ".bias" and found[1] != "magnitude_vector":
            ranks.add(_rank(name, found[1], shape, path))
    if not ranks:
        raise UserError(f"{path} holds no LoRA weights")
    wanted = largest_rank(config)
    if wanted > max(ranks):
        raise UserError(
            f"{path.with_name(CONFIG)} asks for rank {wanted}, but the weights in {path.name} have rank {max(ranks)} "
            "at the most; the two do not belong together"
        )


def _rank(name: str, part: str, shape: list[int], path: Path) -> int:
    """The rank of a LoRA matrix: A is [rank, in], B is [out, rank]; of a convolution with the kernel's sizes after."""
    if len(shape) < 2 or 0 in shape:
        raise UserError(f"{path}: {name} has the shape {shape}; a LoRA matrix has two dimensions")
    rank = shape[0] if part.endswith("A") else shape[1]
    if rank > MOST_RANKS:
        raise UserError(f"{path}: {name} has the shape {shape}, hence rank {rank}; at most {MOST_RANKS}")
    return rank


def _is_named(name: str, config: Mapping[str, Any]) -> bool:
    """Whether the config says that the adapter holds this weight besides its LoRA matrices."""
    module, _, parameter = name.rpartition(".")
    if parameter == "bias" and config.get("bias", "none") != "none":
        return True
    if config.get("trainable_token_indices") and name.endswith("trainable_tokens_delta"):
        return True
    parts = module.split(".")
    parents = [".".join(parts[: i + 1]) for i in range(len(parts))]
    # As PEFT matches them: "norm" also means "input_layernorm".
    return any(parent.endswith(entry) for parent in parents for entry in config.get("modules_to_save") or ())


# --- the sidecar ----------------------------------------------------------------------------------------------------


def compare_ids(sidecar: Path, config: Mapping[str, Any], key: str, own: list[int]) -> None:
    """
    Refuse a checkpoint whose tokenizer reads the answers as other tokens than those that were trained.

    Args:
        sidecar (`Path`):
            Where the sidecar is, for messages.
        config (`Mapping`):
            Its content.
        key (`str`):
            Where it keeps the token ids.
        own (`list[int]`):
            The answers' token ids by the checkpoint's tokenizer.
    """
    letters = {"letters": list(LETTERS[: len(own)])} if key == "letter_token_ids" else {}
    for name, found in {**letters, key: own}.items():
        if config.get(name) is not None and config[name] != found:
            raise UserError(
                f"{sidecar}: {name} is {str(config[name])[:80]}, but its tokenizer reads the answer letters as "
                f"{str(found)[:80]}; sidecar or tokenizer was changed: fetch the checkpoint again"
            )


def compare_extra(sidecar: Path, config: Mapping[str, Any], own: list[list[int]]) -> list[list[int]]:
    """As [`compare_ids`], for the vocabulary rows of a method's further outputs; returns them."""
    stored = config.get("extra_token_ids")
    if stored is not None and stored != own:
        raise UserError(
            f"{sidecar}: extra_token_ids is {str(stored)[:80]}, but this model and method read the rows "
            f"{str(own)[:80]}; the file was changed, or belongs to another base model: fetch the checkpoint again"
        )
    return own if stored is not None else []


def base_revision(sidecar: Path, config: Mapping[str, Any], wanted: str | None = None) -> str | None:
    """
    The commit of the base model that a checkpoint was trained on; `None` if it names none.

    Args:
        sidecar (`Path`):
            Where the sidecar is; the adapter's own config beside it may name a revision too.
        config (`Mapping`):
            Its content.
        wanted (`str`, *optional*):
            The base model to use. Another one than the checkpoint names has commits of its own.
    """
    base = config.get("base_model")
    if wanted is not None and wanted not in (base, public_name(base)):
        return None
    found = config.get("base_revision") or read_config(sidecar.parent).get("revision")
    check_revision(found, sidecar, "base_revision")
    return found
