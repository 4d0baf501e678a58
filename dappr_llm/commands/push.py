"""`dappr push`: upload a checkpoint to the Hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.terminal import show
from .shared import Sidecars

if TYPE_CHECKING:
    import argparse

EPILOG = """examples:
  dappr push runs/quickstart user/name --private
  dappr push runs/quickstart user/name --tables --license apache-2.0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("checkpoint", help="folder of a run")
    parser.add_argument("repo", help="user/name; created if it does not exist")
    parser.add_argument(
        "--private", action="store_true", help="make a new repository private; refuse an existing public one"
    )
    parser.add_argument("--tables", action="store_true", help="upload the prediction tables too")
    parser.add_argument("--revision", help="branch to commit to (default: main)")
    parser.add_argument("--license", help="license id for the card, e.g. apache-2.0")


def run(args: argparse.Namespace) -> int:
    """Run the verb; returns exit code 0, errors are raised."""
    Sidecars([args.checkpoint])  # a wrong folder is an error before slow imports
    from ..inference.hub import push

    done = push(
        args.checkpoint,
        args.repo,
        private=args.private or None,
        tables=args.tables,
        revision=args.revision,
        license=args.license,
    )
    show(f"{len(done.files)} files in one commit: {done.url}/tree/{done.commit}")
    return 0
