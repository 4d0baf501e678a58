"""`dappr report`: one HTML page and tables, from the prediction tables of finished runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import shared

if TYPE_CHECKING:
    import argparse

EPILOG = """examples:
  dappr report runs/quickstart
  dappr report runs/obqa-ce runs/obqa-dappr --out comparison/ --title "OpenBookQA"

Everything is computed from the runs' prediction tables; neither the model nor torch is needed. With several runs on
the same items, differences to the first are tested pairwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders that `dappr train` or `dappr evaluate` wrote")
    parser.add_argument("--out", help="folder for the report (default: RUN/report; with several runs: report)")
    parser.add_argument("--id", help="in-distribution task, if a run has no results.json that names it")
    parser.add_argument("--title", default="", help="heading of the page")
    shared.add_metrics(parser)


def run(args: argparse.Namespace) -> int:
    """Run the verb; returns exit code 0, errors are raised."""
    from ..evaluation.reporting import write_report

    write_report(
        args.runs,
        args.out,
        id_name=args.id,
        title=args.title,
        score=args.score,
        resamples=args.resamples,
        allow_nan=args.allow_nan,
    )
    return 0
