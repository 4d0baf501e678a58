"""`dappr combine`: the ensemble of finished runs or of saved tables, from prediction tables alone, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

EPILOG = """examples:
  dappr combine runs/seed0 runs/seed1 runs/seed2 --out runs/ensemble      every table of finished runs, with results
  dappr combine a/obqa-test.npz b/obqa-test.npz --out ensemble.npz        single tables

Dirichlet methods: mean alpha. Others: mean probabilities, and mutual information as epistemic uncertainty."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("members", nargs="+", help="folders of runs, or tables (.npz)")
    parser.add_argument("--out", required=True, help="the ensemble's folder, or its table (.npz)")


def run(args: argparse.Namespace) -> int:
    """Run the verb; returns exit code 0, errors are raised."""
    from ..scale.combine import combine_runs, combine_tables

    if all(name.endswith(".npz") for name in args.members):
        combine_tables(args.members, args.out)
    else:
        combine_runs(args.members, args.out)
    return 0
