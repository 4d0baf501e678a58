"""Data checks of a recipe: before torch, with the first rows named, and off where they are not wanted."""

import json
import logging
import subprocess
import sys

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.core.recipe import build_recipe
from dappr_llm.text.data.checks import check_recipe


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tickets(start=0, count=40, labels=("bug", "login")):
    return [{"text": f"ticket {i}", "label": labels[i % len(labels)]} for i in range(start, start + count)]


def recipe_of(train, **data):
    return build_recipe({"data": {"train": train, **data}})


def files(tmp_path, **parts):
    return {"name": "mine", "splits": {name: write(tmp_path / f"{name}.jsonl", rows) for name, rows in parts.items()}}


def test_a_single_good_file_passes(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        check_recipe(recipe_of(write(tmp_path / "t.jsonl", tickets())))
    assert caplog.text == ""


def test_training_rows_in_the_test_file(tmp_path):
    spec = files(tmp_path, train=tickets(), test=[{"text": " TICKET  3", "label": "login"}, *tickets(90, 9)])
    with pytest.raises(
        UserError, match=r"mine: 1 of 10 test rows are training rows too \(first: .*test.jsonl, line 1"
    ):
        check_recipe(recipe_of(spec))
    check_recipe(recipe_of(spec, checks="warn"))
    check_recipe(recipe_of(spec, checks="off"))


def test_labels_unknown_to_training(tmp_path):
    spec = files(tmp_path, train=tickets(), test=[*tickets(90, 9), {"text": "x", "label": "fire"}])
    with pytest.raises(UserError, match=r"1 of 50 rows have labels that are unknown to training \('fire'\).*line 10"):
        check_recipe(recipe_of(spec))


def test_empty_texts_and_missing_labels_are_counted(tmp_path):
    rows = tickets()
    rows[4]["text"], rows[7]["text"], rows[9]["label"] = "", "  ", None
    with pytest.raises(UserError) as caught:
        check_recipe(recipe_of(write(tmp_path / "t.jsonl", rows)))
    assert "2 of 40 rows have no text (first: " in str(caught.value) and "line 5; line 8)" in str(caught.value)
    assert "also: 1 of 40 rows have no label" in str(caught.value)


def test_weak_data_are_warnings(tmp_path, caplog):
    rows = [*tickets(), {"text": "ticket 0", "label": "login"}, {"text": "long " * 900, "label": "bug"}]
    with caplog.at_level(logging.WARNING):
        check_recipe(recipe_of(write(tmp_path / "t.jsonl", rows)))
    assert "2 rows have an equal row with another label" in caplog.text
    assert "1 of 42 rows is probably longer than train.max_length: 300 tokens" in caplog.text


def test_questions_with_their_own_options(tmp_path):
    rows = [{"question": "Which?", "choices": [f"a{i}", f"b{i}"], "answer": "A"} for i in range(30)]
    check_recipe(recipe_of(write(tmp_path / "q.jsonl", rows)))
    spec = files(tmp_path, train=rows, test=rows[:2])
    with pytest.raises(UserError, match="2 of 2 test rows are training rows too"):
        check_recipe(recipe_of(spec))


def test_train_answers_before_torch_is_imported(tmp_path):
    spec = files(tmp_path, train=tickets(), test=tickets(0, 4))
    (tmp_path / "r.yaml").write_text(json.dumps({"data": {"train": spec}}))
    code = "import sys\nfor name in ('torch', 'transformers', 'datasets'): sys.modules[name] = None\n"
    code += f"from dappr_llm.commands.main import main\nsys.exit(main(['train', {str(tmp_path / 'r.yaml')!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "of 4 test rows are training rows too" in done.stderr
    assert not (tmp_path / "runs" / "r" / "recipe.yaml").exists()
