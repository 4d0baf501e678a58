"""What has to be said before any table: a result at chance level, or a baseline that was not beaten."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .baseline_results import DIFFERENCE, OWN, title
from .results import Intervals

_TRY = (
    "Try more training steps or rows, another learning rate, or a larger model; check with `dappr predict` that texts "
    "and labels are read as you mean them"
)


def verdicts(
    results: Mapping[str, float], intervals: Intervals, fixed_labels: bool, modality: str = "text"
) -> list[str]:
    """
    Sentences for the top of reports and printed tables, the most important first; may be empty.

    Args:
        results, intervals (`Mapping`): Of a results file, by key.
        fixed_labels (`bool`): Whether all rows offer the same classes.
        modality (`str`, *optional*, defaults to `"text"`): `"text"` or `"vision"`.
    """
    found = [against_baselines(results, intervals), against_chance(results, intervals, fixed_labels, modality)]
    return [sentence for sentence in found if sentence]


def baseline_names(results: Mapping[str, float]) -> list[str]:
    """Names of the baselines in a results file."""
    parts = [key.split("/") for key in results if key.startswith(f"{OWN}/")]
    return list(dict.fromkeys(part[1] for part in parts if len(part) == 3))


def unbeaten(results: Mapping[str, float], intervals: Intervals) -> list[str]:
    """Baselines whose difference in accuracy to the run is not above 0 (its interval, where there is one)."""
    found = []
    for name in baseline_names(results):
        key = f"{DIFFERENCE}/{name}/accuracy"
        if not _low(results, intervals, key) > 0:
            found.append(name)
    return sorted(found, key=lambda name: -results[f"{OWN}/{name}/accuracy"])


def against_baselines(results: Mapping[str, float], intervals: Intervals) -> str:
    """Which baselines were not beaten, or that all were; empty without any."""
    names = baseline_names(results)
    if not names:
        return ""
    lost = unbeaten(results, intervals)
    if not lost:
        best = max(names, key=lambda name: results[f"{OWN}/{name}/accuracy"])
        return f"Fine-tuning beats every baseline; the best is {_compared(results, intervals, best)}."
    listed = "; ".join(_compared(results, intervals, name) for name in lost)
    what = "this baseline" if len(lost) == 1 else f"{len(lost)} of the baselines"
    return f"Fine-tuning does not beat {what}: {listed}."


def against_chance(
    results: Mapping[str, float], intervals: Intervals, fixed_labels: bool, modality: str = "text"
) -> str:
    """That the accuracy is not above that of a uniform guess, and what to try; empty if it is."""
    accuracy, chance = (results.get(f"id/{name}", math.nan) for name in ("accuracy", "chance"))
    if math.isnan(accuracy) or math.isnan(chance) or _low(results, intervals, "id/accuracy") > chance:
        return ""
    what = "at or below chance" if accuracy <= chance else "not distinguishable from chance"
    advice = _TRY
    if fixed_labels and modality == "text":
        advice += (
            ", and `--set model.readout=head`, which does not have to learn first what letters or tokens stand for"
        )
    return (
        f"The accuracy of {_percent(accuracy)} %{_ends(intervals, 'id/accuracy')} is {what} ({_percent(chance)} %). "
        f"{advice}."
    )


def _compared(results: Mapping[str, float], intervals: Intervals, name: str) -> str:
    key = f"{DIFFERENCE}/{name}/accuracy"
    own = results.get("id/accuracy", math.nan)
    return (
        f"{title(name)}, {_percent(results[f'{OWN}/{name}/accuracy'])} % right against {_percent(own)} % of this run "
        f"(difference {100 * results[key]:+.1f}{_ends(intervals, key, signed=True)})"
    )


def _low(results: Mapping[str, float], intervals: Intervals, key: str) -> float:
    low = intervals.get(key, (math.nan, math.nan))[0]
    return results.get(key, math.nan) if math.isnan(low) else low


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _ends(intervals: Intervals, key: str, signed: bool = False) -> str:
    ends = intervals.get(key, (math.nan, math.nan))
    if any(map(math.isnan, ends)):
        return ""
    text = " to ".join(f"{100 * end:+.1f}" if signed else f"{100 * end:.1f}" for end in ends)
    return f", 95 %: {text}" if signed else f" (95 %: {text})"
