"""
Checks of labelled rows before anything is trained on them: errors where results would be wrong, warnings where weak.

Knows rows as keys (equal for equal content), answers and places, so it serves text and images. No torch.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .errors import UserError

logger = logging.getLogger(__name__)

_NAMED = 3  # rows or labels that a sentence names
_IMBALANCE = 10  # times as many rows of the largest label as of the smallest
TRAIN = "train"


@dataclass(frozen=True)
class Part:
    """
    The rows of one split.

    Args:
        name (`str`):
            `"train"`, `"validation"` or `"test"`.
        keys (`Sequence[str]`):
            Of each row, equal for rows with equal content.
        answers (`Sequence[str]`):
            Names of the right labels or options.
        places (`Sequence[str]`):
            File and line of each row.
    """

    name: str
    keys: Sequence[str]
    answers: Sequence[str]
    places: Sequence[str]


@dataclass(frozen=True)
class Finding:
    """One thing that was found, as a sentence; an error makes results wrong, a warning makes them weak."""

    level: Literal["error", "warning"]
    text: str


def find(parts: Sequence[Part], labels: Sequence[str] | None = None) -> list[Finding]:
    """
    Everything wrong with the rows of a task.

    Args:
        parts (`Sequence[Part]`):
            The splits, the training rows first.
        labels (`Sequence[str]`, *optional*):
            The labels that all rows share; `None` if rows have their own options.
    """
    found = _contradictions(parts) + _repeated(parts)
    return found + _labels(parts, labels) if labels is not None else found


def report(findings: Sequence[Finding], name: str, mode: str = "error") -> None:
    """
    Log what was found; errors are one `UserError`.

    Args:
        findings (`Sequence[Finding]`):
            From [`find`] and others.
        name (`str`):
            Name of the data.
        mode (`str`, *optional*, defaults to `"error"`):
            `"warn"` logs errors too and goes on.
    """
    errors = [each.text for each in findings if each.level == "error"]
    for each in findings:
        if each.level == "warning" or mode == "warn":
            logger.warning(f"{name}: {each.text}")
    if errors and mode != "warn":
        raise UserError(f"{name}: {'; also: '.join(errors)}; mend the data, or go on with data.checks: warn")


def named(places: Sequence[str], total: int | None = None) -> str:
    """The first few rows of a list: `t.csv, line 3; line 9; …`."""
    shown, last = [], None
    for place in places[:_NAMED]:
        file, mark, line = place.rpartition(", ")
        shown.append(line if mark and file == last else place)
        last = file
    more = ["…"] if (len(places) if total is None else total) > _NAMED else []
    return "; ".join([*shown, *more])


def too_long(lengths: Sequence[int], places: Sequence[str], limit: int, characters: int) -> list[Finding]:
    """
    Rows that will be cut.

    Args:
        lengths (`Sequence[int]`):
            Characters of each row.
        places (`Sequence[str]`):
            File and line of each.
        limit (`int`):
            Tokens that fit.
        characters (`int`):
            Characters per token, roughly: no tokenizer is loaded yet.
    """
    long = [place for length, place in zip(lengths, places, strict=True) if length > limit * characters]
    if not long:
        return []
    share = f"{len(long):,} of {len(lengths):,} rows are" if len(long) > 1 else f"1 of {len(lengths):,} rows is"
    text = f"{share} probably longer than train.max_length: {limit} tokens and will be cut (first: {named(long)})"
    return [Finding("warning", text)]


def _contradictions(parts: Sequence[Part]) -> list[Finding]:
    answers: dict[str, dict[str, str]] = defaultdict(dict)
    rows: Counter[str] = Counter()
    for part in parts:
        for key, answer, place in zip(part.keys, part.answers, part.places, strict=True):
            answers[key].setdefault(answer, place)
            rows[key] += 1
    bad = {key: places for key, places in answers.items() if len(places) > 1}
    if not bad:
        return []
    first = " and ".join(f"{answer!r} ({place})" for answer, place in list(next(iter(bad.values())).items())[:2])
    count = sum(rows[key] for key in bad)
    return [Finding("warning", f"{count:,} rows have an equal row with another label (first: {first})")]


def _repeated(parts: Sequence[Part]) -> list[Finding]:
    """Training rows that are met again in the other parts."""
    train = dict(zip(reversed(parts[0].keys), reversed(parts[0].places), strict=True))
    found = []
    for part in parts[1:]:
        again = [(place, train[key]) for key, place in zip(part.keys, part.places, strict=True) if key in train]
        if again:
            first = f"{again[0][0]} = {again[0][1]}"
            level: Literal["error", "warning"] = "error" if part.name not in ("validation",) else "warning"
            text = f"{len(again):,} of {len(part.keys):,} {part.name} rows are training rows too (first: {first})"
            found.append(Finding(level, text + ": the result would be too good"))
    return found


def _labels(parts: Sequence[Part], labels: Sequence[str]) -> list[Finding]:
    counts = Counter(parts[0].answers)
    found = []
    if len(counts) == 1 and parts[0].answers:
        text = f"all {len(parts[0].answers):,} training rows have the label {parts[0].answers[0]!r}"
        found.append(Finding("error", text))
    for part in parts[1:]:
        unknown = Counter(answer for answer in part.answers if answer not in counts)
        if unknown:
            first = part.places[next(i for i, answer in enumerate(part.answers) if answer in unknown)]
            text = f"{_listed(unknown)} in the {part.name} rows, but in no training row (first: {first})"
            found.append(Finding("error", text))
    absent = [label for label in labels if label not in counts]
    if absent:
        text = f"no training rows of {len(absent)} of {len(labels)} labels: {_some(absent)}"
        found.append(Finding("warning", text))
    single = [answer for answer, count in counts.items() if count == 1]
    if single and len(counts) > 1:
        first = parts[0].places[list(parts[0].answers).index(single[0])]
        text = f"{len(single)} label{'s' * (len(single) > 1)} with one training row: {_some(single)} (first: {first})"
        found.append(Finding("warning", text))
    return found + _imbalance(counts) + _alike(labels)


def _imbalance(counts: Mapping[str, int]) -> list[Finding]:
    if len(counts) < 2:
        return []
    least, most = min(counts, key=lambda label: counts[label]), max(counts, key=lambda label: counts[label])
    if counts[most] < _IMBALANCE * counts[least]:
        return []
    share = counts[most] / sum(counts.values())
    text = f"{counts[most]:,} training rows of {most!r} ({share:.0%}) and {counts[least]:,} of {least!r}: read the "
    return [
        Finding("warning", text + "figures per class and macro-F1, not the accuracy alone, and weight the classes")
    ]


def _alike(labels: Sequence[str]) -> list[Finding]:
    """Labels that differ in case or white space only."""
    forms: dict[str, list[str]] = defaultdict(list)
    for label in labels:
        forms["".join(label.split()).casefold()].append(label)
    pairs = [names for names in forms.values() if len(names) > 1]
    if not pairs:
        return []
    shown = "; ".join(" and ".join(map(repr, names)) for names in pairs[:_NAMED])
    return [Finding("warning", f"labels that differ in case or blanks only: {shown}; are they the same?")]


def _some(labels: Sequence[str]) -> str:
    return ", ".join(map(repr, labels[:_NAMED])) + ", …" * (len(labels) > _NAMED)


def _listed(counts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{label!r} ({count} row{'s' * (count > 1)})" for label, count in list(counts.items())[:_NAMED])
    return (
        f"the label{'s' * (len(counts) > 1)} {shown}{', …' * (len(counts) > _NAMED)} occur{'s' * (len(counts) == 1)}"
    )
