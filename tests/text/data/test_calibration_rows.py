"""The fourth part of the data: kept apart, remembered, and disjoint from the other three."""

import logging

import pytest
from tiny import make_texts, write_rows

from dappr_llm.core.recipe import Recipe, load_recipe
from dappr_llm.core.splits import calibration_source
from dappr_llm.text.data.tasks import get_task, load_items, settle_recipe


def recipe(data):
    return Recipe(name="mine", data=data)


def texts(count, start=0):
    rows = make_texts(count, start)
    for i, row in enumerate(rows, start):
        row["text"] += f" {i}"
    return rows


def parts(task):
    return {
        name: {item["question"] for item in load_items(task, name)}
        for name in ("train", "validation", "calibration", "test")
    }


@pytest.mark.parametrize(
    ("sizes", "fraction", "found"),
    [
        ((1000, 5000), None, ("validation", 0.5)),
        ((10_000, 5000), None, ("validation", 0.2)),
        ((399, 5000), None, ("train", 0.1)),
        ((0, 500), None, ("train", 0.2)),
        ((0, 100_000), None, ("train", 0.02)),
        ((399, 499), None, None),
        ((100, 499), 0.3, ("validation", 0.3)),
        ((0, 100), 0.3, ("train", 0.3)),
    ],
)
def test_where_they_come_from(sizes, fraction, found):
    assert calibration_source(*sizes, fraction) == found


@pytest.mark.parametrize(("validation", "source"), [(400, "validation"), (40, "train")])
def test_rows_are_split_off_and_remembered(tmp_path, caplog, validation, source):
    sizes = {"train": 600, "validation": validation, "test": 20}
    splits = {
        name: write_rows(tmp_path / f"{name}.jsonl", texts(size, 1000 * i))
        for i, (name, size) in enumerate(sizes.items())
    }
    settled = settle_recipe(recipe({"train": {"name": "mine", "splits": splits}}))
    (tmp_path / "recipe.yaml").write_text(settled.to_yaml())
    again = load_recipe(tmp_path / "recipe.yaml")
    assert again.data.calibration_split == "calibration" and settle_recipe(again) == settled
    with caplog.at_level(logging.INFO):
        found = parts(get_task(again.data.train))
    assert f"of {sizes[source]} {source} rows are kept for calibration (stratified by label" in caplog.text
    assert {name: len(rows) for name, rows in found.items()} == {
        **sizes, "calibration": {"validation": 200, "train": 100}[source],
        source: sizes[source] - {"validation": 200, "train": 100}[source],
    }  # fmt: skip
    assert sum(map(len, found.values())) == len(set().union(*found.values()))


def test_rows_that_were_dealt_out_of_one_file_are_split_once_more(tmp_path):
    path = write_rows(tmp_path / "all.jsonl", texts(1000))
    plain = settle_recipe(recipe({"train": path, "calibration_split": None}))
    settled = settle_recipe(recipe({"train": path}))
    before = {
        name: {item["question"] for item in load_items(get_task(plain.data.train), name)}
        for name in ("validation", "test")
    }
    found = parts(get_task(settled.data.train))
    assert (found["validation"], found["test"]) == (before["validation"], before["test"])  # only training rows move
    assert [len(found[name]) for name in ("train", "calibration")] == [700, 100]


def test_own_calibration_rows_and_too_few_rows(tmp_path, caplog):
    splits = {
        name: write_rows(tmp_path / f"{name}.jsonl", texts(30, 100 * i))
        for i, name in enumerate(("train", "validation", "test"))
    }
    with caplog.at_level(logging.INFO):
        settled = settle_recipe(recipe({"train": {"name": "mine", "splits": splits}}))
    assert settled.data.calibration_split is None and "too few to keep some for calibration" in caplog.text
    splits["calibration"] = write_rows(tmp_path / "calibration.jsonl", texts(30, 900))
    settled = settle_recipe(recipe({"train": {"name": "mine", "splits": splits}}))
    assert settled.data.calibration_split == "calibration" and "calibration" not in settled.data.train
    assert len(load_items(get_task(settled.data.train), "calibration")) == 30


def test_the_bundled_task_has_its_own():
    settled = settle_recipe(recipe({"train": "everyday"}))
    assert settled.data.train == "everyday" and settled.data.calibration_split == "calibration"


def test_validation_rows_on_which_nothing_is_selected_calibrate(tmp_path):
    folder = tmp_path / "data" / "org" / "mine"
    folder.mkdir(parents=True)
    for i, (name, size) in enumerate({"train": 600, "validation": 250, "test": 20}.items()):
        write_rows(folder / f"{name}.jsonl", texts(size, 1000 * i))
    data = {"train": {"name": "mine", "path": "org/mine"}, "root": str(tmp_path / "data"), "validation_split": None}
    settled = settle_recipe(recipe(data))
    assert settled.data.calibration_split == "validation"
