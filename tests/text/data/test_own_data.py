"""One's own files: fixed labels, readings of label columns, splits, and what a run's other files inherit."""

import csv
import json
import logging

import pytest

from dappr_llm.core.checkpoint import sha256
from dappr_llm.core.errors import UserError
from dappr_llm.core.recipe import build_recipe, load_recipe
from dappr_llm.text.build import build_data, build_task, find_task, load_rows
from dappr_llm.text.data.checks import check_recipe
from dappr_llm.text.data.tasks import (
    TASKS,
    describe,
    get_task,
    inherit,
    labels_of,
    load_items,
    load_task,
    most_options,
    settle_recipe,
    task_of_run,
)


def write_csv(path, rows, delimiter=",", encoding="utf-8"):
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tickets(count=60, labels=("billing", "bug", "login", "other")):
    return [{"text": f"ticket number {i}", "label": labels[i % len(labels)]} for i in range(count)]


def recipe_of(train, **data):
    return build_recipe({"data": {"train": train, **data}})


# --- fixed labels ---------------------------------------------------------------------------------------------------


def test_text_and_label_columns_need_no_description(tmp_path):
    rows = load_items(write_csv(tmp_path / "t.csv", tickets()), "train")
    assert rows.labels == ("billing", "bug", "login", "other")
    assert rows[1]["label"] == 1 and rows[1]["options"] is rows[2]["options"]


@pytest.mark.parametrize("text", ["text", "sentence", "utterance", "query", "message", "content", "body", "Text"])
@pytest.mark.parametrize("label", ["label", "class", "category", "intent", "target", "Label"])
def test_usual_names_are_guessed(tmp_path, text, label):
    rows = [{text: row["text"], label: row["label"]} for row in tickets(12)]
    assert len(load_items(write_csv(tmp_path / "t.csv", rows), "train").labels) == 4


@pytest.mark.parametrize("count", [2, 27, 150, 1000])
def test_any_number_of_labels_without_a_copy_in_every_row(tmp_path, count):
    names = [f"label {i:04}" for i in range(count)]
    dataset = load_task(write_jsonl(tmp_path / "t.jsonl", tickets(3 * count, names)), "train")
    assert labels_of(dataset) == tuple(names) and most_options(dataset) == count
    assert dataset["label"][:3] == [0, 1, 2 % count]
    assert ("options" in dataset.column_names) == (count <= 26)
    assert dataset.data.nbytes < 100 * len(dataset) + 2000


def test_labels_keep_the_order_in_which_they_are_given_and_are_sorted_otherwise(tmp_path):
    path = write_csv(tmp_path / "t.csv", tickets(12, ("no", "yes")))
    assert load_items({"path": path, "labels": ["yes", "no"]}, "train").labels == ("yes", "no")
    assert load_items({"path": path, "options": ["yes", "no"]}, "train")["label"] == [1, 0] * 6
    path = write_csv(tmp_path / "n.csv", tickets(40, ("10", "9", "2", "-1")))
    assert load_items(path, "train").labels == ("-1", "2", "9", "10")


def test_labels_are_those_of_the_training_rows(tmp_path):
    train = write_csv(tmp_path / "a.csv", tickets(12, ("x", "y")))
    test = write_csv(tmp_path / "b.csv", tickets(12, ("w", "x")))
    spec = {"name": "mine", "splits": {"train": train, "test": test}}
    with pytest.raises(UserError, match=r"b.csv, line 2: the label 'w' is not among the 2 labels"):
        load_items(spec, "test")


def test_a_text_may_be_a_template_or_several_columns(tmp_path):
    rows = [{"q": f"q{i}", "a": "{q}", "note": "", "ok": "right" if i % 2 else "wrong"} for i in range(12)]
    path = write_csv(tmp_path / "t.csv", rows)
    found = load_items({"path": path, "text": "Q: {q} A: {a}", "label": "ok"}, "train")
    assert found[3]["question"] == "Q: q3 A: {q}"  # values are put in as they are
    assert load_items({"path": path, "text": ["q", "note", "a"], "label": "ok"}, "train")[3]["question"] == "q3\n\n{q}"
    for bad in ("{q.__class__}", "{q!r}", "{q:>9}", "{}", "{q", "{{q}}"):
        with pytest.raises(UserError, match="template"):
            load_items({"path": path, "text": bad, "label": "ok"}, "train")
    with pytest.raises(UserError, match="no column 'qq' for the text; did you mean 'q'"):
        load_items({"path": path, "text": "{qq}", "label": "ok"}, "train")


# --- labels are never shifted ---------------------------------------------------------------------------------------

