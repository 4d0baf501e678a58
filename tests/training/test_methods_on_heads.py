"""Every method on a classification head, in 32 and in 4 bits: trained, saved, loaded, and a thousand labels by every verb."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny import label_names, make_texts, write_rows
from training_runs import config, write_head_recipe

from dappr_llm import DAPPrTrainer, UncertaintyPipeline, load_checkpoint
from dappr_llm.commands.main import main
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.methods import get_method, served_by

LORA = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.2, target_modules="all-linear", task_type="SEQ_CLS")


@pytest.mark.parametrize("name", served_by(frozenset({"auxiliary_rows"})))
def test_train_save_load_predict(name, tmp_path, model_folder):
    auxiliary = make_texts(8, start=200) if get_method(name).needs else None
    rows = make_texts(7, start=50)
    trainer = DAPPrTrainer(
        str(model_folder), config(tmp_path / "run", max_steps=3), make_texts(24), rows, peft_config=replace(LORA),
        method=name, auxiliary_dataset=auxiliary,
    )  # fmt: skip
    trainer.train()
    assert np.isfinite(trainer.evaluate()["eval_nll"])
    trainer.save_model()
    table = trainer.predict_table(rows, "mine", "test")
    run = load_checkpoint(tmp_path / "run")
    assert run.method == trainer.method and run.backend.readout.name == "head"
    predictor = DAPPrTrainer(run.model, config(tmp_path / "again"), method=run.method, backend=run.backend)
    again = predictor.predict_table(rows, "mine", "test")
    np.testing.assert_allclose(again.probs, table.probs, atol=1e-5)
    np.testing.assert_allclose(again.epistemic, table.epistemic, atol=1e-4)
    if run.method.passes > 1:
        assert table.members is not None and np.ptp(table.members, axis=1).max() > 1e-4  # dropout is on in its passes
    answer = run.predict([row["text"] for row in rows])
    assert answer.probs.shape == (7, 3) and torch.allclose(answer.probs.sum(-1), torch.ones(7), atol=1e-5)


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_a_quantised_base_trains_a_head(bits, tmp_path, model_folder):
    """bitsandbytes runs on CPU: the same path as QLoRA on a GPU, forward, backward, save and reload."""
    pytest.importorskip("bitsandbytes", reason="4- and 8-bit heads are NOT tested: pip install 'dappr-llm[quant]'")
    path = write_head_recipe(tmp_path, model_folder, model={"quantization": {bits: True}})
    assert main(["train", str(path), "--set", "method.name=dappr"]) == 0
    run, rows = tmp_path / "run", make_texts(12, 90)
    loaded = load_checkpoint(run, quantization={bits: True})
    kinds = {type(part).__name__ for part in loaded.model.modules()}
    assert ("Linear4bit" if bits == "load_in_4bit" else "Linear8bitLt") in kinds
    head = loaded.backend.readout.score_layer(loaded.model) or next(
        part for name, part in loaded.model.named_modules() if name.endswith("score.modules_to_save.default")
    )
    assert head.weight.dtype == torch.float32
    found = loaded.predict([row["text"] for row in rows])
    table = PredictionTable.load(run / "predictions" / "mine-test.npz")
    np.testing.assert_allclose(found.probs.numpy(), table.probs, atol=1e-3)
    assert (table.probs.argmax(-1) == table.labels).all()


def numbered(i, labels):
    """A row whose text the tiny tokenizer tells from all others."""
    digits = " ".join(str(i // 4**place % 4 + 1) for place in range(6))
    return {"text": f"Which plum is {digits}", "label": f"label {i % labels}"}


def test_a_thousand_labels_through_every_verb(tmp_path, model_folder, monkeypatch, capsys):
    """Train, evaluate, calibrate, predict, ask, report, card and pipeline; an audit says what it is for."""
    monkeypatch.chdir(tmp_path)
    labels = 1000
    settings = {"max_steps": 3, "head_init": "random"}
    path = write_head_recipe(tmp_path, model_folder, labels=labels, train=settings)
    for split, start, count in (("train", 0, 2000), ("validation", 2000, 200), ("test", 2200, 100)):
        write_rows(tmp_path / f"{split}.jsonl", [numbered(i, labels) for i in range(start, start + count)])
    assert main(["train", str(path)]) == 0
    run = tmp_path / "run"
    sidecar = json.loads((run / "uncertainty_config.json").read_text())
    assert sidecar["num_choices"] == labels and set(sidecar["labels"]) == set(label_names(labels))
    trained = json.loads((run / "results.json").read_text())["results"]
    assert main(["evaluate", str(run), "--resamples", "0", "--out", "again"]) == 0
    again = json.loads((tmp_path / "again" / "results.json").read_text())["results"]
    assert again["id/accuracy"] == trained["id/accuracy"] and again["id/n"] == 100
    assert main(["calibrate", str(run), "--max-risk", "0.999", "--alpha", "0.4"]) == 0
    write_rows(tmp_path / "new.jsonl", [{"text": row["text"]} for row in make_texts(5, 40, labels)])
    assert main(["predict", str(run), "--task", "new.jsonl", "--out", "answers.jsonl"]) == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 5 and all(len(row["probs"]) == labels for row in answers)
    capsys.readouterr()
    assert main(["ask", str(run), "Which plum is"]) == 0
    shown = capsys.readouterr().out
    assert "label " in shown and shown.count("\n") < 60  # the likely ones, not a thousand lines
    assert main(["audit", str(run), "--resamples", "0"]) == 2
    assert "no letters to rotate" in capsys.readouterr().err
    assert main(["report", str(run), "--out", "page"]) == 0
    assert (tmp_path / "page").is_dir() and len((run / "README.md").read_text()) < 60_000
    found = UncertaintyPipeline.from_pretrained(run)("Which plum is")
    assert len(found.probs) == labels and found.answer in label_names(labels)
