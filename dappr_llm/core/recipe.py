"""
Recipes: YAML → dataclasses, with `base:` inheritance and `--set a.b=c`. An unknown key is an error. No torch.

`base:` is a path or a list of paths, relative to the file. They are merged from left to right, the file itself last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError, close_names, did_you_mean, nearest


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


@dataclass
class ModelSection:
    """
    `model:` which base model, how it is loaded, and the adapter that training starts from.

    For images `backbone` takes the place of `name` (`convnet`, or a timm model), `adapter` is a checkpoint to start
    from, and the fields after it are those of `dappr_llm.vision.model.ImageClassifierConfig`.
    """

    name: str = "smollm2-135m"
    dtype: str = "auto"
    revision: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    quantization: dict[str, Any] | None = None
    adapter: str | None = None
    backbone: str | None = None
    pretrained: bool = False
    stem: str = "default"
    hidden: list[int] = field(default_factory=list)
    dropout: float = 0.0
    frozen: bool = False
    image_size: int | None = None
    channels: int | None = None
    backbone_options: dict[str, Any] = field(default_factory=dict)
    spectral_factor: float = 1.0


@dataclass
class DataSection:
    """
    `data:` the task to train on, the OOD tasks to test on; each a name or a description of one's own data.

    `naming_share` is the share of training rows whose question is replaced by one that asks for the right option's own
    words. It keeps small models in mind of what a letter stands for while they learn a task too hard to show it.
    `auxiliary` is a task whose rows are mixed in without labels, `auxiliary_share` of every epoch, for methods that
    learn from such rows. `augment` replaces an image task's own augmentation (`none`, or names such as
    `[crop, flip]`).

    `streaming` reads training rows as they are needed, shuffled within `shuffle_buffer` rows; needs `train.max_steps`.
    """

    train: Any = None
    ood: list[Any] = field(default_factory=list)
    root: str | None = None
    train_split: str = "train"
    validation_split: str | None = "validation"
    test_split: str | None = "test"
    ood_split: str = "test"
    validation_fraction: float | None = None
    naming_share: float = 0.0
    streaming: bool = False
    shuffle_buffer: int = 1000
    auxiliary: Any = None
    auxiliary_split: str = "train"
    auxiliary_share: float = 0.5
    augment: Any = None
    max_train_samples: int | None = None
    max_validation_samples: int | None = None
    max_test_samples: int | None = None


@dataclass
class Recipe:
    """
    A whole run. `lora` goes to `peft.LoraConfig`, `train` to `DAPPrConfig`, `method` to the method, as they are.
    """

    name: str = "run"
    description: str = ""
    model: ModelSection = field(default_factory=ModelSection)
    lora: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=lambda: {"name": "dappr"})
    data: DataSection = field(default_factory=DataSection)
    train: dict[str, Any] = field(default_factory=dict)

    @property
    def output_dir(self) -> Path:
        """`train.output_dir`, or `runs/<name>`."""
        return Path(self.train.get("output_dir") or f"runs/{self.name}")

    def to_yaml(self) -> str:
        """The resolved recipe as YAML that `load_recipe` reads back."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)


_SECTIONS = {"model": ModelSection, "data": DataSection}
_FREE = {"lora", "method", "train"}
_TOP = {f.name for f in fields(Recipe)} | {"base"}
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
    """A `Recipe` from nested mappings; unknown keys are refused with the nearest valid ones."""
    check_keys(values, _TOP - {"base"}, where, "")
    parts: dict[str, Any] = {}
    for key, value in values.items():
        if key in _SECTIONS:
            check_keys(_mapping(value, where, key), {f.name for f in fields(_SECTIONS[key])}, where, f"{key}.")
            parts[key] = _SECTIONS[key](**value)
        elif key in _FREE:
            parts[key] = dict(_mapping(value, where, key))
        else:
            parts[key] = value
    recipe = Recipe(**parts)
    if "name" not in recipe.method:
        raise UserError(f"{where}: the method section needs a name, e.g. method: {{name: dappr}}")
    if recipe.data.train is None:
        raise UserError(f"{where}: data.train is missing: name a task (everyday, obqa, …) or describe your own data")
    return recipe


def _mapping(value: Any, where: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: the section {key!r} must be a mapping, found {value!r}")
    return value


def check_keys(values: Mapping[str, Any], valid: set[str], where: str, prefix: str) -> None:
    """Refuse an unknown key of a section, naming the nearest valid ones."""
    for key in values:
        if key not in valid:
            raise UserError(f"{where}: unknown key {prefix + str(key)!r}; {nearest(key, valid)}")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping; anything else is an error with its line."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader) or {}  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f", line {place.line + 1}" if place else ""
        raise UserError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', error)})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is a mapping of sections, found {type(values).__name__}")
    return values


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
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError:
        raise UserError(f"--set {override!r}: the value is not valid YAML") from None
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
    names = [name for name, _ in _recipe_files()]
    close = close_names(text.removesuffix(".yaml"), names)
    hint = (
        did_you_mean(close) if close else f"folders: {', '.join(sorted({n.split('/')[0] for n in names if '/' in n}))}"
    )
    raise UserError(f"{path}: no such recipe file; {hint} (see `dappr recipes`)")


def _runnable(path: Path, root: Path | None) -> Path:
    if root and path.resolve().parent == (root / "methods").resolve():
        raise UserError(
            f"{path} holds only a method's coefficients, for the `base:` of recipes, and cannot be run itself "
            "(see `dappr recipes`)"
        )
    return path