STARS = ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("top", [4, 5])  # without and with a row of the top label
@pytest.mark.parametrize("given", [False, True])
def test_star_ratings_are_names_in_every_format(tmp_path, caplog, top, given):
    rows = [{"text": f"review {i}", "label": i % top + 1} for i in range(40)]
    more = {"labels": [1, 2, 3, 4, 5]} if given else {}
    with caplog.at_level(logging.INFO):
        found = [
            load_items({"path": write(tmp_path / name, rows), **more}, "train")
            for write, name in ((write_jsonl, "t.jsonl"), (write_csv, "t.csv"))
        ]
    for items in found:
        assert items.labels == tuple(STARS if given else STARS[:top])
        assert [items.labels[label] for label in items["label"]] == [str(row["label"]) for row in rows]
    assert "read as names" in caplog.text


def test_positions_are_read_only_where_names_cannot_be_meant(tmp_path, caplog):
    rows = [{"text": f"t{i}", "label": i % 3} for i in range(30)]
    names = {"labels": ["bad", "fair", "good"]}
    with caplog.at_level(logging.INFO):
        for path in (write_jsonl(tmp_path / "t.jsonl", rows), write_csv(tmp_path / "t.csv", rows)):
            assert load_items({"path": path, **names}, "train")["label"] == [0, 1, 2] * 10
    assert "read as positions, from 0: 0 = 'bad'" in caplog.text
    with pytest.raises(UserError, match="label '0' is not among the 5 labels"):  # 0…4 for the names 1…5
        load_items({"path": path, "labels": STARS}, "train")


def test_numbers_with_gaps_from_pandas_are_the_same_labels(tmp_path):
    rows = [{"text": f"t{i}", "label": float(i % 2 + 1)} for i in range(20)]
    for path in (write_jsonl(tmp_path / "t.jsonl", rows), write_csv(tmp_path / "t.csv", rows)):
        assert load_items(path, "train").labels == ("1", "2")


@pytest.mark.parametrize("write, name", [(write_jsonl, "t.jsonl"), (write_csv, "t.csv")])
def test_whole_numbers_as_answers_are_one_thing_for_a_whole_file(tmp_path, write, name):
    """Own options: numbers that are options in every row are options; if one is not, all are positions."""

    def rows(*answers):
        return [{"question": "q", "a": "2", "b": "1", "answer": answer} for answer in answers]

    spec = {"question": "question", "choices": ["a", "b"], "answer": "answer"}
    path = write(tmp_path / name, rows(1, 2, 1))
    assert load_items({"path": path, **spec}, "train")["label"] == [1, 0, 1]
    path = write(tmp_path / name, rows(1, 0, 1))
    assert load_items({"path": path, **spec}, "train")["label"] == [1, 0, 1]


@pytest.mark.parametrize(
    "labels, words",
    [
        (["a", "b", "a;b"], "line 4.*'a;b'.*multi-label"),
        ([["a"], ["a", "b"]], "line 1: the label is a list.*multi-label"),
        (["['a', 'b']", "['a']"], "the label is a list"),
        ([0.5, 1.25, 3.0], "the number 0.5: regression"),
        ([f"an answer in words, number {i}" for i in range(60)], "60 different labels in 60 rows: free text"),
        (["spam"], "all 60 rows have the label 'spam'"),
        ([None], "no row has a label"),
    ],
)
def test_what_is_no_column_of_labels_is_refused(tmp_path, labels, words):
    rows = [{"text": f"t{i}", "label": labels[i % len(labels)]} for i in range(60)]
    if "line 4" in words:
        words = words.replace("line 4", "line 3")
    with pytest.raises(UserError, match=words):
        load_items(write_jsonl(tmp_path / "t.jsonl", rows), "train")


def test_several_labels_in_a_cell_are_refused_where_labels_are_given(tmp_path):
    rows = tickets(9, ("a", "b", "b;a"))
    with pytest.raises(UserError, match="line 4: the label 'b;a' names several labels"):
        load_items({"path": write_csv(tmp_path / "t.csv", rows), "labels": ["a", "b"]}, "train")


# --- one file, three splits -----------------------------------------------------------------------------------------


