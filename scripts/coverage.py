"""
Empirical check of decision rules: many random calibration/test splits of one prediction table.

    python scripts/coverage.py TABLE.npz [--splits 200] [--calibration 500] [--alpha 0.1] [--max-risk 0.5]

Prints the coverage and mean size of the prediction sets of every score, how often the realised risk of the abstention
rule exceeds its target, and held-out NLL and ECE of two ways of scaling a Dirichlet.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import minimize_scalar
from scriptlib import arguments

from dappr_llm.decisions.calibrate import calibrate
from dappr_llm.decisions.rule import Decision, abstention_score, scale
from dappr_llm.evaluation import calibration_metrics, classification_metrics
from dappr_llm.evaluation.prediction_table import PredictionTable


def measure(table: PredictionTable, test: np.ndarray, rule: Decision) -> dict[str, float]:
    """Coverage, set sizes and risk of a rule on the test rows of one split."""
    part = table.select(test)
    reading, labels = part.reading("own"), part.labels
    probs, alpha = rule.scale(reading.probs, reading.alpha, part.num_options)
    rows, found = np.arange(len(part)), {}
    for score in rule.conformal["thresholds"]:
        raw = rule.sets(probs, alpha, part.num_options, part.ids, score, allow_empty=True)
        full = rule.sets(probs, alpha, part.num_options, part.ids, score)
        found |= {f"{score}/coverage": raw[rows, labels].mean(), f"{score}/size": raw.sum(axis=1).mean()}
        found |= {f"{score}/full": full[rows, labels].mean(), f"{score}/full_size": full.sum(axis=1).mean()}
    answered = ~rule.abstain(probs, reading.epistemic)
    wrong = ~classification_metrics.is_correct(probs, labels)
    found["answered"] = answered.mean()
    found["risk"] = wrong[answered].mean() if answered.any() else 0.0
    # The risk on the whole table is the best estimate of the threshold's true risk.
    everything = table.reading("own")
    every, _ = rule.scale(everything.probs, everything.alpha, table.num_options)
    limit = rule.abstention["threshold"]
    inside = abstention_score(rule.abstention["score"], every, everything.epistemic) <= (
        -1 if limit is None else limit
    )
    errors = ~classification_metrics.is_correct(every, table.labels)
    found["table_risk"] = errors[inside].mean() if inside.any() else 0.0
    return found


def scalings(table: PredictionTable, calibration: np.ndarray, test: np.ndarray) -> dict[str, float]:
    """Held-out NLL and ECE of temperature scaling (keeps alpha0) and of scaling the evidence (changes alpha0)."""

    def power(part: PredictionTable, x: float) -> np.ndarray:
        reading = part.reading("own")
        return scale(reading.probs, None, part.num_options, math.exp(x))[0]

    def evidence(part: PredictionTable, x: float) -> np.ndarray:
        own = np.arange(part.width) < part.num_options[:, None]
        alpha = np.where(own, 1 + (part.alpha.astype(np.float64) - 1) * math.exp(-x), 0.0)
        return alpha / alpha.sum(axis=1, keepdims=True)

    left, right, found = table.select(calibration), table.select(test), {}
    ways = {"as it is": None, "power": power} | ({"evidence": evidence} if table.alpha is not None else {})
    for name, way in ways.items():
        probs = right.reading("own").probs
        if way is not None:
            loss = lambda x, way=way: classification_metrics.nll(way(left, x), left.labels)  # noqa: E731
            best = minimize_scalar(loss, bounds=(-8, 4), method="bounded")
            probs = way(right, best.x)
        correct = classification_metrics.is_correct(probs, right.labels)
        found |= {
            f"{name}/nll": classification_metrics.nll(probs, right.labels),
            f"{name}/ece": calibration_metrics.ece(probs.max(axis=1), correct),
        }
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("tables", nargs="+", help="prediction tables (.npz) of one model; their rows are put together")
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--calibration", type=int, default=500, help="rows of the calibration side")
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--max-risk", type=float, default=0.05)
    parser.add_argument("--confidence", type=float, default=0.95)
    args = parser.parse_args()
    table = join([PredictionTable.load(path) for path in args.tables])
    accuracy = classification_metrics.accuracy(table.reading("own").probs, table.labels)
    print(f"{len(table)} rows, accuracy {accuracy:.3f}; {args.splits} splits, {args.calibration} rows calibrate")
    records = []
    for seed in range(args.splits):
        order = np.random.default_rng(seed).permutation(len(table))
        left, right = order[: args.calibration], order[args.calibration :]
        rule = calibrate(table.select(left), args.alpha, args.max_risk, confidence=args.confidence)
        records.append(measure(table, right, rule) | scalings(table, left, right))
    values = {name: np.array([record[name] for record in records]) for name in records[0]}
    print(f"\nprediction sets, nominal coverage {1 - args.alpha:.3f}: mean over splits (standard deviation)")
    for score in ("lac", "aps", "possibility"):
        if f"{score}/coverage" in values:
            plain, full = (values[f"{score}/{name}"] for name in ("coverage", "full"))
            print(
                f"  {score:<12} coverage {plain.mean():.4f} ({plain.std():.4f}), "
                f"size {values[f'{score}/size'].mean():.2f}"
                f"; with the top option always in {full.mean():.4f}, size {values[f'{score}/full_size'].mean():.2f}"
            )
    print(f"\nabstention, risk at most {args.max_risk:g} with confidence {args.confidence:g}")
    print(f"  answered {values['answered'].mean():.3f}, risk {values['risk'].mean():.4f}")
    for name, text in (("risk", "on the test side"), ("table_risk", "on the whole table")):
        print(f"  splits whose risk {text} exceeds the target: {(values[name] > args.max_risk).mean():.3f}")
    print("\nscaling, fitted on the calibration side, seen on the test side")
    for name in ("as it is", "power", "evidence"):
        if f"{name}/nll" in values:
            print(f"  {name:<12} NLL {values[f'{name}/nll'].mean():.4f}, ECE {values[f'{name}/ece'].mean():.4f}")


def join(tables: list[PredictionTable]) -> PredictionTable:
    """Concatenate several tables of one model, read on the answer letters that all of them have."""
    if len(tables) == 1:
        return tables[0]
    width = min(table.width for table in tables)
    parts = [table.select(table.num_options <= width) for table in tables]
    readings = [part.reading(width) for part in parts]
    return PredictionTable.from_arrays(
        ids=[f"{part.meta.get('task')}/{name}" for part in parts for name in part.ids],
        labels=np.concatenate([part.labels for part in parts]),
        num_options=np.concatenate([part.num_options for part in parts]),
        probs=np.concatenate([reading.probs[:, :width] for reading in readings]),
        alpha=None if readings[0].alpha is None else np.concatenate([r.alpha[:, :width] for r in readings]),
        meta=parts[0].meta,
    )


if __name__ == "__main__":
    main()
