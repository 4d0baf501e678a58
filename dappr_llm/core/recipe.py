"""
Recipes: YAML → `schemas.recipe.Recipe`, with `base:` inheritance and `--set a.b=c`. No torch.

`base:` is a path or a list of paths, relative to the file. They are merged from left to right, the file itself last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError, did_you_mean
from .schemas.recipe import DataSection, ModelSection, Recipe
from .schemas.sections import check_recipe
from .schemas.synonyms import suggest_key
from .secrets import refuse_secrets

__all__ = ["DataSection", "ModelSection", "Recipe", "build_recipe", "load_recipe"]

_LARGEST = 1_000_000  # bytes of a recipe file
_LONGEST_PATH, _MOST_FILES = 200, 1000  # of what a missing recipe is compared with
_ALIKE = 0.5  # of difflib's ratio, below which no recipe is like it
_MOST_NODES = 100_000  # of a recipe once its aliases are written out


class _Loader(yaml.SafeLoader):
    """YAML as everybody means it: `2e-4` is a number, and `no` is the word no (as in `save_strategy: no`)."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:bool"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


_NOT_RUN = ("accelerate/", "methods/")  # folders beside the recipes: launch settings, and coefficients for `base:`


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """
    Read a recipe.

    Args:
        path (`str` or `Path`):
            A YAML file, or the name of a recipe that ships with the package (`obqa_mistral7b/dappr`).
        overrides (`Iterable[str]`, *optional*):
            `"section.key=value"` settings, values as YAML.
    """
    path = find_recipe(path)
    values = read_merged(path)
    for override in overrides:
        _apply(values, override)
    values.setdefault("name", default_name(path))
    return build_recipe(values, str(path))


def settings(given: Iterable[str], others: Mapping[str, str | None]) -> list[str]:
    """
    Overrides for `load_recipe`, from the command line.

    Args:
        given (`Iterable[str]`):
            What `--set` was given, `section.key=value`.
        others (`Mapping[str, str]`):
            Keys that have a flag of their own; `None` where it was not used.
    """
    return [*given, *(f"{key}={value}" for key, value in others.items() if value)]


def default_name(path: Path) -> str:
    """`obqa_mistral7b/dappr.yaml` → `obqa_mistral7b-dappr`; a recipe right in `recipes/` keeps its own name."""
    return path.stem if path.parent.name in ("recipes", "", ".") else f"{path.parent.name}-{path.stem}"


