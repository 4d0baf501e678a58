"""Classifiers from a recipe and from Python: trained, saved, loaded, asked."""

import json
import re

import numpy as np
import pytest
import torch
import yaml
from peft import AutoPeftModelForSequenceClassification, LoraConfig
from safetensors import safe_open
from tiny import build_classifier, label_names, make_texts
from training_runs import METHOD, build_head, config, write_head_recipe
from transformers import AutoModelForSequenceClassification

from dappr_llm import DAPPrTrainer, UncertaintyPipeline, UserError, load_checkpoint
from dappr_llm.commands.main import main


def plain_inputs(backend, rows):
    batch = backend.collate(list(backend.prepare(rows)))
    return {key: batch[key] for key in ("input_ids", "attention_mask")}


def test_a_recipe_with_fixed_labels_trains_a_head(tmp_path, model_folder):
    assert main(["train", str(write_head_recipe(tmp_path, model_folder))]) == 0
    run = tmp_path / "run"
    sidecar = json.loads((run / "uncertainty_config.json").read_text())
    assert (sidecar["readout"], sidecar["labels"], sidecar["num_choices"]) == ("head", list(label_names(3)), 3)
    adapter = json.loads((run / "adapter_config.json").read_text())
    assert adapter["task_type"] == "SEQ_CLS" and "score" in adapter["modules_to_save"]
    loaded = load_checkpoint(run)
    rows = make_texts(6, 200)
    found = loaded.predict([row["text"] for row in rows])
    assert found.probs.shape == (6, 3)
    assert [sidecar["labels"][i] for i in found.probs.argmax(-1)] == [row["label"] for row in rows]
    answer = UncertaintyPipeline(loaded)(rows[0]["text"])
    assert answer.answer == rows[0]["label"] and answer.choices == label_names(3)

    plain = AutoPeftModelForSequenceClassification.from_pretrained(run, id2label=dict(enumerate(sidecar["labels"])))
    with torch.no_grad():
        wanted = loaded.backend.read(loaded.model, loaded.backend.collate(list(loaded.backend.prepare(rows)))).logits
        logits = plain.eval()(**plain_inputs(loaded.backend, rows)).logits
    assert torch.allclose(logits + sidecar["evidence_offset"], wanted, atol=1e-5)
    assert plain.config.id2label[int(logits[0].argmax())] == rows[0]["label"]


def test_full_fine_tuning_saves_an_ordinary_folder(tmp_path, model_folder):
    assert main(["train", str(write_head_recipe(tmp_path, model_folder, lora=False))]) == 0
    run = tmp_path / "run"
    assert not (run / "adapter_config.json").exists()
    assert yaml.safe_load((run / "recipe.yaml").read_text())["lora"] is None
    plain = AutoModelForSequenceClassification.from_pretrained(run).eval()
    assert plain.config.id2label == dict(enumerate(label_names(3)))
    loaded, rows = load_checkpoint(run), make_texts(6, 200)
    with torch.no_grad():
        wanted = loaded.backend.read(loaded.model, loaded.backend.collate(list(loaded.backend.prepare(rows)))).logits
        assert torch.allclose(plain(**plain_inputs(loaded.backend, rows)).logits, wanted, atol=1e-5)
    before = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=3)
    moved = [name for name, p in plain.named_parameters() if not torch.equal(p, before.state_dict()[name])]
    assert any("embed_tokens" in name for name in moved) and any("layers.0" in name for name in moved)
    table = load_checkpoint(run).predictor().predict_table(rows, "mine", "test")
    assert (table.probs.argmax(-1) == table.labels).all()


def test_full_fine_tuning_is_for_heads(tmp_path, model_folder, capsys):
    path = write_head_recipe(tmp_path, model_folder, lora=False, model={"readout": "letters"})
    assert main(["train", str(path)]) == 2
    assert "lora: null (full fine-tuning) is for model.readout: head" in capsys.readouterr().err


def test_a_text_template_and_the_end_of_long_texts(tmp_path, model_folder):
    path = write_head_recipe(
        tmp_path, model_folder, train={"prompt": {"template": "Question : {text} Answer :"}, "max_length": 9}
    )
    assert main(["train", str(path)]) == 0
    backend = load_checkpoint(tmp_path / "run").backend
    (row,) = backend.encode(backend.items([{"text": "plum plum is a very long story about grass"}]))
    words = backend.tokenizer.convert_ids_to_tokens(row["input_ids"])
    assert words[:4] == ["Question", ":", "plum", "plum"] and words[-2:] == ["Answer", ":"] and row["truncated"]
    assert "grass" not in words


