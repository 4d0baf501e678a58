"""A recipe against its schema, its open sections (`lora`, `method`, `train`) included."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from ..errors import UserError, nearest
from .check import check, shown
from .lora_section import LoraSection
from .method_options import METHOD_OPTIONS
from .recipe import Recipe
from .synonyms import suggest_key
from .train_section import TrainSection

# Where the libraries list their own fields, for keys that a later version of them has and our schema has not.
_TRAINING_ARGUMENTS = ("transformers", "training_args.py")
_LORA_CONFIG = ("peft", "tuners/lora/config.py")


# PEFT would import Megatron's layers for them; an `adapter_config.json` names the second without using it.
_MEGATRON = ("megatron_config", "megatron_core")


def check_recipe(values: Mapping[str, Any], where: str) -> Recipe:
    """
    The recipe that nested mappings describe; what is wrong with them is a `UserError`.

    Args:
        values (`Mapping`):
            Sections and keys, without `base:`.
        where (`str`):
            Name of the file.
    """
    values = dict(values)
    if values.get("lora", {}) in (None, False):  # every weight is trained
        values["lora"] = None
    for key in ("data", "method", "train", "model", *(["lora"] if values.get("lora") is not None else [])):
        if key in values and not isinstance(values[key], Mapping):
            raise UserError(f"{where}: the section {key!r} must be a mapping, found {shown(values[key])}")
    if (values.get("data") or {}).get("train") is None:
        raise UserError(f"{where}: data.train is missing: name a task (everyday, obqa, …) or describe your own data")
    recipe: Recipe = check(Recipe, values, where)
    check_method(recipe.method, where)
    lora = recipe.lora or {}
    for key in _MEGATRON:
        if lora.get(key) is not None:
            raise UserError(
                f"{where}: lora.{key} is {shown(lora[key])}: models that Megatron splits over devices cannot "
                "be trained here; remove it"
            )
    check_section(LoraSection, lora, where, "lora.", _LORA_CONFIG)
    check_section(TrainSection, recipe.train, where, "train.", _TRAINING_ARGUMENTS)
    return recipe


def check_method(section: Mapping[str, Any], where: str) -> None:
    """Check `method:`, the name and its options."""
    if "name" not in section:
        raise UserError(f"{where}: the method section needs a name, e.g. method: {{name: dappr}}")
    options = dict(section)
    name = options.pop("name")
    if not isinstance(name, str) or name not in METHOD_OPTIONS:
        raise UserError(f"{where}: method.name is {shown(name)}; {nearest(name, METHOD_OPTIONS)}")
    check(METHOD_OPTIONS[name], options, where, "method.")


def check_section(schema: Any, values: Mapping[str, Any], where: str, prefix: str, library: tuple[str, str]) -> None:
    """Check an open section; keys that only the installed library knows are left for it to check."""
    known = get_type_hints(schema)
    own = {key: value for key, value in values.items() if key in known}
    for key in values:
        if key not in known and key not in _fields(*library):
            raise UserError(f"{where}: unknown key {prefix + str(key)!r}; {suggest_key(key, known)}")
    check(schema, own, where, prefix)


@cache
def _fields(package: str, file: str) -> frozenset[str]:
    """Field names in a library's source, which is read and not imported: that would take seconds."""
    found = importlib.util.find_spec(package)
    path = Path(found.origin).parent / file if found and found.origin else None
    text = path.read_text(encoding="utf-8") if path and path.is_file() else ""
    return frozenset(re.findall(r"^    (\w+): ", text, re.M))
