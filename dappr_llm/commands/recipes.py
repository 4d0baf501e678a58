"""`dappr recipes`: list the shipped recipes by folder; a filter adds descriptions, a full name shows merged values."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

from ..core.errors import UserError, did_you_mean
from ..core.terminal import show

EPILOG = """examples:
  dappr recipes                           every folder with the names in it
  dappr recipes obqa                      what has obqa in its name, with descriptions
  dappr recipes obqa_mistral7b/dappr      one recipe: its file, and its values with those of its bases
  dappr train obqa_mistral7b/dappr        a shipped recipe by its name
  dappr sweep obqa_mistral7b/table        a shipped table of several runs"""

_FIRST = ("quickstart", "binding", "obqa", "everyday")  # listed first; the others follow in alphabetical order
_WIDEST = 119


@dataclass(frozen=True)
class _Entry:
    """A recipe, or a sweep's table file."""

    name: str
    description: str
    path: Path
    is_table: bool

    @property
    def folder(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def stem(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def verb(self) -> str:
        return "sweep" if self.is_table else "train"


@dataclass
class _Folder:
    """The recipes of one folder; the name is empty for those directly in `recipes/`."""

    name: str
    entries: list[_Entry] = field(default_factory=list)

    @property
    def description(self) -> str:
        """The description of its file `table.yaml`, which covers all its recipes."""
        return next((entry.description for entry in self.entries if entry.name == f"{self.name}/table"), "")

    @property
    def counts(self) -> str:
        tables = sum(entry.is_table for entry in self.entries)
        recipes = len(self.entries) - tables
        return f"{recipes} recipe{'s' * (recipes != 1)}, {tables} table{'s' * (tables != 1)}"

    def is_about_images(self) -> bool:
        """Whether its `base.yaml` names an image backbone."""
        from ..core.recipe import read_merged

        base = self.entries[0].path.parent / "base.yaml"
        return base.is_file() and bool(read_merged(base).get("model", {}).get("backbone"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `dappr recipes`."""
    parser.add_argument("filter", nargs="?", help="part of a name, of a folder or of a description")


def run(args: argparse.Namespace) -> int:
    """Print all folders, the entries that match the filter, or the one entry of that name."""
    entries = _all_entries()
    if not entries:
        raise UserError("No recipes are installed with the package; give `dappr train` the path of a file")
    width = max(40, min(shutil.get_terminal_size((80, 24)).columns, _WIDEST))
    if not args.filter:
        lines = _overview(_folders(entries), width)
    else:
        wanted = args.filter.removeprefix("recipes/").removesuffix(".yaml").rstrip("/").lower()
        exact = [entry for entry in entries if entry.name.lower() == wanted]
        found = exact or _matching(entries, wanted)
        if not found:
            raise UserError(f"No recipe matches {args.filter!r}; {did_you_mean(_most_alike(wanted, entries))}")
        lines = _details(exact[0], width) if exact else _descriptions(_folders(found), width)
    show("\n".join(lines))
    return 0


def _all_entries() -> list[_Entry]:
    from ..core.recipe import list_recipes

    found = [_Entry(*row, is_table=tables) for tables in (False, True) for row in list_recipes(tables)]
    return sorted(found, key=lambda entry: (entry.is_table, _rank(entry.name), entry.name))


def _rank(name: str) -> int:
    return next((rank for rank, first in enumerate(_FIRST) if name.startswith(first)), len(_FIRST))


def _folders(entries: Iterable[_Entry]) -> list[_Folder]:
    """Entries grouped by folder: text before images, then by rank and name."""
    found: dict[str, _Folder] = {}
    for entry in entries:
        found.setdefault(entry.folder, _Folder(entry.folder)).entries.append(entry)
    order = {name: (name != "", folder.is_about_images(), _rank(name), name) for name, folder in found.items()}
    return sorted(found.values(), key=lambda folder: order[folder.name])


def _matching(entries: list[_Entry], wanted: str) -> list[_Entry]:
    named = [entry for entry in entries if wanted in entry.name.lower()]
    return named or [entry for entry in entries if wanted in entry.description.lower()]


def _most_alike(wanted: str, entries: list[_Entry], limit: int = 3) -> list[str]:
    """Folders and names most similar to the filter, as a whole or in one of their parts."""
    names = [*dict.fromkeys(entry.folder for entry in entries if entry.folder), *(entry.name for entry in entries)]

    def likeness(name: str) -> float:
        parts = [name, *name.split("/"), *name.replace("/", "_").split("_")]
        return max(SequenceMatcher(None, wanted, part).ratio() for part in parts)

    return sorted(names, key=likeness, reverse=True)[:limit]


def _overview(folders: list[_Folder], width: int) -> Iterator[str]:
    """One line per folder with its shortened description, then the names in it."""
    named = [folder for folder in folders if folder.name]
    first = max(len(folder.name) for folder in named) + 2
    counts = max(len(folder.counts) for folder in named) + 2
    for entry in (entry for folder in folders if not folder.name for entry in folder.entries):
        yield from _wrapped(f"{entry.name:<{first}}", entry.description, width)
    for folder in named:
        start = f"{folder.name + '/':<{first}}{folder.counts:<{counts}}"
        yield start + _cut(folder.description, width - len(start))
        recipes = " ".join(entry.stem for entry in folder.entries if not entry.is_table)
        tables = " ".join(entry.stem for entry in folder.entries if entry.is_table)
        yield from _wrapped("  ", f"{recipes}; sweep: {tables}" if tables else recipes, width)
    yield ""
    yield "By name:  dappr train obqa_mistral7b/dappr, dappr sweep obqa_mistral7b/table"
    yield "More:     dappr recipes obqa (descriptions), dappr recipes mnist/edl (values)"


def _descriptions(folders: list[_Folder], width: int) -> Iterator[str]:
    first = max(len(entry.name) for folder in folders for entry in folder.entries) + 2
    spaced = any(len(folder.entries) > 1 for folder in folders)
    for number, folder in enumerate(folders):
        if number and spaced:
            yield ""
        for entry in folder.entries:
            yield from _wrapped(f"{entry.verb} {entry.name:<{first}}", entry.description, width)
    yield ""
    yield "train: dappr train NAME; sweep: dappr sweep NAME; values: dappr recipes NAME"


def _details(entry: _Entry, width: int) -> Iterator[str]:
    from ..core.recipe import Recipe, read_merged

    yield f"dappr {entry.verb} {entry.name}"
    yield from _wrapped("  ", entry.description, width)
    yield f"  {entry.path}"
    yield ""
    if entry.is_table:
        yield entry.path.read_text(encoding="utf-8").rstrip()
        return
    values = read_merged(entry.path)
    for section in (name for name in Recipe.model_fields if name in values and name != "description"):
        if isinstance(values[section], Mapping):
            yield f"{section}:"
            yield from (f"  {key}: {_yaml(value)}" for key, value in values[section].items())
        else:
            yield f"{section}: {_yaml(values[section])}"


def _yaml(value: object) -> str:
    """A value as YAML on one line."""
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=1000)
    text = text.strip().removesuffix("...").strip()
    return (
        json.dumps(value, ensure_ascii=False, allow_nan=False) if "\n" in text else text
    )  # JSON is YAML, and never breaks lines


def _wrapped(start: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=" " * len(start)) or [start.rstrip()]


def _cut(text: str, width: int) -> str:
    """The text shortened to one line: whole, up to the first comma, or truncated."""
    first = text if len(text) <= width else text.partition(", ")[0]
    return first if len(first) <= width else textwrap.shorten(first, max(width, 10), placeholder=" …")
