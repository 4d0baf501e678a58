"""
Checks of LoRA options that others wrote: those of an `adapter_config.json`, or of an image classifier's config.

PEFT trusts them: it would allocate any rank, match any regular expression and import any module that they name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import UserError

# Options with which PEFT imports a module, or copies layers of the base model.
_REFUSED = ("megatron_config", "layer_replication")
_FILES = ("cache_file", "covariance_file")  # of `corda_config`: pickles that PEFT would load


def check_lora_options(options: Mapping[str, Any], where: str, prefix: str = "") -> None:
    """
    Raise a `UserError` for options of `peft.LoraConfig` that are of the wrong type, too large, or not safe to follow.

    Options of other versions of PEFT, which it leaves out, are left alone.

    Args:
        options (`Mapping`):
            The options, by their names in `LoraConfig`.
        where (`str`):
            The file or recipe that they stand in.
        prefix (`str`, *optional*):
            Put before the names of options in messages, such as `"lora."`.
    """
    from .schemas.check import check
    from .schemas.lora_section import LoraSection

    for key in _REFUSED:
        if options.get(key):
            raise UserError(f"{where}: {prefix}{key} is not supported; remove it")
    if options.get("megatron_core") not in (None, "megatron.core"):
        raise UserError(f"{where}: {prefix}megatron_core names a module to import, which is not supported; remove it")
    known = {key: value for key, value in options.items() if key in LoraSection.__annotations__}
    check(LoraSection, {key: _plain(value) for key, value in known.items()}, where, prefix)
    if any((options.get("corda_config") or {}).get(key) for key in _FILES):
        raise UserError(f"{where}: {prefix}corda_config names a file to load, which is not supported; remove it")


def largest_rank(options: Mapping[str, Any]) -> int:
    """The largest rank that checked options ask for."""
    return max([options.get("r") or 8, *(options.get("rank_pattern") or {}).values()])


def _plain(value: Any) -> Any:
    """As a file would hold it; in Python, names of modules may be a set."""
    return list(value) if isinstance(value, set | frozenset | tuple) else value
