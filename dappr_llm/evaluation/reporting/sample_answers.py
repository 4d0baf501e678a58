"""A few of a run's answers for the terminal: what the figures above them look like, question by question."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from string import ascii_uppercase as LETTERS

import numpy as np

from ...core.terminal import printable
from ..item_texts import ItemText
from ..prediction_table import PredictionTable

_OWN, _FOREIGN, _MOST_FOREIGN = 4, 3, 9  # rows of the own task, of each other task, of all other tasks
_QUESTION, _ANSWER = 42, 16  # characters
_WRONG = "wrong"


def sample_answers(tables: Mapping[str, PredictionTable], texts: Mapping[str, Mapping[str, ItemText]]) -> str:
    """
    Questions of every task with the run's answer, its probability and uncertainty; empty where no texts are known.

    Rows are chosen by a hash of their ids: the same every time, and by nobody's hand.

    Args:
        tables (`Mapping[str, PredictionTable]`):
            By task; the first is in distribution.
        texts (`Mapping[str, Mapping[str, ItemText]]`):
            The items' texts, by task and id.
    """
    known = {task: texts[task] for task in tables if texts.get(task)}
    if not known:
        return ""
    familiarity = any(tables[task].familiarity is not None for task in known)
    lines = [_line("Some answers, chosen by chance", "answer", "", "prob.", "uncertainty", familiarity, "familiarity")]
    lines.append("-" * len(lines[0]))
    own, foreign = next(iter(tables)), 0
    for task, known_texts in known.items():
        count = _OWN if task == own else min(_FOREIGN, _MOST_FOREIGN - foreign)
        rows = _chosen_rows(tables[task], known_texts, count)
        foreign += 0 if task == own else len(rows)
        if rows:
            kind = "what it was trained for" if task == own else "from elsewhere"
            lines.append(f"{printable(task, one_line=True)}: {kind}")
        lines += [_answer(tables[task], row, known_texts, familiarity) for row in rows]
    return "\n".join(lines)


def _chosen_rows(table: PredictionTable, texts: Mapping[str, ItemText], count: int) -> list[int]:
    usable = [row for row in np.flatnonzero(~table.nan_rows) if str(table.ids[row]) in texts]
    order = sorted(usable, key=lambda row: hashlib.sha256(str(table.ids[row]).encode()).digest())
    return sorted(int(row) for row in order[:count])


def _answer(table: PredictionTable, row: int, texts: Mapping[str, ItemText], familiarity: bool) -> str:
    item, reading = texts[str(table.ids[row])], table.select([row]).reading("own")
    best = int(reading.probs[0].argmax())
    names = item.options if len(item.options) > best else tuple(table.meta.get("class_names") or LETTERS)
    answer = names[best] if best < len(names) else str(best)
    label = int(table.labels[row])
    mark = _WRONG if label >= 0 and label != best else ""
    known = "" if table.familiarity is None else _share(float(table.familiarity[row]))
    question, said = _cut(item.question, _QUESTION), _cut(answer, _ANSWER)
    prob, doubt = f"{100 * reading.probs[0, best]:.1f} %", f"{reading.epistemic[0]:.3f}"
    return _line(f"  {question}", said, mark, prob, doubt, familiarity, known)


def _line(question: str, answer: str, mark: str, prob: str, doubt: str, familiarity: bool, known: str) -> str:
    cells = f"{question:<{_QUESTION + 2}} {answer:<{_ANSWER}} {mark:<{len(_WRONG)}} {prob:>7} {doubt:>11}"
    return f"{cells} {known:>11}" if familiarity else cells


def _share(familiarity: float) -> str:
    return f"{100 * familiarity:.1f} %"


def _cut(text: str, width: int) -> str:
    plain = printable(" ".join(text.split()), one_line=True)
    return plain if len(plain) <= width else plain[: width - 1] + "…"
