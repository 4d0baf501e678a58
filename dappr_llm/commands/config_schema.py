"""`dappr config-schema`: JSON schemas of recipes and of the files beside a checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

EPILOG = """examples:
  dappr config-schema > recipe.schema.json
  dappr config-schema decision
  dappr config-schema --list

An editor with a YAML language server completes and checks a recipe that begins with the line
  # yaml-language-server: $schema=recipe.schema.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("file", nargs="?", default="recipe", metavar="FILE", help="which one (default: recipe)")
    parser.add_argument("--list", action="store_true", help="list the files that have a schema")


def run(args: argparse.Namespace) -> int:
    """Print a schema, or their names."""
    from ..core.errors import UserError, nearest
    from ..core.schemas.documents import DOCUMENTS, document
    from ..core.terminal import show

    if args.list:
        for name, (_, title) in DOCUMENTS.items():
            show(f"{name:<14} {title}")
        return 0
    if args.file not in DOCUMENTS:
        raise UserError(f"config-schema: no schema of {args.file!r}; {nearest(args.file, DOCUMENTS)}")
    show(json.dumps(document(args.file), indent=2, allow_nan=False))
    return 0
