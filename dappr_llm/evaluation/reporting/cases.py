"""Example items for the report: uncertain ones, confident wrong answers, and what is refused or taken for familiar."""

from __future__ import annotations

import math
from dataclasses import dataclass
from string import ascii_uppercase as LETTERS

import numpy as np

from .. import classification_metrics
from ..evaluators import num_letters
from ..item_texts import ItemText
from ..prediction_table import PredictionTable
from ..ranking_metrics import TPR
from ..scores import has_score, uncertainty
from .run_data import RunData


@dataclass(frozen=True)
class Option:
    """One option of an example: letter or class name, text, probability, and whether it is correct or predicted."""

    letter: str
    text: str
    prob: float
    right: bool
    chosen: bool


@dataclass(frozen=True)
class Case:
    """
    One example item; `question` is `None` where there are no item texts, `broken` marks rows with NaN or Inf, and
    `familiarity` is there where a gate was fitted.
    """

    id: str
    question: str | None
    options: list[Option]
    aleatoric: float
    epistemic: float
    broken: bool = False
    familiarity: float | None = None


@dataclass(frozen=True)
class CaseGroup:
    """A titled list of examples of one run."""

    title: str
    cases: list[Case]


def case_groups(run: RunData, count: int = 8) -> list[CaseGroup]:
    """
    For every task, the most uncertain items and the most confident wrong answers.

    Args:
        run ([`RunData`]): The run.
        count (`int`, *optional*, defaults to 8): Examples per group of the ID task; OOD tasks get half as many.
    """
    groups = []
    for task, table in run.tables.items():
        shown = count if task == run.id_name else max(1, count // 2)
        texts, reading = run.item_texts.get(task, {}), table.reading("own")
        # NaN sorts last and so counts as most uncertain.
        uncertain = np.argsort(reading.epistemic, kind="stable")[::-1][:shown]
        groups.append(CaseGroup(f"{task}: most uncertain", [_case(table, row, texts) for row in uncertain]))
        known = np.flatnonzero((table.labels >= 0) & ~table.nan_rows)
        probs = reading.probs[known]
        wrong = known[~classification_metrics.is_correct(probs, table.labels[known])]
        wrong = wrong[np.argsort(-reading.probs[wrong].max(axis=1, initial=0), kind="stable")][:shown]
        if len(wrong):
            groups.append(CaseGroup(f"{task}: most confidently wrong", [_case(table, row, texts) for row in wrong]))
    return groups


def refusal_groups(run: RunData, count: int = 6) -> list[CaseGroup]:
    """
    What the run takes for foreign and for familiar: the least familiar ID items, the most familiar of each OOD task.

    By density where all tables have one, otherwise by the run's epistemic uncertainty, on the training letters.

    Args:
        run ([`RunData`]): The run; without OOD tasks there are no groups.
        count (`int`, *optional*, defaults to 6): Examples per group.
    """
    if not run.ood_tables:
        return []
    score = refusal_score(run)
    kept, groups = np.array([]), []
    for task, table in run.tables.items():
        ranked = uncertainty(table, num_letters(run.id_table, "num_choices"), score).astype(np.float64)
        ranked = np.where(np.isnan(ranked), np.inf, ranked)
        order = np.argsort(ranked, kind="stable")
        if task == run.id_name:
            kept, order, what = np.sort(ranked), order[::-1], "in distribution, least familiar"
        else:
            # The strictest threshold that keeps 95 % of the ID items, as for FPR95.
            threshold = kept[max(0, math.ceil(TPR * len(kept) - 1e-9) - 1)] if len(kept) else np.inf
            what = f"most familiar; {100 * float((ranked > threshold).mean()):.0f} % are refused" if len(table) else ""
        texts = run.item_texts.get(task, {})
        groups.append(CaseGroup(f"{task}: {what}", [_case(table, row, texts) for row in order[:count]]))
    return groups


def refusal_score(run: RunData) -> str:
    """What [`refusal_groups`] rank by."""
    return "density" if all(has_score(table, "density") for table in run.tables.values()) else "epistemic"


def _case(table: PredictionTable, row: int, texts: dict[str, ItemText]) -> Case:
    reading = table.reading("own")
    name, size = str(table.ids[row]), int(table.num_options[row])
    known = texts.get(name)
    probs = reading.probs[row, :size]
    broken = bool(table.nan_rows[row])
    chosen = -1 if broken else int(probs.argmax())
    option_texts = known.options if known and len(known.options) == size else ("",) * size
    # Image classes have names, and can be more than there are letters.
    names = table.meta.get("class_names") or (LETTERS if size <= 26 else [str(k) for k in range(size)])
    options = [
        Option(names[k], option_texts[k], float(probs[k]), bool(k == table.labels[row]), k == chosen)
        for k in range(size)
    ]
    if size > 8:  # the correct option and the most probable others
        options = sorted(options, key=lambda option: (-option.right, -option.prob))[:8]
    return Case(
        name,
        known.question if known else None,
        options,
        float(reading.aleatoric[row]),
        float(reading.epistemic[row]),
        broken,
        None if table.familiarity is None else float(table.familiarity[row]),
    )
