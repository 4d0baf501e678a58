"""Labels read from tokens, from a recipe: trained or not, saved, loaded, asked; and which readout a recipe gets."""

import json

import numpy as np
import pytest
from tiny import build_model, label_names, make_texts
from training_runs import write_head_recipe as write

from dappr_llm import UncertaintyPipeline, UserError, load_checkpoint
from dappr_llm.commands.main import main
from dappr_llm.inference.card import render_card
from dappr_llm.text.build import choose_readout

ANSWERS = {"label 0": " red", "label 1": " blue", "label 2": " green"}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "lm_head"]}


def sidecar(run):
    return json.loads((run / "uncertainty_config.json").read_text())


def test_a_recipe_with_answers_trains_tokens(tmp_path, model_folder):
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj", "lm_head"]
    lora, settings = {**LORA, "r": 8, "target_modules": every}, {"num_train_epochs": 60, "learning_rate": 2e-2}
    method = {"name": "dappr", "reg_weight": 0.1, "schedule": "constant"}
    recipe = write(tmp_path, model_folder, lora=lora, model={"answers": ANSWERS}, train=settings, method=method)
    assert main(["train", str(recipe)]) == 0
    run = tmp_path / "run"
    found = sidecar(run)
    assert (found["readout"], found["labels"]) == ("tokens", list(label_names(3)))
    assert found["answers"] == list(ANSWERS.values()) and found["answer_tokens"] == ["red", "blue", "green"]
    assert found["prompt"]["listed"] == "label 0 = red, label 1 = blue, label 2 = green"
    assert json.loads((run / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    loaded = load_checkpoint(run)
    rows = make_texts(6, 200)
    predicted = loaded.predict([row["text"] for row in rows])
    assert [found["labels"][i] for i in predicted.probs.argmax(-1)] == [row["label"] for row in rows]
    answer = UncertaintyPipeline(loaded)(rows[0]["text"])
    assert answer.answer == rows[0]["label"] and answer.choices == label_names(3)
    assert (run / "results.json").is_file()
    card = render_card(run, "me/tokens")
    assert "3 (label 0, label 1, label 2), read from one token each" in card and 'out = pipe("a text")' in card
    assert "Labels: label 0 = red, label 1 = blue, label 2 = green" in card and "answer letter" not in card
    table = loaded.predictor().predict_table(make_texts(12, 90), "mine", "test")
    saved = np.load(next((run / "predictions").glob("mine-test*.npz")))
    np.testing.assert_allclose(table.alpha, saved["alpha"], atol=1e-4)


def test_the_base_as_it_is_can_be_evaluated(tmp_path, model_folder):
    """Zero-shot: no epoch of training, and so the base model's own logits at the answers."""
    import torch

    recipe = write(tmp_path, model_folder, lora=LORA, model={"answers": ANSWERS}, train={"num_train_epochs": 0})
    assert main(["train", str(recipe)]) == 0
    run = tmp_path / "run"
    assert not (run / "trained_rows.json").exists()  # no row was trained on: any may calibrate
    loaded = load_checkpoint(run)
    prepared = list(loaded.backend.prepare(make_texts(5)))
    batch = loaded.backend.collate(prepared, pack=False)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        read = loaded.backend.read(loaded.model, batch).logits
        base = build_model().eval()(**inputs).logits[:, -1, sidecar(run)["answer_token_ids"]]
    torch.testing.assert_close(read, base, atol=1e-5, rtol=0)
    data = str(tmp_path / "test.jsonl")
    assert main(["evaluate", str(run), "--id", data, "--out", str(tmp_path / "zero"), "--resamples", "0"]) == 0
    assert "accuracy" in (tmp_path / "zero" / "results.json").read_text()


def test_tokens_are_found_from_names(tmp_path, model_folder, capsys):
    recipe = write(tmp_path, model_folder, lora=LORA, model={"readout": "tokens"}, train={"num_train_epochs": 0})
    assert main(["train", str(recipe)]) == 0
    found = sidecar(tmp_path / "run")
    assert found["readout"] == "tokens" and len(set(found["answer_token_ids"])) == 3
    said = capsys.readouterr()
    assert "Found 3 tokens for 3 labels: label 0 = " in said.out + said.err


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("answer_token_ids", [33, 35, 34], "answer_token_ids says 35 for the label 'label 1'"),
        ("answer_tokens", ["red", "blue", "fig"], "which was 'fig', but to its tokenizer is 'green'"),
        ("answer_token_ids", [33, 33, 34], "no id twice"),
        ("answers", [" red"], "as many answers"),
        ("answer_token_ids", [33, 34, 10_000], "is None"),
    ],
)
def test_another_sidecar_is_refused(key, value, said, tmp_path, model_folder):
    recipe = write(tmp_path, model_folder, lora=LORA, model={"answers": ANSWERS}, train={"num_train_epochs": 0})
    assert main(["train", str(recipe)]) == 0
    run = tmp_path / "run"
    assert sidecar(run)["answer_token_ids"] == [33, 34, 35]
    (run / "uncertainty_config.json").write_text(json.dumps({**sidecar(run), key: value}))
    (run / "manifest.json").unlink()
    with pytest.raises(UserError, match=said):
        load_checkpoint(run)


# --- which readout --------------------------------------------------------------------------------------------------


def test_the_data_choose_the_readout():
    assert choose_readout("auto", None, "x") == "letters"
    assert choose_readout("auto", ("a", "b"), "x") == "head"
    assert choose_readout("auto", ("a", "b"), "x", answers=True) == "tokens"
    assert choose_readout("letters", ("a", "b"), "x") == "letters"


@pytest.mark.parametrize(
    ("wanted", "labels", "answers", "said"),
    [
        ("head", None, False, "head is for fixed labels, but every row has options of its own"),
        ("tokens", None, False, "tokens is for fixed labels"),
        ("auto", None, True, "tokens is for fixed labels"),
        ("head", ("a", "b"), True, "model.answers are for model.readout: tokens, not head"),
        ("letters", label_names(27), False, "27 labels, but there are only 26 letters; use model.readout: head"),
    ],
)
def test_readouts_that_the_data_forbid(wanted, labels, answers, said):
    with pytest.raises(UserError, match=said):
        choose_readout(wanted, labels, "x", answers)


def bert(folder, tokenizer):
    """The config and tokenizer of an encoder, without weights: it must be refused before they are read."""
    from transformers import BertConfig

    BertConfig(vocab_size=80, hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("readout", ["letters", "tokens"])
def test_an_encoder_has_no_next_token(readout, tmp_path, tokenizer, capsys):
    recipe = write(tmp_path, bert(tmp_path / "bert", tokenizer), lora=LORA, model={"readout": readout})
    assert main(["train", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert "(bert) is not a causal language model" in error and "use model.readout: head" in error


def test_an_encoder_given_as_an_object_is_refused(tokenizer):
    from transformers import BertConfig, BertLMHeadModel, ModernBertConfig, ModernBertForMaskedLM

    from dappr_llm.methods import get_method
    from dappr_llm.text.backend import TextBackend

    small = {"vocab_size": 80, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
    for model in (BertLMHeadModel(BertConfig(**small)), ModernBertForMaskedLM(ModernBertConfig(**small))):
        with pytest.raises(UserError, match="not a causal language model.*model.readout: head"):
            TextBackend(model, tokenizer, get_method("dappr"), 4)
