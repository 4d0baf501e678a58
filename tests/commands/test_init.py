"""`dappr init`: what is found in a file, the recipe that is written, and files that cannot be learnt from."""

import csv
import json

import pytest

from dappr_llm.commands.main import main
from dappr_llm.core.recipe import load_recipe
from dappr_llm.text.data.proposal import SUMMARY
from dappr_llm.text.data.tasks import load_items, task_of_run


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_csv(path, rows, delimiter=",", encoding="utf-8"):
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def tickets(count=80, text="text", label="label", labels=("billing", "bug: new", "yes", "1")):
    return [{text: f"ticket number {i} says", label: labels[i % len(labels)]} for i in range(count)]


def test_a_csv_of_texts_and_labels(folder, capsys):
    write_csv(folder / "tickets.csv", tickets())
    assert main(["init", "tickets.csv"]) == 0
    printed = capsys.readouterr().out
    assert (
        "80 rows" in printed
        and "4 labels (" in printed
        and "billing 20" in printed
        and "train 64, validation 8, test 8" in printed
    )
    assert "dappr train tickets.yaml" in printed and "dappr ask runs/tickets" in printed
    recipe = load_recipe("tickets.yaml")
    assert (
        recipe.model.readout == "head" and recipe.model.dtype == "auto" and recipe.data.train["path"] == "tickets.csv"
    )
    text = (folder / "tickets.yaml").read_text()
    assert "# 20 rows" in text and text.count("#") > 8
    task = task_of_run(recipe)
    assert task.labels == ("1", "billing", "bug: new", "yes")
    assert [len(load_items(task, part)) for part in ("train", "validation", "test")] == [64, 8, 8]


def test_few_rows_get_words_that_sum_a_text_up(folder):
    for count, found in ((80, {"template": SUMMARY}), (400, None)):
        write_csv(folder / "t.csv", tickets(count=count))
        assert main(["init", "t.csv", "--overwrite"]) == 0
        assert load_recipe("t.yaml").train.get("prompt") == found


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "semicolon", "latin-1"])
def test_every_kind_of_file(folder, kind):
    rows = tickets(text="Inhalt der Nachricht", label="Warteschlange", labels=("Rückfrage", "Störung"))
    name = {"jsonl": "t.jsonl", "parquet": "t.parquet"}.get(kind, "t.csv")
    if kind == "jsonl":
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        import pandas as pd

        pd.DataFrame(rows).to_parquet(folder / name)
    else:
        write_csv(folder / name, rows, ";" if kind == "semicolon" else ",", "utf-8" if kind == "semicolon" else kind)
    more = ["--encoding", kind] if kind == "latin-1" else []
    assert main(["init", name, "--out", "own.yaml", *more]) == 0
    task = task_of_run(load_recipe("own.yaml"))  # columns are found by what they hold
    assert (task.columns.question, task.columns.answer) == ("Inhalt der Nachricht", "Warteschlange")
    assert task.labels == ("Rückfrage", "Störung")


@pytest.mark.parametrize("own", [True, False])
def test_multiple_choice(folder, own):
    rows = [{"question": f"q{i}", "choice_a": "x", "choice_b": f"y{i}", "answer": "AB"[i % 2]} for i in range(40)]
    if own:
        rows = [
            {"question": r["question"], "choices": [r["choice_a"], r["choice_b"]], "answer": r["answer"]} for r in rows
        ]
    (folder / "exam.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["init", "exam.jsonl"]) == 0
    recipe = load_recipe("exam.yaml")
    assert recipe.model.readout == "letters"
    items = load_items(task_of_run(recipe), "train")
    assert items.labels is None and items[0]["options"][0] == "x" and set(items["label"]) == {0, 1}


def test_many_labels_are_counted_and_not_listed(folder, capsys):
    write_csv(folder / "t.csv", tickets(450, labels=[f"label {i}" for i in range(150)]))
    assert main(["init", "t.csv"]) == 0
    assert "150 labels" in capsys.readouterr().out and "# 150 labels" in (folder / "t.yaml").read_text()
    assert len(task_of_run(load_recipe("t.yaml")).labels) == 150


def test_columns_can_be_named(folder):
    rows = [{"a": f"question {i}", "b": f"answer {i}", "right": "ny"[i % 2], "wing": "lr"[i % 2]} for i in range(40)]
    write_csv(folder / "t.csv", rows)
    assert main(["init", "t.csv", "--text", "{a} -> {b}", "--label", "right", "--labels", "y", "n"]) == 0
    task = task_of_run(load_recipe("t.yaml"))
    assert task.labels == ("y", "n") and load_items(task, "test")[0]["question"].startswith("question")


@pytest.mark.parametrize(
    "rows, words",
    [
        ([{"text": f"t{i}", "label": ["a", "b"]} for i in range(40)], "multi-label"),
        (tickets(60, labels=("a", "b", "a;b")), "multi-label"),
        ([{"text": f"t{i}", "label": i / 7 + 0.01} for i in range(40)], "regression"),
        ([{"text": f"t{i}", "label": f"words {i}"} for i in range(40)], "free text"),
        (tickets(40, labels=("same",)), "all 40 rows have the label 'same'"),
        ([{"a": f"t{i}", "b": f"u{i}"} for i in range(40)], "no label column found among 'a', 'b'"),
        (tickets(2), "too few"),
        ([{"text": f"t{i}"} for i in range(40)], "has one column, 'text'"),
    ],
)
def test_what_cannot_be_learnt_from(folder, capsys, rows, words):
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["init", "t.jsonl"]) == 2
    assert words in capsys.readouterr().err and not (folder / "t.yaml").exists()


def test_what_the_checks_say_is_shown(folder, capsys):
    write_csv(folder / "t.csv", [*tickets(80), {"text": "ticket number 0 says", "label": "yes"}])
    assert main(["init", "t.csv"]) == 0
    assert "2 rows have an equal row with another label" in capsys.readouterr().out


def test_a_recipe_is_not_overwritten(folder, capsys):
    write_csv(folder / "t.csv", tickets())
    (folder / "t.yaml").write_text("mine")
    assert main(["init", "t.csv"]) == 2 and "--overwrite" in capsys.readouterr().err
    assert (folder / "t.yaml").read_text() == "mine"
    assert main(["init", "t.csv", "--overwrite"]) == 0
    assert main(["init", "t.csv", "--out", "t.txt"]) == 2


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("none.csv", None, "no such file"),
        ("t.csv", b"", "has no rows"),
        ("t.csv", b"text,label\n", "has no rows"),
        ("t.txt", b"text,label\n", "unknown kind of file"),
        ("t.csv", "text,label\nü,1\n".encode("utf-16"), "encoding: utf-16"),
        ("t.csv", "text,label\nü,1\n".encode("latin-1"), "iconv -f latin-1"),
    ],
)
def test_files_that_cannot_be_read(folder, capsys, name, content, words):
    if content is not None:
        (folder / name).write_bytes(content)
    assert main(["init", name]) == 2
    complaint = capsys.readouterr().err
    assert words in complaint and complaint.count("\n") == 1 and not list(folder.glob("*.yaml"))
