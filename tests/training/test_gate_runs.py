"""A gate from a recipe: fitted when training is done, used by every verb, refused when it is another model's."""

import json
import shutil

import numpy as np
import pytest
import yaml
from tiny import make_rows, write_recipe, write_rows

from dappr_llm import UncertaintyPipeline, load_checkpoint
from dappr_llm.commands import gate as gate_verb
from dappr_llm.commands.ask import render
from dappr_llm.commands.main import main
from dappr_llm.core.errors import UserError
from dappr_llm.core.recipe import load_recipe
from dappr_llm.decisions.gate import FILE, TENSORS, Gate
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.inference.upload_files import collect

THINGS = ("plum", "fig", "pear", "hammer", "saw", "drill", "red", "blue", "green", "sky", "grass", "story")


def questions(count, start=0):
    rows = make_rows(count, start)
    for i, row in enumerate(rows, start):
        row["question"] = f"Which {THINGS[i % 12]} {THINGS[i // 12 % 12]} {THINGS[i // 144 % 12]} is a" + " very" * (
            i % 3
        )
    return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer):
    """A finished run with a gate and calibration rows."""
    from tiny import build_model

    folder = tmp_path_factory.mktemp("gate")
    build_model().save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    splits = {
        "train": questions(80), "validation": questions(8, 200), "calibration": questions(60, 300),
        "test": questions(12, 400),
    }  # fmt: skip
    recipe = write_recipe(folder, folder / "base", splits, make_rows(9), eval_strategy="no", num_train_epochs=1)
    assert main(["train", str(recipe)]) == 0
    return folder / "run"


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def test_training_writes_a_gate_and_tables_with_density(run):
    gate = Gate.load(run)
    assert gate.fitted_on["n"] == 80 and gate.familiarity.count == 60 and gate.weights_sha256
    tables = [PredictionTable.load(path) for path in sorted((run / "predictions").glob("*.npz"))]
    assert len(tables) == 2
    for table in tables:
        assert table.density is not None and ((table.familiarity > 0) & (table.familiarity <= 1)).all()


def test_a_loaded_checkpoint_says_the_same(run):
    table = PredictionTable.load(next((run / "predictions").glob("mine*.npz")))
    rows = questions(12, 400)
    again = load_checkpoint(run).predictor().predict_table(rows)
    np.testing.assert_allclose(again.density, table.density, atol=1e-3)
    assert load_checkpoint(run, gate=False).predictor().predict_table(rows).density is None
    pipe = UncertaintyPipeline.from_pretrained(run)
    row = {"question": rows[0]["question"], "choices": rows[0]["choices"]}
    answer = pipe(row)
    assert answer.density == pytest.approx(again.density[0], abs=1e-3) and 0 < answer.familiarity <= 1
    assert "familiarity" in render(answer, list("ABCD")) and "of your questions" in render(answer, list("ABCD"))
    assert UncertaintyPipeline.from_pretrained(run, gate=False)(row).familiarity is None


def test_files_of_answers_have_both_columns(run, tmp_path):
    new = write_rows(tmp_path / "new.jsonl", questions(5, 500))
    for more in ([], ["--no-gate", "--overwrite"]):
        out = tmp_path / "answers.jsonl"
        assert main(["predict", str(run), "--task", new, "--out", str(out), *more]) == 0
        records = [json.loads(line) for line in out.read_text().splitlines()]
        assert len(records) == 5 and all((record["density"] is None) == bool(more) for record in records)


def test_the_verb_fits_the_same_gate(copy):
    before = Gate.load(copy)
    (copy / FILE).unlink()
    (copy / TENSORS).unlink()
    assert main(["gate", str(copy)]) == 0
    after = Gate.load(copy)
    np.testing.assert_allclose(after.centre, before.centre, rtol=1e-3)
    assert after.calibrated_on == before.calibrated_on == {"task": "mine", "split": "calibration"}
    assert main(["gate", str(copy), "--method", "knn", "--rows", "100"]) == 0
    assert Gate.load(copy).kind == "knn" and load_checkpoint(copy).gate is not None


def test_the_verb_takes_other_rows_and_keeps_some_for_calibration(copy, tmp_path, capsys):
    other = write_rows(tmp_path / "other.jsonl", questions(600, 700))
    assert main(["gate", str(copy), "--task", other, "--rows", "150"]) == 0
    assert "100 of 600 rows are kept for calibration" in capsys.readouterr().out
    assert Gate.load(copy).familiarity.count == 100
    few = write_rows(tmp_path / "few.jsonl", questions(90, 700))
    assert main(["gate", str(copy), "--task", few]) == 0
    assert "too few" in capsys.readouterr().out and Gate.load(copy).familiarity is None


def test_training_rows_are_no_calibration_rows(copy):
    with pytest.raises(UserError, match="were trained on"):
        gate_verb.fit(gate_verb.GateOptions(str(copy), calibration_split="train"))


def test_a_gate_of_other_weights_is_refused_and_of_another_precision_left_out(copy, caplog):
    content = json.loads((copy / FILE).read_text())
    other = Gate.load(copy)
    from dataclasses import replace

    replace(other, precision="bfloat16").save(copy)
    assert load_checkpoint(copy).gate is None and "fitted in bfloat16" in caplog.text
    other.bound("0" * 64).save(copy)
    with pytest.raises(UserError, match=r"other weights.*dappr gate"):
        load_checkpoint(copy)
    assert load_checkpoint(copy, gate=False).gate is None
    (copy / FILE).write_text(json.dumps({**content, "precision": "float16"}))
    with pytest.raises(UserError, match="checksum"):
        load_checkpoint(copy)


def test_it_is_pushed_with_the_adapter(copy):
    found = collect(copy)
    assert {FILE, TENSORS} <= set(found)
    gate = Gate.load(copy)
    from dataclasses import replace

    replace(gate, fitted_on={**gate.fitted_on, "task": "/home/somebody/rows"}).save(copy)
    found = collect(copy)
    assert b"somebody" not in found[FILE] and isinstance(found[TENSORS], bytes)


def test_a_recipe_may_go_without_and_few_rows_say_why(run, tmp_path, capsys):
    recipe = yaml.safe_load((run.parent / "recipe.yaml").read_text())
    recipe["train"]["output_dir"] = str(tmp_path / "run")
    recipe["train"]["max_steps"] = 1
    recipe["gate"] = False
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 0
    assert not (tmp_path / "run" / FILE).exists() and "gate" not in capsys.readouterr().out.lower()
    assert load_recipe(tmp_path / "run" / "recipe.yaml").gate is False
    recipe |= {"gate": True, "data": {**recipe["data"], "max_train_samples": 20}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", str(tmp_path / "recipe.yaml"), "--overwrite"]) == 0
    assert "No gate: A gate needs at least 63 training rows, and there are 20" in capsys.readouterr().out


def test_overwriting_removes_an_older_gate(copy, tmp_path):
    from dappr_llm.training.overwrite import remove_run

    remove_run(copy)
    assert not (copy / FILE).exists() and not (copy / TENSORS).exists()
