"""Command-line arguments that the scripts share."""

from __future__ import annotations

import argparse


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the script's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def figure_arguments(description: str | None, out: str, source: str = "sweep") -> argparse.ArgumentParser:
    """
    The arguments of a script that draws one figure.

    Args:
        description (`str`): The script's docstring.
        out (`str`): Default file name of the figure.
        source (`str`, *optional*, defaults to `"sweep"`): `"sweep"`: the folder of a sweep; `"runs"`: one or more
            folders of runs.
    """
    parser = arguments(description)
    if source == "sweep":
        parser.add_argument("sweep", help="folder of the sweep")
    else:
        parser.add_argument("runs", nargs="+", help="folders of finished runs of Dirichlet methods")
    parser.add_argument("--out", default=out, help=f"the figure (default: {out})")
    return parser
