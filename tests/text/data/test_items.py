"""Rows of every layout, and every mistake in them named with its place."""

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.text.data.items import UNKNOWN, Columns, parse_item

OBQA = {
    "id": "7-980",
    "question_stem": "The sun is responsible for",
    "choices": {"text": ["puppies", "children", "flowers", "plants"], "label": ["A", "B", "C", "D"]},
    "answerKey": "D",
}


def parse(row, **columns):
    return parse_item(row, Columns(**columns), "rows.jsonl, line 3", default_id="x")


def test_hub_layout():
    item = parse(OBQA)
    assert (item.id, item.label, item.options[3]) == ("7-980", 3, "plants")


def test_numeric_labels_of_arc_become_positions():
    row = {"question": "q", "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}, "answerKey": "3"}
    assert parse(row).label == 2


@pytest.mark.parametrize("answer, label", [("B", 1), ("b", 1), (1, 1), ("blue", 1), ("Blue", 1), (1.0, 1), ("2", 2)])
def test_answer_as_letter_index_or_text(answer, label):
    assert parse({"question": "q", "choices": ["red", "blue", "sky"], "answer": answer}).label == label


def test_a_number_among_number_options_is_their_text():
    row = {"question": "q", "choices": ["3", "2", "1"], "answer": "1"}
    assert parse(row).label == 2
    assert parse(row, answer_type="index").label == 1
    assert parse({**row, "answer": 0}).label == 0  # a real integer is an index


def test_ambiguous_answers_are_refused():
    row = {"question": "q", "choices": ["B", "A"], "answer": "A"}
    with pytest.raises(UserError, match="could mean several.*answer_type"):
        parse(row)
    assert parse(row, answer_type="text").label == 1
    assert parse(row, answer_type="letter").label == 0
    with pytest.raises(UserError, match="several"):
        parse({"question": "q", "choices": ["x", "x"], "answer": "x"})


def test_one_column_per_option_and_json_text():
    row = {"q": "?", "c1": "red", "c2": "blue", "c3": None, "gold": "blue"}
    item = parse(row, question="q", choices=["c1", "c2", "c3"], answer="gold")
    assert (item.options, item.label) == (("red", "blue"), 1)
    assert parse({"question": "q", "choices": '["red", "blue"]', "answer": "A"}).options == ("red", "blue")


def test_fixed_options_are_text_classification():
    columns = {"question": "text", "answer": "sentiment", "options": ("negative", "positive")}
    assert parse({"text": "good", "sentiment": "positive"}, **columns).label == 1
    assert parse({"text": "good", "sentiment": 0}, **columns).label == 0


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_missing_answers_are_unknown(answer):
    assert parse({"question": "q", "choices": ["a", "b"], "answer": answer}).label == UNKNOWN
    assert parse({"question": "q", "choices": ["a", "b"]}).label == UNKNOWN


@pytest.mark.parametrize(
    "row, words",
    [
        ({"choices": ["a", "b"], "answer": "A"}, "no question column found"),
        ({"question": " ", "choices": ["a", "b"]}, "question is empty"),
        ({"question": "q", "answer": "A"}, "no choices column"),
        ({"question": "q", "choices": ["a"], "answer": "A"}, "1 choice"),
        ({"question": "q", "choices": [], "answer": "A"}, "at least 2"),
        ({"question": "q", "choices": list("abcdefghijklmnopqrstuvwxyz") + ["more"]}, "27 choices.*26 letters"),
        ({"question": "q", "choices": ["a", "b"], "answer": "c"}, "'c' is not among the choices"),
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, "not among"),
        ({"question": "q", "choices": ["a", "b"], "answer": -1}, "not among"),
        ({"question": "q", "choices": ["a", " "], "answer": "A"}, "choice B is empty"),
        ({"question": "q", "choices": "a, b"}, "JSON list"),
        ({"question": "q", "choices": 3}, "expected a list"),
        ({"question": "q", "choices": {"text": ["a", "b"], "label": ["A"]}}, "2 choices but 1"),
    ],
)
def test_mistakes_name_place_and_reason(row, words):
    with pytest.raises(UserError, match=f"rows.jsonl, line 3.*{words}"):
        parse(row)


def test_a_misspelt_column_names_the_nearest():
    with pytest.raises(UserError, match="no column 'question_text'.*'question'"):
        parse({"question": "q", "choices": ["a", "b"]}, question="question_text")
