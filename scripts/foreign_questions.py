"""
How foreign questions look to a run of `everyday`: their familiarity, and that of new questions of its own kind.

    python scripts/foreign_questions.py runs/quickstart

Prints the share of the 60 foreign questions below the level, by kind, those that pass, and the share of
1,000 new `everyday` questions below it, none of which is in the calibration split.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from scriptlib import arguments

from dappr_llm import load_checkpoint
from dappr_llm.text.data.everyday import generate
from dappr_llm.text.data.foreign import foreign_questions


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("run", help="folder of a run of everyday, with a gate")
    parser.add_argument("--level", type=float, default=0.05, help="familiarity below which a row is refused")
    parser.add_argument("--new", type=int, default=1000, help="everyday questions (at most 2000)")
    args = parser.parse_args()
    predictor = load_checkpoint(args.run).predictor()
    foreign = foreign_questions()
    rows = [{key: item[key] for key in ("id", "question", "options", "label")} for item in foreign]
    tables = [predictor.predict_table(part) for part in (rows, generate("everyday", "test", args.new))]
    shares = [table.familiarity for table in tables]
    if shares[0] is None or shares[1] is None:
        raise SystemExit(f"{args.run} has no calibrated gate: run `dappr gate {args.run}`")
    refused = shares[0] <= args.level
    own = float((shares[1] <= args.level).mean())
    print(f"{args.new} new everyday questions: {own:.1%} have a familiarity of at most {args.level:g}")
    print(f"{len(rows)} foreign questions: {refused.mean():.1%}")
    by: dict[str, list[bool]] = defaultdict(list)
    for item, low in zip(foreign, refused, strict=True):
        by[item["kind"]].append(bool(low))
    for name, found in by.items():
        print(f"  {name:<18} {sum(found):>2} of {len(found)}")
    for row in np.flatnonzero(~refused):
        print(f"  passes with {shares[0][row]:.3f}: {foreign[row]['question']}")
    print(f"AUROC of the density: {auroc(tables[1].density, tables[0].density):.4f}")


def auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    """Probability that a row of the own kind is denser than a foreign one."""
    return float((inside[:, None] > outside).mean() + (inside[:, None] == outside).mean() / 2)


if __name__ == "__main__":
    main()
