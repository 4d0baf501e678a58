"""
What the gate costs: prediction with it against without, and fitting it against one prediction pass over the same rows.

    python scripts/bench_gate.py runs/quickstart --rows 256

Rounds of the three alternate, so that whatever else runs on the machine is shared; medians are printed.
"""

from __future__ import annotations

import time

import numpy as np
from scriptlib import arguments

from dappr_llm import load_checkpoint
from dappr_llm.core import checkpoint
from dappr_llm.inference.gate_fitting import GateRows, fit_gate
from dappr_llm.inference.modality import load_rows
from dappr_llm.inference.run_data import RunData


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("run", help="folder of a run with a gate")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data-root")
    args = parser.parse_args()
    data = RunData(*checkpoint.load_sidecar(args.run))
    assert data.recipe is not None
    wanted = data.find(split=data.recipe.data.train_split, limit=args.rows)
    rows = load_rows(wanted.task, wanted.split, data.root(args.data_root), args.rows, seed=data.seed)
    run = load_checkpoint(args.run)
    if run.gate is None:
        raise SystemExit(f"{args.run} has no gate: run `dappr gate {args.run}`")
    gated, plain = run.predictor(), run.predictor().with_gate(None)
    prepared = run.backend.prepare(rows, labelled=False)
    ways = {
        "prediction": lambda: plain.predict_table(prepared),
        "prediction with the gate": lambda: gated.predict_table(prepared),
        "fitting": lambda: fit_gate(plain, GateRows(prepared)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            if number:  # the first round warms up
                times[name].append(time.process_time() - start)
    base = np.array(times["prediction"])
    for name, found in times.items():
        ratio = np.median(np.array(found) / base)
        print(f"{name:<26} {np.median(found):7.2f} s for {len(prepared)} rows, {ratio:.3f} of prediction")


if __name__ == "__main__":
    main()
