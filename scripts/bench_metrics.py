"""
Time of the metrics and their bootstrap intervals, from 1e3 to 1e6 rows.

    python scripts/bench_metrics.py                       # 1,000 resamples at every size, the default
    python scripts/bench_metrics.py --budget 20           # fewer resamples where 1,000 take more CPU seconds

For each size, an ID and an OOD table of that many rows with four options are evaluated, so every metric of a results
file is computed. Time should grow no faster than n log n: rows are sorted once, and a resample costs cumulative sums.
"""

from __future__ import annotations

import math
import platform
import resource
import time
from collections.abc import Callable

import numpy as np
from scriptlib import arguments

from dappr_llm.evaluation.bootstrap import bootstrap
from dappr_llm.evaluation.evaluators import evaluate_tables
from dappr_llm.evaluation.prediction_table import PredictionTable


def make_table(rows: int, evidence: float, task: str) -> PredictionTable:
    rng = np.random.default_rng(rows)
    labels = rng.integers(4, size=rows)
    alpha = 1 + rng.gamma(0.7, evidence, (rows, 4)) + evidence * rng.random((rows, 1)) * np.eye(4)[labels]
    meta = {"task": task, "num_choices": 4, "task_num_choices": 4}
    return PredictionTable.from_arrays(np.arange(rows).astype(str), labels, alpha=alpha, meta=meta)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a call."""
    start, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - used


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e3, 1e4, 1e5, 1e6])
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--budget", type=float, help="CPU seconds per size; resamples are cut to keep it")
    args = parser.parse_args()
    print(f"python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}")
    heads = (
        "rows",
        "all metrics, CPU s",
        "resamples",
        "intervals, s",
        "CPU s",
        "ms per resample",
        "against n log n",
        "peak MB",
    )
    print("| " + " | ".join(heads) + " |\n" + "| ---: " * len(heads) + "|")
    first = None
    evaluate_tables(make_table(50, 3.0, "id"), {"x": make_table(50, 1.5, "x")})  # imports are not timed
    for size in map(int, args.sizes):
        one, other = make_table(size, 3.0, "id"), {"x": make_table(size, 1.5, "x")}
        _, point = seconds(lambda one=one, other=other: evaluate_tables(one, other))
        count = args.resamples
        if args.budget:
            _, trial = seconds(lambda one=one, other=other: bootstrap(one, other, resamples=2))
            _, twice = seconds(lambda one=one, other=other: bootstrap(one, other, resamples=4))
            each = max((twice - trial) / 2, 1e-5)
            count = max(4, min(count, int(args.budget / each)))
        took, used = seconds(lambda one=one, other=other, count=count: bootstrap(one, other, resamples=count))
        per_resample = 1000 * used / count
        growth = per_resample / (size * math.log(size))
        first = first or growth
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| {size} | {point:.2f} | {count} | {took:.1f} | {used:.1f} | {per_resample:.2f} | "
            f"{growth / first:.2f} | {peak:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
