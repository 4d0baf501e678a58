"""
Option-permutation audit: every question is predicted once per cyclic rotation of its options.

A model without positional bias chooses the same option whichever letter it stands behind. Over all rotations every
option stands behind every letter equally often, so a letter that is predicted more often than the others shows
positional bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from string import ascii_uppercase as LETTERS
from typing import Any

import numpy as np

from ..core import checkpoint
from ..core.errors import UserError
from .bootstrap import LEVEL, RESAMPLES, draw_weights
from .prediction_table import PredictionTable
from .results import Intervals, save_results

TABLE, RESULTS = "audit.npz", "audit.json"
_MARK = "@"
_CHUNK = 2_000_000  # questions times resamples per chunk, which bounds memory

# Lines of the printed summary: text, key, whether the value is shown in percent.
_ROWS = (
    ("answer changes with the rotation", "flip_rate", True),
    ("rotated questions answered otherwise", "switch_rate", True),
    ("positional bias (0: every letter alike)", "position_bias", True),
    ("accuracy, as given", "accuracy_original", True),
    ("accuracy, mean over rotations", "accuracy", True),
    ("accuracy of the averaged probabilities", "accuracy_averaged", True),
    ("right in every rotation", "accuracy_all", True),
    ("epistemic uncertainty, as given", "epistemic_original", False),
    ("epistemic uncertainty, mean over rotations", "epistemic", False),
    ("its spread within a question", "epistemic_spread", False),
)


def rotated(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Every item once per cyclic rotation of its options; rotation `s` of item `x` has the id `x@s`.

    Args:
        rows (`Iterable[Mapping]`): Items with `id`, `question`, `options` and `label`.
    """
    found = []
    for row in rows:
        options, label = list(row["options"]), row["label"]
        for shift in range(len(options)):
            found.append(
                {
                    "id": f"{row['id']}{_MARK}{shift}",
                    "question": row["question"],
                    "options": options[shift:] + options[:shift],
                    "label": (label - shift) % len(options) if label >= 0 else label,
                }
            )
    return found


def evaluate_audit(
    table: PredictionTable, resamples: int = RESAMPLES, seed: int = 0, level: float = LEVEL
) -> tuple[dict[str, float], Intervals]:
    """
    Metrics of an audit, with bootstrap intervals over questions; the rotations of a question are resampled together.

    Args:
        table ([`PredictionTable`]): Predictions for [`rotated`] items.
        resamples, seed, level: As in [`bootstrap`]; no intervals with 0 resamples.

    Returns:
        `tuple`: Results and intervals by key: `flip_rate` (share of questions whose predicted option differs between
        rotations), `switch_rate` (share of rotations with another predicted option than the original order),
        `position_bias` (total variation distance between the predicted letters and the uniform distribution),
        `accuracy` (mean over rotations), `accuracy_original` (original order), `accuracy_averaged` (of the
        probabilities averaged over rotations), `accuracy_all` (correct in every rotation), `epistemic` (mean over
        rotations), `epistemic_original`, `epistemic_spread` (mean standard deviation within a question); per number
        of options K and letter `chosen/K/A` (how often it is predicted) and `recall/K/A` (accuracy when the correct
        option stands there); counts `n`, `n_unlabelled`, `options/K`.
    """
    ratios, counts = _per_item(table)
    items = len(next(iter(ratios.values()))[0])

    def read(weights: np.ndarray) -> dict[str, np.ndarray]:
        with np.errstate(invalid="ignore"):
            values = {key: (weights @ top) / (weights @ bottom) for key, (top, bottom) in ratios.items()}
        bias, total = np.zeros(len(weights)), np.zeros(len(weights))
        for k in counts:
            rows = weights @ ratios[f"chosen/{k}/A"][1]
            shares = np.stack([values[f"chosen/{k}/{letter}"] for letter in LETTERS[:k]])
            bias += np.where(rows > 0, rows * np.abs(shares - 1 / k).sum(axis=0) / 2, 0)
            total += rows
        return {**values, "position_bias": bias / total}

    results = {key: float(value[0]) for key, value in read(np.ones((1, items))).items()}
    intervals: Intervals = {}
    if resamples:
        stream, step = np.random.default_rng(seed), max(1, _CHUNK // items)
        sizes = [min(step, resamples - start) for start in range(0, resamples, step)]
        parts = [read(draw_weights(stream, items, size)) for size in sizes]
        drawn = {key: np.concatenate([part[key] for part in parts]) for key in results}
        drawn["position_bias"] += (
            results["position_bias"] - drawn["position_bias"].mean()
        )  # resampling biases it upwards
        ends = (1 - level) / 2, (1 + level) / 2
        for key, value in drawn.items():
            value = value[np.isfinite(value)]
            low, high = np.quantile(value, ends) if len(value) else (np.nan, np.nan)
            intervals[key] = (float(max(low, 0)), float(high))
    labelled = int(ratios["accuracy"][1].astype(bool).sum()) if "accuracy" in ratios else 0
    results |= {"n": items, "n_unlabelled": items - labelled}
    return results | {f"options/{k}": count for k, count in counts.items()}, intervals


def _per_item(table: PredictionTable) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], dict[int, int]]:
    """
    Every metric as a ratio of sums over the I questions.

    Returns:
        `tuple`: Numerators and denominators per question, `[I]` each, by key; and the number of questions by number
        of options.
    """
    order, starts, options = _grouped(table)
    reading = table.reading("own")
    probs, epistemic = np.nan_to_num(reading.probs[order]), reading.epistemic[order].astype(np.float64)
    shift = np.arange(len(order)) - np.repeat(starts, options)
    k = np.repeat(options, options)
    item = np.repeat(np.arange(len(options)), options)
    position = probs.argmax(axis=1)
    option = (position + shift) % k  # the predicted option, as an index into the original order
    label = table.labels[order]
    ones, many = np.ones(len(options)), options.astype(np.float64)

    def per_item(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values.astype(np.float64), starts)

    other = option != option[starts][item]
    spread = per_item(epistemic**2) / many - (per_item(epistemic) / many) ** 2
    ratios = {
        "flip_rate": (per_item(other) > 0, ones),
        "switch_rate": (per_item(other), many - 1),
        "epistemic": (per_item(epistemic) / many, ones),
        "epistemic_original": (epistemic[starts], ones),
        "epistemic_spread": (np.sqrt(np.maximum(spread, 0)), ones),
    }
    known = (label[starts] >= 0).astype(np.float64)
    if known.any():
        right = (position == label) & (label >= 0)
        averaged = np.zeros((len(options), table.width))
        own = np.arange(table.width) < k[:, None]
        row, column = np.nonzero(own)
        np.add.at(averaged, (item[row], (column + shift[row]) % k[row]), probs[row, column])
        ratios["accuracy"] = (per_item(right) / many, known)
        ratios["accuracy_original"] = (right[starts].astype(np.float64), known)
        ratios["accuracy_averaged"] = (known * (averaged.argmax(axis=1) == label[starts]), known)
        ratios["accuracy_all"] = (per_item(right) == many, known)
    counts = {int(size): int((options == size).sum()) for size in np.unique(options)}
    for size in counts:
        mine = (options == size) * many
        for place in range(size):
            ratios[f"chosen/{size}/{LETTERS[place]}"] = (per_item((position == place) & (k == size)), mine)
            if known.any():
                there = (label == place) & (k == size)
                hit = per_item(there & (position == place))
                ratios[f"recall/{size}/{LETTERS[place]}"] = (hit, per_item(there))
    return {key: (top.astype(np.float64), bottom) for key, (top, bottom) in ratios.items()}, counts