def build_recipe(values: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """A `Recipe` from nested mappings; a wrong key or value is a `UserError` with the nearest valid form."""
    refuse_secrets(values, where)
    return check_recipe(values, where)


def check_keys(values: Mapping[str, Any], valid: set[str], where: str, prefix: str) -> None:
    """Refuse an unknown key of a section, naming the nearest valid ones."""
    for key in values:
        if key not in valid:
            raise UserError(f"{where}: unknown key {prefix + str(key)!r}; {suggest_key(key, valid)}")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping; anything else is an error with its line."""
    try:
        with open(path, encoding="utf-8") as handle:
            text = handle.read(_LARGEST + 1)
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(text) > _LARGEST:
        raise UserError(f"{path}: longer than {_LARGEST:,} characters, which no recipe is")
    values = parse_yaml(text, str(path))
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is a mapping of sections, found {type(values).__name__}")
    return values


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, with what its aliases stand for bounded; mistakes are errors with their line."""
    try:
        node = yaml.compose(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
        if node is not None:
            _count(node, {}, where)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f", line {place.line + 1}" if place else ""
        reason = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise UserError(f"{where}{line}: not valid YAML ({reason})") from None
    except (ValueError, OverflowError, TypeError, AttributeError, KeyError) as error:  # a date such as 2026-13-45
        raise UserError(f"{where}: a value is not valid YAML ({str(error).splitlines()[0][:100]})") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply") from None


def _count(node: yaml.Node, known: dict[int, int], where: str) -> int:
    """Nodes below one, aliases written out: a few lines of aliases of aliases can stand for billions."""
    if id(node) in known:
        if known[id(node)] < 0:
            raise UserError(f"{where}, line {node.start_mark.line + 1}: an alias holds itself")
        return known[id(node)]
    known[id(node)] = -1
    children: list[Any] = []
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[id(node)] = 1 + sum(_count(child, known, where) for child in children)
    if known[id(node)] > _MOST_NODES:
        raise UserError(
            f"{where}, line {node.start_mark.line + 1}: more than {_MOST_NODES:,} values with its aliases written out"
        )
    return known[id(node)]


def read_merged(path: Path) -> dict[str, Any]:
    """What a recipe file and its bases say, merged; defaults are not filled in."""
    return _read(path, parents=())


def _read(path: Path, parents: tuple[Path, ...]) -> dict[str, Any]:
    # Only files on the way down count: two bases may share a third, but none may be its own ancestor.
    if path.resolve() in parents:
        raise UserError(f"{path}: its `base:` leads back to itself")
    values = read_yaml(path)
    if "rows" in values:
        raise UserError(f"{path} is a table of several runs: start it with `dappr sweep`")
    merged: dict[str, Any] = {}
    for base in _bases(values.pop("base", None), path):
        base_path = path.parent / base
        if not base_path.is_file():
            raise UserError(f"{path}: its base {base!r} does not exist (looked for {base_path})")
        inherited = _read(base_path, (*parents, path.resolve()))
        inherited.pop("name", None)
        inherited.pop("description", None)
        merged = _merge(merged, inherited)
    return _merge(merged, values)


def _bases(base: Any, path: Path) -> list[str]:
    found = base if isinstance(base, list) else [] if base is None else [base]
    for entry in found:
        if not isinstance(entry, str):
            raise UserError(f"{path}: `base:` is a path or a list of paths, found {entry!r}")
    return found


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            # Options of another method do not carry over; those that name no method do, whatever the order of bases.
            other = key == "method" and "name" in value and merged[key].get("name", value["name"]) != value["name"]
            merged[key] = dict(value) if other else _merge(dict(merged[key]), value)
        else:
            merged[key] = value
    return merged


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"--set {override!r}: write it as section.key=value, e.g. --set train.seed=3")
    value = parse_yaml(text, f"--set {key}")
    *sections, last = key.strip().split(".")
    target = values
    for section in sections:
        child = target.setdefault(section, {})
        if not isinstance(child, dict):
            raise UserError(f"--set {override!r}: {section!r} is not a section")
        target = child
    target[last] = value


def recipes_dir() -> Path | None:
    """Where the shipped recipes are: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent.parent
    for folder in (here / "recipes", here.parent / "recipes"):
        if folder.is_dir():
            return folder
    return None


def list_recipes(tables: bool = False) -> list[tuple[str, str, Path]]:
    """Name, one-line description and file of every shipped recipe, or of every table of runs."""
    found = []
    for name, path in _recipe_files():
        values = read_yaml(path)
        if ("rows" in values) == tables:
            found.append((name, str(values.get("description", "")), path))
    return found


def _recipe_files() -> list[tuple[str, Path]]:
    """Name and file of all that can be run; read only where more is asked, since YAML is slow to read."""
    root = recipes_dir()
    paths = sorted(root.rglob("*.yaml")) if root else []
    named = [(path.relative_to(root).with_suffix("").as_posix(), path) for path in paths]  # type: ignore[arg-type]
    return [(name, path) for name, path in named if not name.startswith(_NOT_RUN) and path.stem != "base"]


def find_recipe(path: str | Path) -> Path:
    """A recipe file by path, or by the name of a shipped one."""
    path = Path(path)
    root = recipes_dir()
    text = path.as_posix().removeprefix("recipes/")
    for candidate in [path, *([root / text, root / f"{text}.yaml"] if root else [])]:
        if candidate.is_file():
            return _runnable(candidate, root)
    raise UserError(f"{path}: no such recipe file; {_nearest_recipes(path, text)} (see `dappr recipes`)")


def _nearest_recipes(path: Path, text: str) -> str:
    """The five recipes most like a missing one: files in its folder and the working directory, and shipped ones."""
    near: dict[str, str] = {}  # as it is typed → as it is compared
    with suppress(OSError):  # a name that is too long, a folder without rights
        for folder in dict.fromkeys((path.parent, Path())):
            files = sorted(islice((f for f in folder.glob("*.y*ml") if f.is_file()), _MOST_FILES))
            near |= {file.as_posix(): file.with_suffix("").as_posix() for file in files}
    shipped = {name: name for name, _ in _recipe_files()}
    wanted = text.removesuffix(".yaml").removesuffix(".yml")[-_LONGEST_PATH:]
    alike = {n: SequenceMatcher(None, compared, wanted).ratio() for n, compared in (shipped | near).items()}
    best = sorted(alike, key=lambda name: (-alike[name], name))[:5]
    if best and alike[best[0]] >= _ALIKE:
        return did_you_mean(best)
    folders = f"folders: {', '.join(sorted({name.split('/')[0] for name in shipped if '/' in name}))}"
    return f"{'files here: ' + ', '.join(list(near)[:5]) + '; ' if near else ''}{folders}"


def _runnable(path: Path, root: Path | None) -> Path:
    if root and path.resolve().parent == (root / "methods").resolve():
        raise UserError(
            f"{path} holds only a method's coefficients, for the `base:` of recipes, and cannot be run itself "
            "(see `dappr recipes`)"
        )
    return path
