"""The dtype of a language model's weights: what `dtype: auto` means, and what a checkpoint was trained in."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import UserError, nearest
from ..core.schemas.synonyms import dtype_name

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger(__name__)

CPU_DTYPE = "DAPPR_CPU_DTYPE"  # what `auto` means on CPUs, for machines that are to compute alike
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Instructions that multiply in bfloat16 and add in float32. oneDNN computes bfloat16 without them too, but slower than
# float32, and says so of no CPU: `torch.ops.mkldnn._is_mkldnn_bf16_supported` is true of all with AVX512.
_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")


@functools.cache
def cpu_has_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16; asked of the CPU, not measured."""
    try:
        found: Any = torch.cpu.get_capabilities()
    except (AttributeError, RuntimeError):  # an older torch, or a system that it does not know
        found = _linux_flags()
    return any(found.get(name, False) for name in _INSTRUCTIONS)


def _linux_flags() -> dict[str, bool]:
    """The flags of the first CPU in Linux's list; none where there is no such list."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            line = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return {}
    return dict.fromkeys(line.partition(":")[2].split(), True)


def best_dtype(frozen: bool = True) -> torch.dtype:
    """
    The dtype of `dtype: auto`: bfloat16 on GPUs with native support and for frozen weights on such CPUs, else float32.

    Args:
        frozen (`bool`, *optional*, defaults to `True`):
            Whether all that is trained stands beside these weights, in float32. A weight that is trained itself loses
            every update below 1/256 of its size in bfloat16.
    """
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return _cpu_dtype() if frozen else torch.float32


def _cpu_dtype() -> torch.dtype:
    given = dtype_name(os.environ.get(CPU_DTYPE) or "auto")
    if given == "auto":
        return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    if given not in ("float32", "bfloat16"):
        raise UserError(f"{CPU_DTYPE}={given!r} in the environment: give float32, bfloat16 or auto")
    return _DTYPES[given]


def resolve_dtype(name: str | torch.dtype | None, frozen: bool = True) -> torch.dtype:
    """The torch dtype of a name in a recipe; `None` means `"auto"`, see [`best_dtype`]."""
    if isinstance(name, torch.dtype):
        return name
    name = dtype_name(name) or "auto"
    if name == "auto":
        return best_dtype(frozen)
    if name not in _DTYPES:
        raise UserError(f"Unknown dtype {name!r}; {nearest(name, ['auto', *_DTYPES])}")
    return _DTYPES[name]


def trains_base(lora: LoraConfig | None) -> bool:
    """Whether training changes weights of the base model itself; `lora`: `None` trains them all."""
    if lora is None:
        return True
    tokens = getattr(lora, "trainable_token_indices", None)
    return bool(lora.modules_to_save or tokens or lora.bias != "none")


def trained_dtype(dtype: str | torch.dtype | None, config: Mapping[str, Any]) -> str | torch.dtype:
    """
    The dtype to load a checkpoint in: the one asked for, else the one that it was trained in, whatever the machine.

    Args:
        dtype (`str` or `torch.dtype`, *optional*):
            What was asked for; `"auto"` and `None` leave it to the checkpoint.
        config (`Mapping`):
            Its `uncertainty_config.json`. Without `precision` it is of a time when CPUs computed in float32 only.
    """
    if dtype is not None and dtype_name(dtype) != "auto":
        return dtype
    held = config.get("precision")
    # Of a quantised base the rest is in whatever the device is good at.
    return best_dtype(frozen=False) if held is None or "," in held else held


def warn_if_slow(dtype: torch.dtype) -> None:
    """Say that bfloat16 was asked for, or trained, on a machine without instructions for it."""
    if dtype == torch.bfloat16 and not torch.accelerator.is_available() and not cpu_has_bfloat16():
        logger.warning(
            "The model is in bfloat16, as it was trained or asked for. This CPU has no instructions for it: answers "
            "are the same, but slow. dtype float32 is faster and changes them a little."
        )


def precision(model: Any) -> str:
    """How the weights of a base model are held, such as `float32` or `bfloat16, 4bit nf4`."""
    plain = (p.dtype for name, p in model.named_parameters() if "lora_" not in name and p.is_floating_point())
    found = str(next(plain, torch.float32)).removeprefix("torch.")
    options = getattr(getattr(model, "config", None), "quantization_config", None)
    if getattr(model, "is_loaded_in_4bit", False):
        return f"{found}, 4bit {getattr(options, 'bnb_4bit_quant_type', '')}".strip()
    return f"{found}, 8bit" if getattr(model, "is_loaded_in_8bit", False) else found
