"""Classes in reports, pictures and cards: names instead of numbers, whole CSVs, pictures that stay readable."""

import csv
import io
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from random_tables import make_table

from dappr_llm.evaluation.item_texts import save_item_texts
from dappr_llm.evaluation.per_class import class_metrics
from dappr_llm.evaluation.reporting import write_report
from dappr_llm.evaluation.reporting.class_tables import classes_table, confusion_table
from dappr_llm.evaluation.reporting.confusion import MOST_CLASSES, confusion_chart, plot_confusion, shown_classes
from dappr_llm.evaluation.reporting.run_results import finish, save_table
from dappr_llm.evaluation.reporting.svg import short
from dappr_llm.evaluation.reporting.tables import to_text
from dappr_llm.evaluation.reporting.text_tables import render_markdown, render_results
from dappr_llm.evaluation.results import ResultsFile, load_results_file
from dappr_llm.inference.card import eval_results

HOSTILE = '<script>alert("x")</script>'


def named_table(rows, classes, seed=0, names=None):
    table = make_table(rows, seed=seed, options=classes, sharp=40.0, task="toy")
    table.meta |= {"class_names": names or [f"intent_{k}" for k in range(classes)], "split": "test"}
    return table


def write_run(folder, table):
    save_table(table, [], folder / "predictions" / "toy-test.npz")
    finish(folder, {"toy": table}, "run", resamples=20, quiet=True)
    write_report([str(folder)], resamples=20)
    return (folder / "report" / "report.html").read_text()


@pytest.mark.parametrize("classes", [2, 3, 150, 1000])
def test_every_class_is_in_the_results_the_page_and_the_csv(tmp_path, classes):
    table = named_table(3 * classes + 20, classes)
    page = write_run(tmp_path, table).replace("_<wbr>", "_")
    assert load_results_file(tmp_path / "results.json").classes.names == table.meta["class_names"]
    assert page.count('<th scope="row">intent_') >= classes
    rows = list(csv.DictReader(io.StringIO((tmp_path / "report" / "classes.csv").read_text())))
    assert [row["class"] for row in rows] == table.meta["class_names"]
    pairs = list(csv.DictReader(io.StringIO((tmp_path / "report" / "confusion.csv").read_text())))
    assert sum(int(row["rows"]) for row in pairs) == len(table)
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "report" / "report.md").read_text()) < 100_000


def test_names_of_classes_are_escaped(tmp_path):
    page = write_run(tmp_path, named_table(40, 3, names=[HOSTILE, "=1+1", "a|b"]))
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "'=1+1" in (tmp_path / "report" / "classes.csv").read_text()
    assert "a\\|b" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize(("classes", "cell"), [(8, 34), (40, 17), (150, 9), (1000, 9)])
def test_the_picture_stays_readable(classes, cell):
    """Each class has a row of its own, as high as its label's letters, with a label on both sides."""
    found = class_metrics(named_table(4 * classes, classes))
    chart = confusion_chart(found)
    size = min(classes, MOST_CLASSES)
    sizes = {int(width) for width in re.findall(r'<rect class="cell c\d"[^>]* width="(\d+)"', chart.svg)}
    assert sizes == {cell - 1}
    labels = re.findall(r'<text class="(?:large|middle|small)"[^>]*>([^<]+)</text>', chart.svg)
    assert len(labels) == 2 * size and set(labels) == {found.names[k] for k in shown_classes(found)}
    assert ("1000 classes with the most errors" in chart.caption) == (classes > MOST_CLASSES)
    assert 'role="img"' in chart.svg and chart.kind == "wide"


def test_classes_that_are_confused_stand_side_by_side():
    table = named_table(300, 30)
    probs = np.full((300, 30), 0.001)
    table.labels = np.arange(300) % 30
    given = np.where(np.arange(300) < 150, table.labels, (table.labels + 15) % 30)  # k is confused with k + 15
    probs[np.arange(300), given] = 1 - 0.029
    found = class_metrics(type(table).from_arrays(table.ids, table.labels, probs, meta=table.meta))
    place = {int(k): i for i, k in enumerate(shown_classes(found))}
    assert all(abs(place[k] - place[k + 15]) == 1 for k in range(15))
    assert shown_classes(class_metrics(named_table(60, 5))).tolist() == [0, 1, 2, 3, 4]  # few: their own order


