"""What has to be said of OOD figures: that length or words alone do as well, or that lengths could not be matched."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .length_matching import BALANCED, MIN_ROWS
from .metric_columns import LENGTH_MATCHED, SCORES, TRIVIAL, TRIVIAL_READINGS
from .results import Intervals

_LENGTHS = ("length", "option_length")


def ood_tasks(results: Mapping[str, float]) -> list[str]:
    """The OOD tasks of a results file."""
    places = (key.rpartition("/")[0] for key in results if key.startswith("ood/") and "/options/" not in key)
    return list(dict.fromkeys(place.removeprefix("ood/") for place in places))


def best_trivial(results: Mapping[str, float], task: str) -> str:
    """The suffix of the trivial detector with the largest AUROC; empty without any."""
    found = {suffix: results.get(f"ood/{task}/auroc{suffix}", math.nan) for suffix in TRIVIAL_READINGS}
    known = {suffix: value for suffix, value in found.items() if not math.isnan(value)}
    return max(known, key=lambda suffix: known[suffix]) if known else ""


def against_trivial(results: Mapping[str, float], intervals: Intervals, score: str = "epistemic") -> str:
    """Which tasks a detector that sees no model separates as well as the run, or better; empty if the run wins."""
    better: list[tuple[str, str]] = []
    equal: list[tuple[str, str]] = []
    for task in ood_tasks(results):
        suffix = best_trivial(results, task)
        key = f"ood/{task}/auroc_minus{suffix}"
        difference = results.get(key, math.nan)
        if not suffix or math.isnan(difference):
            continue
        low, high = intervals.get(key, (math.nan, math.nan))
        low, high = (difference if math.isnan(end) else end for end in (low, high))
        if high < 0:
            better.append((task, suffix))
        elif low <= 0:
            equal.append((task, suffix))
    ranked = f"this run's {SCORES.get(score, score)} score"
    sentences = [
        f"{_subject(better)} these sets better than {ranked} does (AUROC): {_listed(results, better)}."
        if better
        else "",
        f"{_subject(equal)} these sets as well as {ranked} does (AUROC): {_listed(results, equal)}." if equal else "",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _subject(found: list[tuple[str, str]]) -> str:
    names = {suffix.removeprefix("_trivial_") for _, suffix in found}
    if names <= set(_LENGTHS):
        return "Length alone separates"
    return "Words alone separate" if names == {"tfidf"} else "What needs no model separates"


def _listed(results: Mapping[str, float], found: list[tuple[str, str]]) -> str:
    parts = []
    for task, suffix in found:
        place, name = f"ood/{task}", TRIVIAL[suffix.removeprefix("_trivial_")]
        own, other = results[f"{place}/auroc"], results[f"{place}/auroc{suffix}"]
        matched = results.get(f"{place}/auroc{LENGTH_MATCHED}", math.nan)
        text = f"{task} by {name}, {_percent(other)} against {_percent(own)}"
        parts.append(text if math.isnan(matched) else f"{text} ({_percent(matched)} at equal lengths)")
    return "; ".join(parts)


def not_matched(results: Mapping[str, float]) -> list[str]:
    """Why lengths could not be matched, a sentence for each task of which it is so."""
    found = []
    for task in ood_tasks(results):
        key = f"ood/{task}/auroc{LENGTH_MATCHED}"
        if key not in results or not math.isnan(results[key]):
            continue
        rows = [results.get(f"ood/{task}/matched_n_{side}", 0.0) for side in ("id", "ood")]
        options = [_options(results, place) for place in ("id", f"ood/{task}")]
        if not options[0] & options[1] and all(options):
            one, other = ("/".join(map(str, sorted(counts))) for counts in options)
            why = f"its items offer {other} options and those in distribution {one}"
            if max(options[1]) > max(options[0]):
                why += " (`dappr evaluate --match-options` leaves out wrong ones)"
        elif min(rows) < MIN_ROWS:
            why = f"too little overlaps ({rows[0]:.0f} and {rows[1]:.0f} effective rows; {MIN_ROWS} are needed)"
        else:
            check = results.get(f"ood/{task}/matched_length_auroc", math.nan)
            why = f"length itself keeps an AUROC of {_percent(check)} (allowed: {_ends()})"
        found.append(f"{task}: lengths cannot be matched, {why}.")
    return found


def _options(results: Mapping[str, float], place: str) -> set[int]:
    prefix = f"{place}/options/"
    return {int(key.removeprefix(prefix)) for key in results if key.startswith(prefix)}


def _ends() -> str:
    return "–".join(f"{100 * end:.0f}" for end in BALANCED)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
