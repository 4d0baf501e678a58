"""
Checks of LoRA options that others wrote: those of an `adapter_config.json`, or of an image classifier's config.

PEFT trusts them: it would allocate any rank, match any regular expression and import any module that they name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import UserError
from .regexes import check_regex

MOST_RANK = 4096
MOST_NAMES = 10_000  # modules, layers or patterns named by one option
_LONGEST_NAME = 500
# A text is matched as a regular expression, the entries of a list are names. `layers_pattern` is one either way.
_PATTERNS = ("target_modules", "exclude_modules", "layers_pattern")
_NAMES = ("target_modules", "exclude_modules", "modules_to_save", "target_parameters")
_BY_PATTERN = ("rank_pattern", "alpha_pattern")
_BOOLS = ("fan_in_fan_out", "use_rslora", "use_dora", "lora_bias", "use_qalora", "inference_mode")
_BIAS = ("none", "all", "lora_only")
# Options with which PEFT imports a module, or copies layers of the base model.
_REFUSED = ("megatron_config", "layer_replication")
_FILES = ("cache_file", "covariance_file")  # of `corda_config`: pickles that PEFT would load


def check_lora_options(options: Mapping[str, Any], where: str, prefix: str = "") -> None:
    """
    Raise a `UserError` for options of `peft.LoraConfig` that are of the wrong type, too large, or not safe to follow.

    Args:
        options (`Mapping`):
            The options, by their names in `LoraConfig`.
        where (`str`):
            The file or recipe that they stand in.
        prefix (`str`, *optional*):
            Put before the names of options in messages, such as `"lora."`.
    """
    given = {key: value for key, value in options.items() if value is not None}
    for key in _REFUSED:
        if given.get(key):
            raise UserError(f"{where}: {prefix}{key} is not supported; remove it")
    if given.get("megatron_core", "megatron.core") != "megatron.core":
        raise UserError(f"{where}: {prefix}megatron_core names a module to import, which is not supported; remove it")
    if any(_mapping(given.get("corda_config", {}), where, f"{prefix}corda_config").get(key) for key in _FILES):
        raise UserError(f"{where}: {prefix}corda_config names a file to load, which is not supported; remove it")
    _check_rank(given.get("r", 8), where, f"{prefix}r")
    _check_number(given.get("lora_alpha", 8), where, f"{prefix}lora_alpha")
    dropout = given.get("lora_dropout", 0.0)
    _check_number(dropout, where, f"{prefix}lora_dropout")
    if not 0 <= dropout < 1:
        raise UserError(f"{where}: {prefix}lora_dropout is {dropout!r}; it is at least 0 and below 1")
    for key in _BOOLS:
        if not isinstance(given.get(key, False), bool):
            raise UserError(f"{where}: {prefix}{key} is {given[key]!r}; it is true or false")
    if given.get("bias", "none") not in _BIAS:
        raise UserError(f"{where}: {prefix}bias is {given['bias']!r}; valid: {', '.join(_BIAS)}")
    _check_modules(given, where, prefix)
    for key in _BY_PATTERN:
        for pattern, value in _mapping(given.get(key, {}), where, prefix + key).items():
            check_regex(pattern, where, prefix + key)
            check = _check_rank if key == "rank_pattern" else _check_number
            check(value, where, f"{prefix}{key}[{pattern!r}]")


def largest_rank(options: Mapping[str, Any]) -> int:
    """The largest rank that checked options ask for."""
    return max([options.get("r") or 8, *(options.get("rank_pattern") or {}).values()])


def _check_modules(given: Mapping[str, Any], where: str, prefix: str) -> None:
    for key in dict.fromkeys((*_PATTERNS, *_NAMES)):
        value = given.get(key)
        if value is None:
            continue
        if isinstance(value, str) and key in _PATTERNS:
            check_regex(value, where, prefix + key)
            continue
        entries = _names(value, where, prefix + key)
        if key == "layers_pattern":
            for entry in entries:
                check_regex(entry, where, prefix + key)
    layers = given.get("layers_to_transform", [])
    for layer in _entries([layers] if isinstance(layers, int) else layers, where, f"{prefix}layers_to_transform"):
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise UserError(f"{where}: {prefix}layers_to_transform holds {layer!r}; layers are whole numbers")


def _names(value: Any, where: str, key: str) -> list[str]:
    entries = _entries(value, where, key)
    for entry in entries:
        if not isinstance(entry, str) or not 0 < len(entry) <= _LONGEST_NAME:
            raise UserError(f"{where}: {key} holds {str(entry)[:80]!r}; it is a list of names of modules")
    return entries


def _entries(value: Any, where: str, key: str) -> list[Any]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise UserError(f"{where}: {key} is {str(value)[:80]!r}; it is a list")
    found = list(value)
    if len(found) > MOST_NAMES:
        raise UserError(f"{where}: {key} has {len(found)} entries; at most {MOST_NAMES}")
    return found


def _mapping(value: Any, where: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: {key} is {str(value)[:80]!r}; it is a mapping")
    if len(value) > MOST_NAMES:
        raise UserError(f"{where}: {key} has {len(value)} entries; at most {MOST_NAMES}")
    return value


def _check_rank(value: Any, where: str, key: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_RANK:
        raise UserError(f"{where}: {key} is {str(value)[:80]}; a rank is a whole number from 1 to {MOST_RANK}")


def _check_number(value: Any, where: str, key: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: {key} is {str(value)[:80]!r}; it is a finite number")
