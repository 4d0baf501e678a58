import numpy as np
import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.evaluation.permutation_audit import evaluate_audit, render_audit, rotated
from dappr_llm.evaluation.prediction_table import PredictionTable


def items(counts):
    return [
        {"id": f"q{i}", "question": "?", "options": [f"{i}-{k}" for k in range(size)], "label": (i * 7) % size}
        for i, size in enumerate(counts)
    ]


def answer(rows, choose, width=5, seed=0):
    """A table of a model that gives most of its evidence to the option `choose(row)`."""
    rng = np.random.default_rng(seed)
    alpha = 1 + rng.random((len(rows), width)) * 0.1
    for i, row in enumerate(rows):
        alpha[i, choose(row)] += 3 + i % 3
    sizes = [len(row["options"]) for row in rows]
    labels = [row["label"] for row in rows]
    meta = {"task": "toy", "split": "test", "num_choices": 4, "task_num_choices": width}
    return PredictionTable.from_arrays([row["id"] for row in rows], labels, alpha=alpha, num_options=sizes, meta=meta)


def test_every_option_stands_once_at_every_letter():
    rows = rotated(items([4, 3]))
    assert [row["id"] for row in rows] == ["q0@0", "q0@1", "q0@2", "q0@3", "q1@0", "q1@1", "q1@2"]
    assert rows[1]["options"] == ["0-1", "0-2", "0-3", "0-0"]
    for row in rows:
        size = len(row["options"])
        right = (int(row["id"][1]) * 7) % size
        assert row["options"][row["label"]] == f"{row['id'][1]}-{right}"
    unknown = rotated([{"id": "u", "question": "?", "options": ["a", "b"], "label": -1}])
    assert [row["label"] for row in unknown] == [-1, -1]


def test_a_model_that_always_takes_the_first_letter():
    table = answer(rotated(items([4] * 20)), lambda row: 0)
    results, intervals = evaluate_audit(table, resamples=50)
    assert (results["flip_rate"], results["switch_rate"]) == (1, 1)
    assert results["position_bias"] == pytest.approx(0.75)
    assert results["accuracy"] == 0.25 and results["accuracy_all"] == 0
    assert (results["chosen/4/A"], results["chosen/4/B"]) == (1, 0)
    assert (results["recall/4/A"], results["recall/4/D"]) == (1, 0)
    assert intervals["flip_rate"] == (1, 1) and intervals["chosen/4/A"] == (1, 1)
    assert (results["n"], results["n_unlabelled"], results["options/4"]) == (20, 0, 20)


def test_a_model_that_follows_the_words():
    rows = rotated(items([4, 5, 3, 4, 4, 2]))
    table = answer(rows, lambda row: row["label"])
    results, _ = evaluate_audit(table.select(np.random.default_rng(0).permutation(len(rows))), resamples=0)
    assert (results["flip_rate"], results["position_bias"]) == (0, pytest.approx(0, abs=1e-12))
    assert results["accuracy"] == results["accuracy_averaged"] == results["accuracy_all"] == 1
    assert [results[f"options/{k}"] for k in (2, 3, 4, 5)] == [1, 1, 3, 1]


def test_figures_against_a_slow_reference():
    rng = np.random.default_rng(1)
    given = items(rng.integers(2, 6, 30))
    rows = rotated(given)
    table = answer(rows, lambda row: int(rng.integers(len(row["options"]))))
    results, intervals = evaluate_audit(table, resamples=200)
    reading, start = table.reading("own"), 0
    flips, switches, right, originals, averaged, epistemic, spread = [], [], [], [], [], [], []
    for item in given:
        size = len(item["options"])
        probs = reading.probs[start : start + size, :size]
        back = np.stack([np.roll(probs[s], s) for s in range(size)])
        words = back.argmax(axis=1)
        flips.append(len(set(words)) > 1)
        switches += [word != words[0] for word in words[1:]]
        right.append((words == item["label"]).mean())
        originals.append(words[0] == item["label"])
        averaged.append(back.mean(axis=0).argmax() == item["label"])
        epistemic.append(reading.epistemic[start : start + size].mean())
        spread.append(reading.epistemic[start : start + size].std())
        start += size
    expected = {
        "flip_rate": np.mean(flips), "switch_rate": np.mean(switches), "accuracy": np.mean(right),
        "accuracy_original": np.mean(originals), "accuracy_averaged": np.mean(averaged), "epistemic": np.mean(epistemic),
        "epistemic_spread": np.mean(spread),
    }  # fmt: skip
    for key, value in expected.items():
        assert results[key] == pytest.approx(value, abs=1e-6), key
        assert intervals[key][0] <= results[key] <= intervals[key][1], key
    # Rotations of one question belong together: intervals are those of 30 questions, not of 100 rows.
    low, high = intervals["epistemic"]
    assert high - low == pytest.approx(2 * 1.96 * np.std(epistemic) / np.sqrt(30), rel=0.25)
    text = render_audit(results, intervals, "title")
    assert "positional bias" in text and "questions with 5 options" in text and max(map(len, text.splitlines())) < 100


def test_unlabelled_questions_are_counted_not_scored():
    rows = rotated([*items([4] * 4), {"id": "u", "question": "?", "options": list("abcd"), "label": -1}])
    results, _ = evaluate_audit(answer(rows, lambda row: max(row["label"], 0)), resamples=10)
    assert results["accuracy"] == 1 and (results["n"], results["n_unlabelled"]) == (5, 1)
    none = [{**row, "label": -1} for row in rows]
    results, _ = evaluate_audit(answer(none, lambda row: 0), resamples=10)
    assert "accuracy" not in results and results["n_unlabelled"] == 5
    assert "accuracy" not in render_audit(results, {}).split("letter")[0]


def test_a_table_that_is_no_audit_is_refused():
    rows = rotated(items([4, 4]))
    with pytest.raises(UserError, match="lacks rotations of item 'q1': it has \\[0, 1, 3\\]"):
        evaluate_audit(answer(rows, lambda row: 0).select([0, 1, 2, 3, 4, 5, 7]))
    with pytest.raises(UserError, match="not an audit's: its id 'a'"):
        evaluate_audit(PredictionTable.from_arrays(["a"], probs=np.full((1, 4), 0.25)))