def test_the_picture_of_classes_that_never_occur(tmp_path):
    found = class_metrics(named_table(20, 40).select(np.arange(3)))
    plot_confusion(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
    assert np.isnan(found.f1).any()
    assert "–" in {cell.text for _, cells in classes_table(found).rows for cell in cells}


def test_an_old_picture_is_removed_with_its_classes(tmp_path):
    write_run(tmp_path, named_table(30, 3))
    finish(tmp_path, {"toy": make_table(30, options=3)}, "run", resamples=0, quiet=True)
    assert not (tmp_path / "confusion.png").exists()
    assert load_results_file(tmp_path / "results.json").classes is None


def test_the_terminal_shows_the_weakest_classes():
    table = named_table(600, 150)
    found = class_metrics(table)
    text = render_results({"id/accuracy": 0.5, "id/balanced_accuracy": 0.4, "id/n": 600}, classes=found)
    assert "Classes, the 6 of 150 with the lowest F1" in text and "balanced accuracy" in text
    assert found.names[found.worst_first()[0]] in text and max(map(len, text.splitlines())) <= 100
    few = class_metrics(named_table(60, 3))
    assert "of 3 with" not in render_results({"id/accuracy": 0.5}, classes=few)
    odd = replace(few, names=["x" * 80 + "1", "x" * 80 + "2", "z"])
    assert max(map(len, to_text(classes_table(odd, narrow=True)).splitlines())) <= 100
    assert short("x" * 80 + "1") != short("x" * 80 + "2")


def test_matrix_as_a_table_up_to_20_classes():
    table = confusion_table(class_metrics(named_table(90, 20)))
    assert sum(int(cell.text) for _, cells in table.rows for cell in cells) == 90
    assert confusion_table(class_metrics(named_table(90, 21))) is None


def test_the_card_shows_classes_and_baselines():
    found = class_metrics(named_table(60, 3))
    results = {"id/accuracy": 0.6, "id/chance": 1 / 3, "baseline/tfidf/accuracy": 0.7}
    results |= {"minus_baseline/tfidf/accuracy": -0.1}
    text = render_markdown(results, {}, found, {"baselines": {"tfidf": {"rows": 10, "of": 20}}})
    assert text.startswith("Fine-tuning does not beat this baseline: TF-IDF")
    assert "TF-IDF + logistic regression (on 10 of 20 rows)" in text and "| intent\\_0 |" in text
    assert "OOD task" not in text  # a baseline is no OOD task


def test_labels_that_all_items_share_are_classes(tmp_path):
    """A run on letters with fixed labels does not name its classes in the table; its item texts do."""
    table = make_table(40, options=2, task="toy")
    table.meta["split"] = "test"
    table.save(tmp_path / "predictions" / "toy-test.npz")
    rows = [{"id": i, "question": "?", "options": ["spam", "ham"]} for i in table.ids]
    save_item_texts(rows, tmp_path / "predictions" / "toy-test.npz")
    finish(tmp_path, {"toy": table}, "run", resamples=0, quiet=True)
    assert load_results_file(tmp_path / "results.json").classes.names == ["spam", "ham"]


def test_a_baseline_is_not_published_as_the_models_metric():
    results = {"id/accuracy": 0.9, "baseline/tfidf/accuracy": 0.8, "minus_baseline/tfidf/accuracy": 0.1}
    found = eval_results("text-classification", ResultsFile(results, {"id": "toy"}))
    assert [entry.metric_value for entry in found] == [0.9]


def test_scikit_learn_is_imported_only_where_it_computes():
    names = ("trivial_baselines", "row_baselines", "baseline_results", "per_class", "verdicts", "reporting.write")
    code = "import sys\n" + "".join(f"import dappr_llm.evaluation.{name}\n" for name in names)
    code += "print(sorted({'sklearn', 'scipy', 'torch', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
