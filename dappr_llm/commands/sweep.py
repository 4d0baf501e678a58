"""`dappr sweep`: train methods x seeds on one task and compare their results in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import shared

if TYPE_CHECKING:
    import argparse

EPILOG = """examples:
  dappr sweep recipes/obqa_mistral7b/table.yaml                    methods x seeds, spread over the visible GPUs
  dappr sweep obqa_smollm2/table --data-root data                  interrupted? the same command goes on
  dappr sweep obqa_smollm2/table --dry-run                         what would run, and what is finished
  dappr sweep obqa_smollm2/table --tables-only                     the table of what is there, without running

A table file names seeds and rows:

  seeds: [0, 1, 2]
  rows:
    - recipe: ce                               the first row: others are compared with it
    - {recipe: mc_dropout, weights_of: ce}     its weights, read by another method
    - {recipe: ce, name: ensemble, members: 3}
    - {recipe: dappr, label: DAPPr, set: {method.reg_weight: 1e-3}}

Runs are folders OUT/ROW/seedN. A finished one is never repeated, an interrupted one is resumed, a failed one is
reported and the rest go on. Results: table.md, table.tex, table.csv and table.json in OUT."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("table", help="a YAML file, or the name of a shipped one (see `dappr recipes`)")
    shared.add_overrides(parser, "override a value of every run")
    parser.add_argument("--output-dir", help="where runs and tables are written (default: runs/NAME)")
    shared.add_data_root(parser)
    parser.add_argument("--seeds", type=shared.whole(0, 999), nargs="+", help="other seeds than the table's")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these rows (and what they build on)")
    parser.add_argument(
        "--jobs", type=shared.whole(most=10_000), help="runs at a time (default: one per visible GPU, else 1)"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their state, and stop")
    parser.add_argument("--tables-only", action="store_true", help="make the table of what is finished")


def run(args: argparse.Namespace) -> int:
    """Run the verb; returns exit code 0, 1 if runs failed, or 130 if interrupted."""
    from ..scale.sweep import load_table, sweep

    overrides = shared.overrides(args)
    table = load_table(args.table, overrides, output_dir=args.output_dir, seeds=args.seeds, only=args.rows)
    return sweep(table, jobs=args.jobs, dry_run=args.dry_run, tables_only=args.tables_only)
