"""Baselines: on the same rows, from training rows only, deterministic, and honest about who wins."""

import json

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from dappr_llm.core.errors import UserError
from dappr_llm.evaluation import trivial_baselines
from dappr_llm.evaluation.baseline_results import baseline_results, load_baselines, save_baselines
from dappr_llm.evaluation.evaluators import evaluate_id
from dappr_llm.evaluation.item_texts import ItemText
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.evaluation.reporting import write_report
from dappr_llm.evaluation.reporting.run_results import finish, save_table, show_results
from dappr_llm.evaluation.results import load_results_file
from dappr_llm.evaluation.row_baselines import row_baselines
from dappr_llm.evaluation.runs import load_run
from dappr_llm.evaluation.trivial_baselines import ChoiceRows, ClassRows, choice_baselines, class_baselines, longest
from dappr_llm.evaluation.verdicts import against_baselines, against_chance, verdicts

WORDS = ("card", "transfer", "refund", "limit", "cash", "rate", "pin", "app")


def class_rows(rows, classes=4, seed=0, spoken=0.9):
    """Texts that name their class with probability `spoken`."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=rows)
    named = np.where(rng.random(rows) < spoken, labels, rng.integers(classes, size=rows))
    filler = ("please", "help", "my", "today", "why", "again")
    texts = [
        f"{filler[rng.integers(6)]} {WORDS[k % 8]}{k // 8 or ''} {filler[rng.integers(6)]} {filler[rng.integers(6)]}"
        for k in named
    ]
    return ClassRows(labels, texts)


def run_table(test, classes=4, right=0.5, seed=1, names=True):
    """A "fine-tuned model" that is right with probability `right`."""
    rng, rows = np.random.default_rng(seed), len(test.labels)
    given = np.where(rng.random(rows) < right, test.labels, (test.labels + rng.integers(1, classes, rows)) % classes)
    probs = np.full((rows, classes), 0.2 / (classes - 1))
    probs[np.arange(rows), given] = 0.8
    meta = {"task": "tickets", "split": "test", "num_choices": classes, "task_num_choices": classes, "method": "x"}
    meta |= {"class_names": [f"label {k}" for k in range(classes)]} if names else {}
    return PredictionTable.from_arrays([f"r{i}" for i in range(rows)], test.labels, probs, meta=meta)


def test_the_majority_class_is_scikit_learns_dummy():
    train = ClassRows(np.array([2, 0, 2, 1, 2, -1, -1, -1, -1]))
    test = ClassRows(np.array([0, 2, 2, 1]))
    found = class_baselines(run_table(test, 3), train, test).tables
    assert list(found) == ["majority"]
    known = train.labels[:5].reshape(-1, 1)
    expected = DummyClassifier().fit(known, train.labels[:5]).predict(np.zeros((4, 1)))
    np.testing.assert_array_equal(found["majority"].probs.argmax(axis=1), expected)
    assert np.isfinite(evaluate_id(found["majority"])["nll"]) and (found["majority"].probs > 0).all()


def test_tfidf_learns_the_words_and_never_sees_the_test_labels():
    train, test = class_rows(120), class_rows(200, seed=1)
    found = class_baselines(run_table(test), train, test).tables
    assert evaluate_id(found["tfidf"])["accuracy"] > 0.85 > 0.5 > evaluate_id(found["majority"])["accuracy"]
    shuffled = ClassRows(test.labels[::-1].copy(), test.texts)
    other = class_baselines(run_table(shuffled), train, shuffled).tables["tfidf"]
    np.testing.assert_array_equal(other.probs, found["tfidf"].probs)
    assert found["tfidf"].meta["class_names"] == [f"label {k}" for k in range(4)]


def test_the_probe_is_standardised_logistic_regression():
    rng = np.random.default_rng(0)
    centres = 2 * rng.normal(size=(3, 12))
    labels, other = rng.integers(3, size=150), rng.integers(3, size=80)
    scale = 10.0 ** rng.integers(-3, 4, 12)
    train = ClassRows(labels, None, (centres[labels] + rng.normal(size=(150, 12))) * scale)
    test = ClassRows(other, None, (centres[other] + rng.normal(size=(80, 12))) * scale)
    found = class_baselines(run_table(test, 3), train, test).tables["features"]
    scaler = StandardScaler().fit(train.features)
    model = LogisticRegression(C=found.meta["baseline"]["C"], max_iter=1000)
    expected = model.fit(scaler.transform(train.features), labels).predict_proba(scaler.transform(test.features))
    np.testing.assert_allclose(found.probs, expected, atol=0.02)
    assert evaluate_id(found)["accuracy"] > 0.9


def test_the_same_rows_give_the_same_tables():
    train, test = class_rows(90), class_rows(60, seed=1)
    one, other = (class_baselines(run_table(test), train, test).tables for _ in range(2))
    for name, table in one.items():
        np.testing.assert_array_equal(table.probs, other[name].probs)
        assert table.meta == other[name].meta


@pytest.mark.parametrize("classes", [2, 3, 150, 1000])
def test_any_number_of_classes(classes, monkeypatch):
    monkeypatch.setattr(trivial_baselines, "_ITERATIONS", 5)
    train, test = class_rows(max(30, 2 * classes), classes), class_rows(50, classes, seed=1)
    found = class_baselines(run_table(test, classes), train, test)
    assert set(found.tables) == {"majority", "tfidf"} and not found.skipped
    accuracy = {name: evaluate_id(each)["accuracy"] for name, each in found.tables.items()}
    assert accuracy["tfidf"] >= 0.5 and accuracy["tfidf"] > accuracy["majority"]


def test_odd_training_rows():
    test = class_rows(20, seed=1)
    table = run_table(test)
    one_class = ClassRows(np.zeros(5, dtype=int), ["a b"] * 5)
    assert class_baselines(table, one_class, test).skipped == {"tfidf": "the training rows hold one class only"}
    empty = ClassRows(np.array([0, 1]), ["", " "])
    assert "word" in class_baselines(table, empty, test).skipped["tfidf"]
    single = ClassRows(np.arange(4), list(WORDS[:4]))  # one row per class: nothing to cross-validate with
    assert evaluate_id(class_baselines(table, single, test).tables["tfidf"])["accuracy"] > 0.7
    assert not class_baselines(table, ClassRows(np.array([-1])), test).tables
    with pytest.raises(UserError, match="label 4"):
        class_baselines(table, ClassRows(np.array([4])), test)
    with pytest.raises(UserError, match="3 labels but 2 texts"):
        ClassRows(np.zeros(3, dtype=int), ["a", "b"])


def test_training_rows_are_capped_and_the_cap_is_said(monkeypatch):
    monkeypatch.setattr(trivial_baselines, "_FEWEST_ROWS", 40)
    monkeypatch.setattr(trivial_baselines, "_MOST_ROWS", 40)
    train, test = class_rows(400), class_rows(30, seed=1)
    found = class_baselines(run_table(test), train, test).tables
    assert found["tfidf"].meta["baseline"] | {"C": 0} == {"rows": 40, "of": 400, "C": 0}
    assert found["majority"].meta["baseline"] == {"rows": 400}
    kept = trivial_baselines.stratified_sample(np.array([0] * 90 + [1] * 9 + [2]), 20, seed=0)
    assert len(kept) == 20 and np.bincount(np.array([0] * 90 + [1] * 9 + [2])[kept]).tolist() == [18, 1, 1]


def test_differences_are_paired_and_run_minus_baseline():
    test = class_rows(200, seed=1)
    table = run_table(test, right=0.6)
    results, intervals = baseline_results(table, {"same": table, "better": run_table(test, right=0.9, seed=2)}, 200)
    assert results["minus_baseline/same/accuracy"] == 0 and intervals["minus_baseline/same/accuracy"] == (0, 0)
    gain = evaluate_id(table)["accuracy"] - results["baseline/better/accuracy"]
    assert results["minus_baseline/better/accuracy"] == pytest.approx(gain) and gain < 0
    low, high = intervals["minus_baseline/better/accuracy"]
    assert low < gain < high < 0
    assert intervals["baseline/better/accuracy"][0] < results["baseline/better/accuracy"]
    assert baseline_results(table, {"same": table}, 0)[1] == {}
    with pytest.raises(UserError, match="same rows"):
        baseline_results(table, {"x": table.select(np.arange(10))}, 0)
    with pytest.raises(UserError, match="name"):
        baseline_results(table, {"../x": table}, 0)


def results_of(accuracy, baselines, chance=0.25, interval=0.05):
    results, intervals = {"id/accuracy": accuracy, "id/chance": chance}, {}
    intervals["id/accuracy"] = (accuracy - interval, accuracy + interval)
    for name, value in baselines.items():
        results[f"baseline/{name}/accuracy"] = value
        results[f"minus_baseline/{name}/accuracy"] = accuracy - value
        intervals[f"minus_baseline/{name}/accuracy"] = (accuracy - value - interval, accuracy - value + interval)
    return results, intervals


def test_a_baseline_that_is_not_beaten_is_the_first_sentence():
    first, *_ = verdicts(*results_of(0.8, {"majority": 0.3, "tfidf": 0.85}), fixed_labels=True)
    assert first.startswith("Fine-tuning does not beat this baseline: TF-IDF + logistic regression, 85.0 % right")
    assert "difference -5.0, 95 %: -10.0 to +0.0" in first and "majority" not in first
    # Ahead, but not by more than chance explains.
    assert "does not beat" in against_baselines(*results_of(0.8, {"tfidf": 0.78}))
    both = against_baselines(*results_of(0.8, {"tfidf": 0.78, "features": 0.9}))
    assert "2 of the baselines: frozen features + logistic regression" in both
    assert against_baselines(*results_of(0.8, {"tfidf": 0.7})).startswith("Fine-tuning beats every baseline")
    assert against_baselines(*results_of(0.8, {})) == ""


def test_a_result_at_chance_is_said_with_what_to_try():
    assert against_chance(*results_of(0.8, {}), fixed_labels=True) == ""
    below = against_chance(*results_of(0.1, {}), fixed_labels=True)
    assert below.startswith("The accuracy of 10.0 % (95 %: 5.0 to 15.0) is at or below chance (25.0 %)")
    assert "Try " in below and "model.readout=head" in below
    assert "model.readout" not in against_chance(*results_of(0.25, {}), fixed_labels=False)
    assert "model.readout" not in against_chance(*results_of(0.25, {}), True, "vision")
    assert "not distinguishable from chance" in against_chance(*results_of(0.28, {}), fixed_labels=False)
    assert against_chance({"id/n": 0}, {}, False) == ""


def finished(folder, right, capsys, names=True):
    train, test = class_rows(120), class_rows(150, seed=1)
    table = run_table(test, right=right, names=names)
    save_table(table, [], folder / "predictions" / "tickets-test.npz")
    found = class_baselines(table, train, test)
    finish(folder, {"tickets": table}, "my run", resamples=60, baselines=found.tables)
    return capsys.readouterr().out


def test_a_winning_baseline_everywhere(tmp_path, capsys):
    text = finished(tmp_path, 0.5, capsys)
    lines = text.strip().splitlines()
    assert lines[0] == "my run" and lines[1].startswith("Fine-tuning does not beat this baseline: TF-IDF")
    assert "Was fine-tuning worth it?" in text and max(len(line) for line in lines if str(tmp_path) not in line) <= 100
    content = load_results_file(tmp_path / "results.json")
    assert content.results["minus_baseline/tfidf/accuracy"] < 0 and "baseline/tfidf/accuracy" in content.intervals
    assert content.meta["baselines"]["tfidf"]["rows"] == 120 and content.classes.names[0] == "label 0"
    show_results(tmp_path)
    assert capsys.readouterr().out.splitlines()[1] == lines[1]
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")

    write_report([str(tmp_path)], resamples=60)
    page = (tmp_path / "report" / "report.html").read_text()
    sentence = page.index('<p class="verdict">Fine-tuning does not beat this baseline')
    assert sentence < page.index("<table") and "Was fine-tuning worth it?" in page
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert markdown.startswith("Fine-tuning does not beat this baseline") and "### Classes" in markdown
    assert "baseline/tfidf/accuracy" in (tmp_path / "report" / "report.csv").read_text()


def test_a_run_that_wins_says_so(tmp_path, capsys):
    assert finished(tmp_path, 1.0, capsys).strip().splitlines()[1].startswith("Fine-tuning beats every baseline")


def test_baselines_count_for_their_own_rows_only(tmp_path):
    train, test = class_rows(60), class_rows(40, seed=1)
    table = run_table(test)
    save_baselines(tmp_path, class_baselines(table, train, test).tables)
    assert list(load_baselines(tmp_path, table)) == ["majority", "tfidf"]
    assert load_baselines(tmp_path, table.select(np.arange(39))) == {}
    table.save(tmp_path / "predictions" / "tickets-test.npz")
    assert list(load_run(tmp_path).tables) == ["tickets"]  # a baseline is no task


def choice_items(rows, seed=0, telling="longest"):
    rng = np.random.default_rng(seed)
    items, labels = [], []
    for _ in range(rows):
        size = int(rng.integers(3, 5))
        label = int(rng.integers(size))
        options = [WORDS[k] for k in rng.permutation(8)[:size]]
        if telling == "longest":
            options[label] += " and a good deal of detail"
        question = "What is it?" if telling == "longest" else f"Is it about {options[label]} or not?"
        items.append(ItemText(question, tuple(options)))
        labels.append(label)
    return ChoiceRows(np.array(labels), items)


def choice_table(rows):
    counts = np.array([len(item.options) for item in rows.items])
    probs = np.where(np.arange(4) < counts[:, None], 1 / counts[:, None], 0)
    meta = {"task": "mc", "split": "test", "num_choices": 4, "task_num_choices": 4}
    return PredictionTable.from_arrays([str(i) for i in range(len(counts))], rows.labels, probs, num_options=counts, meta=meta)  # fmt: skip


def test_baselines_of_multiple_choice():
    train, test = choice_items(80), choice_items(60, seed=1)
    found = choice_baselines(choice_table(test), train, test)
    assert list(found.tables) == ["majority_letter", "longest_option", "tfidf_options"] and not found.skipped
    accuracy = {name: evaluate_id(table)["accuracy"] for name, table in found.tables.items()}
    assert accuracy["longest_option"] == 1 and accuracy["majority_letter"] < 0.6
    for table in found.tables.values():
        outside = np.arange(4) >= table.num_options[:, None]
        assert not table.reading("own").probs[outside].any()
    words = choice_baselines(
        choice_table(test), choice_items(80, telling="word"), choice_items(60, seed=1, telling="word")
    )
    assert evaluate_id(words.tables["tfidf_options"])["accuracy"] > 0.9
    assert longest(ItemText("?", ("aa", "bb", "c"))) == 0


class Rows(list):
    """Rows with the columns that a text task has."""

    column_names = ("id", "question", "options", "label")

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def as_rows(labels, texts, options):
    return Rows({"id": str(i), "question": t, "options": options(i), "label": int(y)} for i, (y, t) in enumerate(zip(labels, texts, strict=True)))  # fmt: skip


def test_rows_decide_which_baselines_there_are():
    train, test = class_rows(60), class_rows(30, seed=1)
    same = [as_rows(side.labels, side.texts, lambda i: ["a", "b", "c", "d"]) for side in (train, test)]
    table = run_table(test, names=False)
    assert list(row_baselines(*same, table).tables) == ["majority", "tfidf"]
    features = (np.eye(4)[train.labels], np.eye(4)[test.labels])
    found = row_baselines(*same, table, features=features, others={"zero_shot": table})
    assert list(found.tables) == ["majority", "tfidf", "features", "zero_shot"]
    own = [as_rows(side.labels, side.texts, lambda i: ["a", "b", "c", f"d{i}"]) for side in (train, test)]
    assert list(row_baselines(*own, table).tables) == ["majority_letter", "longest_option", "tfidf_options"]
    images = [type("Images", (), {"labels": side.labels, "__len__": lambda self: 1})() for side in (train, test)]
    assert list(row_baselines(*images, table).tables) == ["majority"]
    assert row_baselines(iter(()), same[1], table).skipped == {"all": "the training rows are a stream"}


def test_results_with_baselines_are_valid_json(tmp_path, capsys):
    finished(tmp_path, 0.5, capsys)
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["classes"][0]["predicted_as"] and content["meta"]["baselines"]["majority"] == {"rows": 120}
    content["classes"][0]["predicted_as"]["nobody"] = 1
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="nobody"):
        load_results_file(tmp_path / "results.json")
