"""Data checks on plain keys, answers and places: what is counted, what is named, what is an error."""

import logging

import pytest

from dappr_llm.core.data_checks import Part, find, report, too_long
from dappr_llm.core.errors import UserError


def part(name, *rows):
    keys, answers = zip(*rows, strict=True)
    return Part(name, keys, answers, [f"{name}.csv, line {i + 2}" for i in range(len(rows))])


GOOD = [(f"text {i}", "ab"[i % 2]) for i in range(20)]


def texts(findings, level):
    return [each.text for each in findings if each.level == level]


def test_good_rows_pass():
    assert find([part("train", *GOOD), part("test", ("new", "a"), ("newer", "b"))], ["a", "b"]) == []


def test_contradictory_duplicates_are_counted_over_all_parts():
    found = find([part("train", *GOOD, ("text 0", "b")), part("test", ("new", "a"))], ["a", "b"])
    assert texts(found, "warning") == [
        "2 rows have an equal row with another label (first: 'a' (train.csv, line 2) and 'b' (train.csv, line 22))"
    ]


@pytest.mark.parametrize("name, level", [("test", "error"), ("validation", "warning")])
def test_training_rows_elsewhere(name, level):
    (text,) = texts(find([part("train", *GOOD), part(name, ("text 3", "b"), ("new", "a"))], ["a", "b"]), level)
    assert f"1 of 2 {name} rows are training rows too (first: {name}.csv, line 2 = train.csv, line 5)" in text


def test_labels_in_the_test_rows_only():
    (text,) = texts(find([part("train", *GOOD), part("test", ("x", "c"), ("y", "c"))], ["a", "b", "c"]), "error")
    assert text == "the label 'c' (2 rows) occurs in the test rows, but in no training row (first: test.csv, line 2)"


def test_one_label_for_all_rows():
    found = find([part("train", *((f"t{i}", "a") for i in range(5)))], ["a", "b"])
    assert texts(found, "error") == ["all 5 training rows have the label 'a'"]


def test_weak_labels_are_warnings():
    rows = [(f"t{i}", "a") for i in range(30)] + [("u", "b"), ("v", "A")]
    found = texts(find([part("train", *rows)], ["a", "A", "b", "z"]), "warning")
    assert any("no training rows of 1 of 4 labels: 'z'" in text for text in found)
    assert any("2 labels with one training row: 'b', 'A' (first: train.csv, line 32)" in text for text in found)
    assert any("30 training rows of 'a' (94%) and 1 of 'b'" in text for text in found)
    assert any("differ in case or blanks only: 'a' and 'A'" in text for text in found)


def test_rows_with_their_own_options_have_no_labels_to_count():
    assert find([part("train", *((f"t{i}", f"answer {i}") for i in range(5)))]) == []


def test_long_rows_are_estimated():
    (found,) = too_long([10, 2000, 5000], ["f, line 1", "f, line 2", "f, line 3"], limit=300, characters=4)
    assert found.level == "warning" and "2 of 3 rows" in found.text and "f, line 2; line 3" in found.text


def test_errors_stop_or_are_logged(caplog):
    findings = find([part("train", *GOOD), part("test", ("text 3", "b"), ("x", "c"))], ["a", "b", "c"])
    with pytest.raises(UserError, match="tickets: 1 of 2 test rows.*; also: the label 'c'.*data.checks: warn"):
        report(findings, "tickets")
    with caplog.at_level(logging.WARNING):
        report(findings, "tickets", "warn")
    assert "training rows too" in caplog.text and "the label 'c'" in caplog.text
