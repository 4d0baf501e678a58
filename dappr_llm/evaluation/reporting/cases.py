"""The questions worth reading: those the model knows least about, and those it got wrong with the most confidence."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_uppercase as LETTERS

import numpy as np

from .. import metrics
from ..item_texts import Question
from ..prediction_table import PredictionTable
from .run_data import RunData


@dataclass(frozen=True)
class Option:
    """One option of a shown question."""

    letter: str
    text: str
    prob: float
    right: bool
    chosen: bool


@dataclass(frozen=True)
class Case:
    """One shown question; `question` is `None` where the texts were not kept."""

    id: str
    question: str | None
    options: list[Option]
    aleatoric: float
    epistemic: float
    broken: bool = False


@dataclass(frozen=True)
class CaseGroup:
    """A titled list of questions of one run."""

    title: str
    cases: list[Case]


def case_groups(run: RunData, count: int = 8) -> list[CaseGroup]:
    """
    For every task the most uncertain questions, and the most confident mistakes.

    Args:
        run ([`RunData`]): The run.
        count (`int`, *optional*, defaults to 8): How many of each, in distribution; half as many for other tasks.
    """
    groups = []
    for task, table in run.tables.items():
        shown = count if task == run.id_name else max(1, count // 2)
        texts, reading = run.questions.get(task, {}), table.reading("own")
        # NaN sorts last, which is where the most uncertain belong.
        uncertain = np.argsort(reading.epistemic, kind="stable")[::-1][:shown]
        groups.append(CaseGroup(f"{task}: most uncertain", [_case(table, row, texts) for row in uncertain]))
        known = np.flatnonzero((table.labels >= 0) & ~table.nan_rows)
        probs = reading.probs[known]
        wrong = known[~metrics.is_correct(probs, table.labels[known])]
        wrong = wrong[np.argsort(-reading.probs[wrong].max(axis=1, initial=0), kind="stable")][:shown]
        if len(wrong):
            groups.append(CaseGroup(f"{task}: most confidently wrong", [_case(table, row, texts) for row in wrong]))
    return groups


def _case(table: PredictionTable, row: int, texts: dict[str, Question]) -> Case:
    reading = table.reading("own")
    name, size = str(table.ids[row]), int(table.num_options[row])
    known = texts.get(name)
    probs = reading.probs[row, :size]
    broken = bool(table.nan_rows[row])
    chosen = -1 if broken else int(probs.argmax())
    words = known.options if known and len(known.options) == size else ("",) * size
    # Tables of image classes name them, and can be wider than the alphabet.
    names = table.meta.get("class_names") or (LETTERS if size <= 26 else [str(k) for k in range(size)])
    options = [
        Option(names[k], words[k], float(probs[k]), bool(k == table.labels[row]), k == chosen) for k in range(size)
    ]
    if size > 8:  # the best few, and the right one, tell the story
        options = sorted(options, key=lambda option: (-option.right, -option.prob))[:8]
    return Case(
        name,
        known.question if known else None,
        options,
        float(reading.aleatoric[row]),
        float(reading.epistemic[row]),
        broken,
    )