def test_a_single_file_is_split_once_into_disjoint_parts(tmp_path, caplog):
    rows = tickets(60)
    rows += [{"text": rows[i]["text"].upper() + " ", "label": rows[i]["label"]} for i in range(20)]
    recipe = recipe_of(write_csv(tmp_path / "tickets.csv", rows))
    with caplog.at_level(logging.INFO):
        task = build_task(recipe)
        train, validation = build_data(recipe, task)
        test = load_rows(task, "test")
    parts = [{text.strip().lower() for text in part["question"]} for part in (train, validation, test)]
    assert len(train) + len(validation) + len(test) == 80 and sum(map(len, parts)) == 60
    assert len(validation) >= 4 and len(test) >= 4 and {*test["label"]} == {*validation["label"]} == {0, 1, 2, 3}
    assert caplog.text.count("80 rows split into train") == 1


def test_the_seed_of_the_training_does_not_move_rows(tmp_path):
    path = write_csv(tmp_path / "tickets.csv", tickets())
    first, other = (
        load_rows(build_task(build_recipe({"data": {"train": path}, "train": {"seed": seed}})), "test")["question"]
        for seed in (0, 1)
    )
    assert first == other


def test_only_missing_splits_are_dealt_out(tmp_path):
    train, test = write_csv(tmp_path / "a.csv", tickets(60)), write_csv(tmp_path / "b.csv", tickets(8))
    task = build_task(recipe_of({"name": "mine", "splits": {"train": train, "test": test}}))
    assert task.fractions == {"train": 0.8, "validation": 0.2}
    assert [len(load_rows(task, split)) for split in ("train", "validation", "test")] == [48, 12, 8]
    assert not build_task(recipe_of({"splits": {"train": train, "test": test}}, validation_split=None)).fractions
    recipe = recipe_of(train, validation_fraction=0.25)
    assert build_task(recipe).fractions == {"train": 0.65, "test": 0.1, "validation": 0.25}


def test_given_fractions_are_kept(tmp_path):
    path = write_csv(tmp_path / "t.csv", tickets(100))
    spec = {
        "path": path,
        "fractions": {"train": 0.5, "calibration": 0.2, "validation": 0.1, "test": 0.2},
        "split_seed": 3,
    }
    task = build_task(recipe_of(spec))
    assert [len(load_rows(task, split)) for split in spec["fractions"]] == [50, 20, 10, 20]


def test_a_stream_cannot_be_dealt_out(tmp_path):
    path = write_csv(tmp_path / "t.csv", tickets())
    with pytest.raises(UserError, match="data.streaming .* cannot deal out test and validation"):
        build_task(recipe_of(path, streaming=True))


# --- what a run remembers -------------------------------------------------------------------------------------------


def test_the_recipe_of_a_run_holds_what_was_found(tmp_path):
    path = write_csv(tmp_path / "tickets.csv", tickets())
    recipe = settle_recipe(recipe_of(path))
    assert recipe.data.train == {
        "sha256": {"*": sha256(path)},
        "name": "tickets",
        "path": path,
        "text": "text",
        "label": "label",
        "labels": ["billing", "bug", "login", "other"],
        "answer_type": "text",
        "fractions": {"train": 0.8, "test": 0.1, "validation": 0.1},
        "split_seed": 0,
    }
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    again = load_recipe(tmp_path / "recipe.yaml")
    assert task_of_run(again) == task_of_run(recipe) == build_task(recipe_of(path))
    assert settle_recipe(again).data.train == recipe.data.train
    check_recipe(again)
    write_csv(tmp_path / "tickets.csv", tickets(81))
    with pytest.raises(UserError, match=r"tickets.csv is not the file that the recipe means.*remove sha256"):
        check_recipe(again)
    check_recipe(settle_recipe(recipe_of(path)))


def test_recipes_of_the_registry_stay_as_they_are():
    assert settle_recipe(recipe_of("obqa")).data.train == "obqa"
    for task in TASKS.values():
        assert get_task(describe(task)) == task


def test_new_files_inherit_columns_labels_and_reading(tmp_path):
    rows = [{"body": row["text"], "queue": row["label"], "text": "another column"} for row in tickets()]
    path = write_csv(tmp_path / "tickets.csv", rows)
    own = task_of_run(recipe_of({"path": path, "text": "body", "label": "queue"}))
    new = inherit(own, write_csv(tmp_path / "new.csv", [{"body": "b", "queue": "login", "text": "x"}]))
    item = load_items(new, "test")[0]
    assert (item["question"], item["label"], item["options"]) == ("b", 2, own.labels)
    unlabelled = inherit(own, write_csv(tmp_path / "u.csv", [{"body": "b"}]))
    assert load_items(unlabelled, "test", labelled=False)["label"] == [-1]
    with pytest.raises(UserError, match="label 'holiday' is not among the 4 labels"):
        load_items(inherit(own, write_csv(tmp_path / "w.csv", [{"body": "b", "queue": "holiday"}])), "test")
    assert inherit(own, path) is own and inherit(own, "tickets") is own  # with its splits


