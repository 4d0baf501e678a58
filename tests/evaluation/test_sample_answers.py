"""The answers that a run shows at its end."""

from dataclasses import replace

import numpy as np

from dappr_llm.evaluation.item_texts import ItemText
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.evaluation.reporting.sample_answers import sample_answers


def _table(name: str, rows: int = 20, **arrays: object) -> PredictionTable:
    alpha = np.random.default_rng(0).gamma(2.0, size=(rows, 3)) + 1
    ids = [f"{name}-{row}" for row in range(rows)]
    return PredictionTable.from_arrays(ids, np.zeros(rows, dtype=int), alpha=alpha, **arrays)


def _texts(table: PredictionTable, question: str = "What is {}?") -> dict[str, ItemText]:
    return {name: ItemText(question.format(name), ("plum", "sock", "violin")) for name in table.ids.tolist()}


def test_shows_own_and_foreign_questions_with_the_tables_figures() -> None:
    own, other = _table("own"), _table("other")
    shown = sample_answers({"everyday": own, "capitals": other}, {"everyday": _texts(own), "capitals": _texts(other)})
    lines = shown.splitlines()
    assert [line for line in lines if line.endswith(":") or ": " in line] == [
        "everyday: what it was trained for",
        "capitals: from elsewhere",
    ]
    questions = [line for line in lines if line.startswith("  What")]
    assert len(questions) == 4 + 3
    for line in questions:
        name = line.split("?")[0].removeprefix("  What is ")
        table = own if name.startswith("own") else other
        row = table.ids.tolist().index(name)
        best = int(table.probs[row].argmax())
        assert ("plum", "sock", "violin")[best] in line
        assert f"{100 * table.probs[row, best]:.1f} %" in line
        assert f"{table.epistemic[row]:.3f}" in line
        assert ("wrong" in line) == (best != 0)
    assert all(len(line) <= 100 for line in lines)


def test_the_choice_does_not_depend_on_the_order_of_rows() -> None:
    table = _table("own")
    turned = table.select(np.arange(len(table))[::-1])
    lines = sample_answers({"t": table}, {"t": _texts(table)}).splitlines()
    assert sorted(sample_answers({"t": turned}, {"t": _texts(table)}).splitlines()) == sorted(lines)


def test_familiarity_has_a_column_where_there_is_a_gate() -> None:
    table = _table("own")
    gated = replace(table, familiarity=np.full(len(table), 0.005, dtype=np.float32))
    assert "familiarity" not in sample_answers({"t": table}, {"t": _texts(table)})
    shown = sample_answers({"t": gated}, {"t": _texts(table)})
    assert "familiarity" in shown and shown.count("0.5 %") == 4
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_long_and_hostile_texts_stay_on_their_line() -> None:
    table = _table("own", rows=5)
    shown = sample_answers({"t": table}, {"t": _texts(table, "What\n\x1b[2J " + "very " * 40 + "long {}?")})
    assert "\x1b" not in shown and len(shown.splitlines()) == 3 + 4
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_without_texts_nothing_is_shown() -> None:
    assert sample_answers({"t": _table("own")}, {}) == ""
