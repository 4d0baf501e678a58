"""`dappr init`: look at a file of one's own and write the recipe that trains on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import shared

if TYPE_CHECKING:
    import argparse

EPILOG = """examples:
  dappr init tickets.csv                               writes tickets.yaml
  dappr init tickets.csv --text body --label queue     where the columns have other names
  dappr init exam.jsonl --out exam.yaml                multiple choice: question, choices, answer

CSV (comma, semicolon, tab), JSONL and Parquet. A column of texts and one of labels are text classification; rows with
options of their own are multiple choice. One file is enough: it is split into train, validation and test."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("file", metavar="FILE", help="a .csv, .jsonl or .parquet file")
    parser.add_argument("--out", help="the recipe to write (default: FILE's name with .yaml, in this folder)")
    shared.add_columns(parser, "found by name and content")
    parser.add_argument("--overwrite", action="store_true", help="replace a recipe of that name")


def run(args: argparse.Namespace) -> int:
    """Print what was found, write the recipe."""
    from pathlib import Path

    from ..core.errors import UserError
    from ..core.files import write_text
    from ..core.recipe import default_name, load_recipe
    from ..core.terminal import show
    from ..inference.modality import propose

    out = Path(args.out) if args.out else Path(Path(args.file).name.split(".")[0] + ".yaml")
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out}: a recipe is a .yaml file")
    if out.exists() and not args.overwrite:
        raise UserError(f"{out} exists already; give another name with --out, or pass --overwrite")
    found = propose(args.file, shared.columns(args))
    show("\n".join(found.lines()))
    write_text(out, found.recipe(str(out)))
    load_recipe(out)  # what we write, we can read
    folder = f"runs/{default_name(out)}"
    example = f'dappr ask {folder} "{found.example()}"'
    show(f"Wrote {out}. Read it, then:\n  dappr train {out}\n  dappr report {folder}\n  {example}")
    return 0