def test_files_of_own_options_inherit_too(tmp_path):
    rows = [{"stem": f"q{i}", "x": "2", "y": "1", "gold": i % 2} for i in range(30)]
    spec = {"question": "stem", "choices": ["x", "y"], "answer": "gold"}
    own = task_of_run(recipe_of({"path": write_csv(tmp_path / "a.csv", rows), **spec}))
    new = write_csv(tmp_path / "b.csv", [{"stem": "q", "x": "2", "y": "1", "gold": 1}])
    assert load_items(inherit(own, new), "test")["label"] == [1]  # a position, as in training


def test_ood_tasks_inherit_labels_and_have_none_of_their_own(tmp_path):
    own = build_task(recipe_of(write_csv(tmp_path / "tickets.csv", tickets())))
    other = write_csv(
        tmp_path / "ood.csv", [{"text": "weather?", "label": "weather"}, {"text": "bill", "label": "bug"}]
    )
    items = load_items(find_task(other, own), "test", labelled=False)
    assert items["label"] == [-1, 1] and items["options"] == [own.labels] * 2
    items = load_items(find_task("everyday", own), "test", labelled=False)
    assert set(items["label"]) == {-1} and items[0]["options"] == own.labels


def test_a_missing_label_column_is_named(tmp_path):
    path = write_csv(tmp_path / "t.csv", tickets())
    for spec in ({"label": "lable"}, {"label": "lable", "labels": ["billing", "bug", "login", "other"]}):
        with pytest.raises(UserError, match="no column 'lable' for the label; did you mean 'label'"):
            load_items({"path": path, **spec}, "train")
    rows = [{"question": "q", "choices": '["a", "b"]', "answer": "A"}]
    with pytest.raises(UserError, match="no column 'anser' for the answer; did you mean 'answer'"):
        load_items({"path": write_csv(tmp_path / "m.csv", rows), "answer": "anser"}, "train")


# --- the registry ---------------------------------------------------------------------------------------------------


def test_clinc_keeps_its_out_of_scope_queries_apart(tmp_path):
    folder = tmp_path / "clinc_oos"
    folder.mkdir()
    rows = [{"text": f"t{i}", "intent": ("pay", "translate", "oos")[i % 3]} for i in range(12)]
    for split in ("train", "test"):  # as on the Hub: all in one
        write_jsonl(folder / f"{split}.jsonl", rows)
    items = load_items("clinc_oos", "train", tmp_path)
    assert items.labels == ("pay", "translate") and len(items) == 8
    own = task_of_run(recipe_of("clinc_oos", root=str(tmp_path)))
    out = load_items(find_task("clinc_oos_oos", own), "test", tmp_path, labelled=False)
    assert out["question"] == ["t2", "t5", "t8", "t11"] and set(out["label"]) == {-1}
    write_jsonl(folder / "oos_test.jsonl", [{"text": "only", "intent": "oos"}])  # a file of their own
    assert load_items(find_task("clinc_oos_oos", own), "test", tmp_path, labelled=False)["question"] == ["only"]
    assert describe(own) == {"name": "clinc_oos", "labels": ["pay", "translate"]}


def test_banking77_deals_out_its_validation_rows(tmp_path):
    (tmp_path / "banking77").mkdir()
    write_jsonl(tmp_path / "banking77" / "train.jsonl", tickets(80))
    write_jsonl(tmp_path / "banking77" / "test.jsonl", [{"text": "x", "label": "bug"}])
    own = task_of_run(recipe_of("banking77", root=str(tmp_path)))
    assert [len(load_items(own, split, tmp_path)) for split in ("train", "validation", "test")] == [72, 8, 1]


def test_boolq_is_yes_or_no_about_a_passage(tmp_path):
    (tmp_path / "boolq").mkdir()
    rows = [{"question": f"is it {i}", "passage": "It is.", "answer": bool(i % 2)} for i in range(20)]
    write_jsonl(tmp_path / "boolq" / "train.jsonl", rows)
    write_jsonl(tmp_path / "boolq" / "validation.jsonl", rows[:2])
    items = load_items("boolq", "test", tmp_path)
    assert items.labels == ("no", "yes") and items["label"] == [0, 1]
    assert items[0]["question"] == "It is.\n\nQuestion: is it 0?"