def _grouped(table: PredictionTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row order `[N]` by question and rotation; first row `[I]` and number of options `[I]` of each question."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for row, name in enumerate(table.ids.tolist()):
        item, mark, shift = name.rpartition(_MARK)
        if not mark or not shift.isdigit():
            raise UserError(f"The table is not an audit's: its id {name!r} does not end in a rotation like {_MARK}0.")
        groups.setdefault(item, []).append((int(shift), row))
    order, options = [], []
    for item, rows in groups.items():
        rows.sort()
        size = int(table.num_options[rows[0][1]])
        if [shift for shift, _ in rows] != list(range(size)):
            raise UserError(f"The audit's table lacks rotations of item {item!r}: it has {[s for s, _ in rows]}.")
        order += [row for _, row in rows]
        options.append(size)
    sizes = np.array(options)
    return np.array(order), np.append(0, sizes.cumsum()[:-1]), sizes


def render_audit(results: Mapping[str, float], intervals: Intervals, title: str = "") -> str:
    """Results of an audit as plain text for the terminal."""
    lines = [title] if title else []
    lines.append(f"{'':44}{'':>9}  95 %")
    for label, key, percent in _ROWS:
        if key in results:
            scale, digits = (100, 2) if percent else (1, 3)
            ends = intervals.get(key)
            shown = "-".join(f"{scale * end:.{digits - 1 if percent else digits}f}" for end in ends) if ends else ""
            lines.append(f"{label:44}{scale * results[key]:9.{digits}f}  {shown}".rstrip())
    for k in sorted({int(key.split("/")[1]) for key in results if key.startswith("chosen/")}):
        lines += [
            "",
            f"questions with {k} options: {results[f'options/{k}']:.0f}; equal shares would be {100 / k:.1f}",
        ]
        lines.append(f"{'letter':8}{'chosen':>9}  {'95 %':13}{'accuracy when right':>20}")
        for letter in LETTERS[:k]:
            ends = intervals.get(f"chosen/{k}/{letter}")
            shown = "-".join(f"{100 * end:.1f}" for end in ends) if ends else ""
            recall = results.get(f"recall/{k}/{letter}", np.nan)
            right = f"{100 * recall:.2f}" if np.isfinite(recall) else "-"
            lines.append(f"{letter:8}{100 * results[f'chosen/{k}/{letter}']:9.2f}  {shown:13}{right:>20}")
    return "\n".join([*lines, "", "percent, except epistemic uncertainty; intervals over questions"]) + "\n"


def save_audit(
    results: Mapping[str, float], intervals: Intervals, table: PredictionTable, folder: Path, resamples: int
) -> None:
    """
    Write `audit.json`, in the format of a results file.

    Args:
        results, intervals: From [`evaluate_audit`].
        table ([`PredictionTable`]): The audit's predictions; its meta data are copied.
        folder (`Path`): Where to write.
        resamples (`int`): Number of resamples of the intervals.
    """
    meta = {key: table.meta.get(key) for key in ("task", "split", "method", "options", "seed", "checkpoint")}
    meta["intervals"] = {"kind": "bootstrap", "level": LEVEL, "resamples": resamples, "seed": 0}
    save_results(results, {**meta, "versions": checkpoint.versions()}, folder / RESULTS, intervals)
