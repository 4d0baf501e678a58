"""Import of LoRA adapters of causal LMs trained with other software: adds prompt template, letters and method."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from ..core import checkpoint
from ..core.errors import UserError
from .card import save_card

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def adopt(
    adapter: str,
    out: str | Path,
    base_model: str | None = None,
    method: str = "ce",
    num_choices: int = 4,
    prompt: Mapping[str, str] | None = None,
    max_length: int = 300,
    revision: str | None = None,
) -> Path:
    """
    Write a checkpoint folder around an existing adapter; its own files are copied unchanged.

    Args:
        adapter (`str`):
            Folder or Hub id of the adapter (safetensors only).
        out (`str` or `Path`):
            The folder to write; must not exist, or be empty.
        base_model (`str`, *optional*):
            Its base model; by default the one in its `adapter_config.json`.
        method (`str`, *optional*, defaults to `"ce"`):
            The method that turns its logits into probabilities and uncertainties.
        num_choices (`int`, *optional*, defaults to 4):
            K, the number of answer letters it was trained on.
        prompt (`Mapping`, *optional*):
            Fields of `dappr_llm.text.prompt.Prompt` that differ from its defaults; use the prompt it was trained with.
        max_length (`int`, *optional*, defaults to 300):
            Maximal number of tokens of a prompt.
        revision (`str`, *optional*):
            Commit, branch or tag of an adapter on the Hub.
    """
    from ..methods import get_method
    from .modality import adapter_backend

    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; give another folder with --out")
    source = _find(adapter, revision)
    chosen = get_method(method)
    backend = adapter_backend(source, base_model, chosen, num_choices, dict(prompt or {}), max_length)
    out.mkdir(parents=True, exist_ok=True)
    for name in _ADAPTER:
        shutil.copyfile(source / name, out / name)
    backend.save_processor(out)
    config = {"method": {"name": method, "options": chosen.options()}, **backend.config()}
    save_card(out, config)
    checkpoint.save_sidecar(out, config)  # last: its presence makes the folder a checkpoint
    return out


def _find(adapter: str, revision: str | None) -> Path:
    source = Path(checkpoint.local_folder(adapter, revision))
    for name in _ADAPTER:
        if not (source / name).is_file():
            raise UserError(f"{adapter}: no {name} there, so it is not an adapter we can load (safetensors only)")
    return source