def test_class_names_of_the_hub_are_the_labels(tmp_path, monkeypatch):
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["b", "a"])})
    rows = {"text": [f"t{i}" for i in range(20)], "label": [i % 2 for i in range(20)]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: dataset)
    items = load_items("someone/tickets", "test")
    assert items.labels == ("a", "b") and items["label"] == [1, 0] * 10
    dataset.to_parquet(tmp_path / "t.parquet")
    assert load_items(str(tmp_path / "t.parquet"), "train")["label"] == [1, 0] * 10


# --- reading files --------------------------------------------------------------------------------------------------


def test_semicolons_and_long_fields(tmp_path):
    rows = tickets(20)
    rows[3]["text"] = "a, b; c " * 25_000  # 200,000 characters
    for delimiter in ";\t|":
        items = load_items(write_csv(tmp_path / "t.csv", rows, delimiter), "train")
        assert items["question"] == [row["text"] for row in rows]


@pytest.mark.parametrize("encoding, named", [("utf-16", "utf-16"), ("utf-16-le", "utf-16"), ("latin-1", "latin-1")])
def test_other_encodings_are_named_and_read(tmp_path, encoding, named):
    rows = [{"text": f"Überweisung {i}", "label": "ja" if i % 2 else "nein"} for i in range(12)]
    path = write_csv(tmp_path / "t.csv", rows, encoding=encoding)
    with pytest.raises(
        UserError, match=f"t.csv: not UTF-8 text.*`encoding: {named}`.*iconv -f {named} -t utf-8 t.csv"
    ):
        load_items(path, "train")
    items = load_items({"path": path, "encoding": encoding}, "train")
    assert items[1]["question"] == "Überweisung 1"
    with pytest.raises(UserError, match="Unknown encoding 'latin-one'; did you mean 'latin-1'"):
        load_items({"path": path, "encoding": "latin-one"}, "train")
    own = task_of_run(recipe_of({"path": path, "encoding": encoding}))
    if encoding != "utf-16-le":
        new = write_csv(tmp_path / "n.csv", rows, encoding=encoding)
        assert load_items(inherit(own, new), "test")[1]["question"] == "Überweisung 1"
    assert load_items(inherit(own, write_csv(tmp_path / "u.csv", rows)), "test")[1]["question"] == "Überweisung 1"


def test_data_frames_are_rows():
    import pandas as pd

    from dappr_llm.core.data_frames import as_rows
    from dappr_llm.text.data.tasks import items_of

    rows = pd.DataFrame([{**row, "label": i % 3 + 1} for i, row in enumerate(tickets(12))])
    items = items_of(rows)
    assert (
        items.labels == ("1", "2", "3")
        and items["label"] == [0, 1, 2] * 4
        and items[0]["options"] is items[1]["options"]
    )
    assert items_of(rows[:2], labels=["3", "2", "1"])["label"] == [2, 1]
    own = pd.DataFrame({"question": ["q"], "choices": [["a", "b"]], "answer": ["B"]})
    assert items_of(own).labels is None and items_of(own)["label"] == [1]

    frame = pd.DataFrame({"text": ["a", None], "label": pd.array([1, None], dtype="Int64"), "x": [1.5, float("nan")]})
    assert as_rows(frame) == [{"text": "a", "label": 1, "x": 1.5}, {"text": None, "label": None, "x": None}]
    assert as_rows([1]) == [1]


def test_a_judge_is_a_template_over_own_columns(monkeypatch):
    from pathlib import Path

    from dappr_llm.core.recipe import load_recipe

    monkeypatch.chdir(Path(__file__).parents[3])
    recipe = load_recipe("classify_smollm2/judge")
    check_recipe(recipe)
    own = task_of_run(recipe)
    parts = [load_items(own, split) for split in ("train", "validation", "test")]
    assert own.labels == ("wrong", "right") and sum(map(len, parts)) == 24
    assert sum(sum(part["label"]) for part in parts) == 12
    asked = [text for part in parts for text in part["question"]]
    assert all("\nQuestion: " in text and "\nAnswer: " in text for text in asked)
    assert sum(text.startswith("Context: \n") for text in asked) == 8  # a context may be empty


@pytest.mark.parametrize("name", ["clinc_oos", "banking77", "boolq"])
def test_recipes_of_the_tasks_differ_in_their_method_only(name):
    from dappr_llm.core.recipe import load_recipe

    ce, dappr = load_recipe(f"classify_smollm2/{name}"), load_recipe(f"classify_smollm2/{name}_dappr")
    assert ce.data.train == dappr.data.train == name and ce.model.readout == "head"
    assert (ce.method["name"], dappr.method["name"]) == ("ce", "dappr")
    assert (ce.train, ce.lora, ce.data, ce.model) == (dappr.train, dappr.lora, dappr.data, dappr.model)