@pytest.mark.parametrize("labels", [2, 27, 150])
def test_any_number_of_labels(tmp_path, tokenizer, lora, labels):
    rows = make_texts(2 * labels, labels=labels)
    trainer = build_head(tmp_path, tokenizer, lora, rows, make_texts(9, labels=labels), labels=labels)
    trainer.train()
    assert np.isfinite(trainer.evaluate()["eval_nll"])
    trainer.save_model()
    table = trainer.predict_table(make_texts(9, labels=labels), "mine", "test")
    assert table.probs.shape == (9, labels) and set(trainer.backend.config()["labels"]) == set(label_names(labels))


def test_more_labels_than_letters_reach_results_and_report(tmp_path, model_folder, capsys):
    # Rows do not repeat that many labels as their options; tables name the classes instead.
    path = write_head_recipe(tmp_path, model_folder, labels=30, train={"num_train_epochs": 1})
    assert main(["train", str(path)]) == 0
    run, out = tmp_path / "run", capsys.readouterr().out
    answers = out.partition("Some answers")[2].partition("Next:")[0]
    assert re.search(r"  label \d+ ", answers)
    content = json.loads((run / "results.json").read_text())
    assert {each["name"] for each in content["classes"]} == set(label_names(30))
    assert "baseline/tfidf/accuracy" in content["results"]
    assert main(["report", str(run), "--resamples", "20"]) == 0
    assert "label 29" in (run / "report" / "report.html").read_text()


def test_python_takes_a_name_or_a_loaded_classifier(tmp_path, tokenizer, model_folder):
    rows = make_texts(12)
    for number, model in enumerate((str(model_folder), build_classifier(3))):
        trainer = DAPPrTrainer(model, config(tmp_path / str(number)), rows, processing_class=tokenizer, method="ce")
        assert trainer.backend.readout.name == "head" and trainer.backend.num_choices == 3
        trainer.train()
        trainer.save_model()
    assert hasattr(DAPPrTrainer(str(model_folder), config(tmp_path / "x"), rows).model, "peft_config")
    assert not (tmp_path / "1" / "adapter_config.json").exists()  # an object without LoRA is trained as a whole
    named = build_classifier(2)
    named.config.id2label = {0: "ham", 1: "spam"}
    trainer = DAPPrTrainer(named, config(tmp_path / "named"), processing_class=tokenizer)
    assert trainer.backend.readout.labels == ("ham", "spam")
    with pytest.raises(UserError, match="does not name its labels"):
        DAPPrTrainer(build_classifier(2), config(tmp_path / "y"), processing_class=tokenizer)
    with pytest.raises(UserError, match="SEQ_CLS"):
        lora = LoraConfig(r=4, task_type="CAUSAL_LM")
        DAPPrTrainer(build_classifier(3), config(tmp_path / "z"), rows, processing_class=tokenizer, peft_config=lora)


def test_an_ensemble_of_heads_reads_every_members_own(tmp_path, tokenizer, model_folder):
    from dappr_llm import AdapterEnsemble

    rows = make_texts(5, 100)
    tables = []
    for seed in (0, 1):
        trainer = DAPPrTrainer(
            str(model_folder), config(tmp_path / str(seed), seed=seed), make_texts(24), method=METHOD
        )
        trainer.train()
        trainer.save_model()
        tables.append(trainer.predict_table(rows, "mine", "test").probs)
    ensemble = AdapterEnsemble.from_pretrained([tmp_path / "0", tmp_path / "1"])
    found = ensemble.predict_in_turn(*ensemble.run.encoded([row["text"] for row in rows]))
    assert np.allclose(np.stack([each.probs.numpy() for each in found]), np.stack(tables), atol=1e-5)
    assert ensemble.predict([row["text"] for row in rows]).probs.shape == (5, 3)
    assert not np.allclose(tables[0], tables[1], atol=1e-3)


def test_the_saved_adapter_holds_lora_and_head_alone(tmp_path, tokenizer, lora):
    trainer = build_head(tmp_path, tokenizer, lora)
    trainer.save_model()
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        others = [name for name in file.keys() if "lora_" not in name]
    assert others == ["base_model.model.score.weight"]
