"""Where a new head starts: at random, or at a logistic regression on the frozen model's features."""

import logging
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from architectures import save_base
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from tiny import build_tokenizer, make_texts
from training_runs import StopAt, build, build_head, config, weights, write_head_recipe

from dappr_llm import DAPPrTrainer, UserError
from dappr_llm.methods import get_method
from dappr_llm.training.head_init import FEW_ROWS, fit_probe, init_head, some_of_each, sureness_scale

WORDS = ["plum", "fig", "pear", "hammer", "saw", "drill", "red", "blue", "green", "sky", "grass", "story"]


def noisy_texts(count, labels, seed=0):
    """Texts whose words say their label in most cases, so that no probe gets all of them right."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        own = [WORDS[(i % labels) * (12 // labels) + j] for j in rng.integers(12 // labels, size=2)]
        words = rng.permutation([*own, *rng.choice(WORDS, 3)])
        rows.append({"text": " ".join(words), "label": f"label {i % labels}"})
    return rows


def still(folder, tokenizer, lora, train, method="ce", labels=3, **changes):
    """A trainer whose steps move nothing: after `train` the model is what it started from."""
    method = get_method(method)
    return build_head(
        folder, tokenizer, lora, train, method=method, labels=labels, learning_rate=0.0, weight_decay=0.0, **changes
    )


def head_of(trainer):
    return trainer.backend.score_layer(trainer.model).weight.detach().clone()


def regression(features, labels, strength, intercept=False):
    """scikit-learn's own predictions of the rows, on features of unit spread."""
    features = np.asarray(features, dtype=float)
    scaled = (features - features.mean(0) * intercept) / features.std(0)
    model = LogisticRegression(C=strength, fit_intercept=intercept, max_iter=5000, tol=1e-8).fit(scaled, labels)
    return model.predict_proba(scaled)


@pytest.mark.parametrize("labels", [2, 3])
def test_an_untrained_model_predicts_as_the_regression_does(labels, tmp_path, tokenizer, lora, caplog):
    caplog.set_level(logging.INFO, "dappr_llm.training.head_init")
    rows = noisy_texts(90, labels)
    trainer = still(tmp_path, tokenizer, lora, rows, labels=labels, head_init="probe")
    trainer.train()
    (said,) = [m for m in caplog.messages if "starts from a logistic regression" in m]
    strength = float(said.partition("C = ")[2].partition(",")[0])
    features, answers = trainer.predictor.hidden_states(rows)
    wanted = regression(features, answers.numpy(), strength)
    found = trainer.predict_table(rows, "mine", "train").probs
    ours, theirs = (np.log(p) - np.log(p).mean(-1, keepdims=True) for p in (found, wanted))
    factor = (ours * theirs).sum() / (theirs**2).sum()  # as sure as it is right about rows that it does not know
    assert np.allclose(ours, factor * theirs, atol=2e-2) and 0.05 < factor <= 1.0001
    assert ((found.argmax(-1) == answers.numpy()).mean()) == ((wanted.argmax(-1) == answers.numpy()).mean()) > 0.7


@pytest.mark.parametrize("method", ["dappr", "edl", "ib_edl", "mc_dropout", "redl"])
@pytest.mark.parametrize("labels", [2, 3])
def test_methods_of_evidence_start_from_its_answers_with_evidence_that_can_move(
    method, labels, tmp_path, tokenizer, lora
):
    rows = noisy_texts(60, labels)
    plain = still(tmp_path / "ce", tokenizer, lora, rows, "ce", labels, head_init="probe")
    init_head(plain)
    lora = replace(lora, lora_dropout=0.1)  # which MC dropout needs
    trainer = still(tmp_path / "own", tokenizer, lora, rows, method, labels, head_init="probe")
    init_head(trainer)
    features, _ = trainer.predictor.hidden_states(rows)
    own, wanted = ((features @ head_of(t).T)[:, :labels] for t in (trainer, plain))
    assert (own.argmax(-1) == wanted.argmax(-1)).all()
    table = trainer.predict_table(rows, "mine", "train")
    if table.alpha is not None:
        assert own.mean(-1).abs().max() < 1e-3  # where evidence is neither dead nor large
        assert own.max(-1).values.mean() < 10.01 and table.probs.max(-1).mean() > 1.05 / labels


def test_huge_logits_of_a_separable_task_are_not_taken_as_evidence(tmp_path, tokenizer, lora):
    """alpha = exp(z) would start at millions."""
    trainer = still(tmp_path, tokenizer, lora, make_texts(30), "dappr", head_init="probe")
    init_head(trainer)
    layer = trainer.backend.score_layer(trainer.model)
    features, labels = trainer.predictor.hidden_states(make_texts(30))
    logits = features @ layer.weight.detach().T
    assert logits.max(-1).values.mean() <= 10.01 and (logits.argmax(-1) == labels).all()


@pytest.mark.parametrize("method", ["ce", "dappr"])
def test_the_start_is_as_sure_of_its_rows_as_it_is_right_about_others(method, tmp_path, tokenizer, lora, caplog):
    """More features than rows: the regression gets all rows right with a loss of 0, and no gradient would be left."""
    caplog.set_level(logging.INFO, "dappr_llm.training.head_init")
    rows = noisy_texts(24, 3)
    trainer = still(tmp_path, tokenizer, lora, rows, method, head_init="probe")
    init_head(trainer)
    right = float(caplog.messages[-1].partition("accuracy ")[2].rstrip(")"))
    table = trainer.predict_table(rows, "mine", "train")
    sure = table.probs[np.arange(24), table.labels].mean()
    assert right < 0.95 and (table.probs.argmax(-1) == table.labels).mean() > right
    assert sure == pytest.approx(max(right, 0.5), abs=0.01) if method == "ce" else sure < right + 0.01


def test_the_scale_of_the_start():
    logits, labels = 100.0 * np.eye(4)[[0, 1, 2, 3, 0]], np.array([0, 1, 2, 3, -1])
    for right in (0.6, 0.8, 0.99):
        scaled = np.exp(logits * sureness_scale(logits, labels, right))
        sure = (scaled[np.arange(4), labels[:4]] / scaled[:4].sum(-1)).mean()
        assert sure == pytest.approx(min(right, 0.95), abs=1e-3)
    assert sureness_scale(logits, labels, 0.0) > 0  # never nothing at all
    assert sureness_scale(logits, labels, None) == 1.0
    assert sureness_scale(logits / 1000, labels, 0.9) == 1.0  # less sure than right: left as it is


def test_random_leaves_the_head_alone(tmp_path, tokenizer, lora):
    trainer = still(tmp_path, tokenizer, lora, noisy_texts(30, 3), head_init="random")
    before = head_of(trainer)
    trainer.train()
    assert torch.equal(head_of(trainer), before)


def test_auto_is_the_probe_of_a_new_head(tmp_path, tokenizer, model_folder, monkeypatch):
    def moved(rows, **changes):
        trainer = DAPPrTrainer(
            str(model_folder), config(tmp_path, learning_rate=0.0, max_steps=1, **changes), rows, method="ce"
        )
        before = head_of(trainer)
        trainer.train()
        return not torch.equal(head_of(trainer), before)

    assert FEW_ROWS == 64
    monkeypatch.setattr("dappr_llm.training.head_init.FEW_ROWS", 8)
    assert moved(noisy_texts(16, 2)) and moved(noisy_texts(40, 2))
    assert moved(noisy_texts(17, 2), head_init="probe") and not moved(noisy_texts(16, 2), head_init="random")


def test_auto_fits_the_probe_to_some_rows_of_each_label(monkeypatch):
    monkeypatch.setattr("dappr_llm.training.head_init.FEW_ROWS", 3)
    labels = np.array([0] * 40 + [1] * 2 + [-1] * 5 + [2] * 20)
    kept = some_of_each(labels, 3)
    assert kept == sorted(set(kept)) and np.bincount(labels[kept]).tolist() == [3, 2, 3]
    assert kept == some_of_each(labels, 3) != list(range(3))  # the same in every process, and not the first ones
    assert some_of_each(labels[:9], 3) is None


def test_auto_leaves_a_head_alone_that_may_be_trained(tmp_path, tokenizer, lora):
    """Of a model given as an object nobody knows where its head comes from."""
    trainer = still(tmp_path, tokenizer, lora, noisy_texts(16, 3))
    before = head_of(trainer)
    trainer.train()
    assert torch.equal(head_of(trainer), before)


def test_a_trained_head_goes_on_when_an_adapter_does(tmp_path, tokenizer, model_folder):
    from dappr_llm.commands.main import main

    def head(folder):
        return load_file(folder / "adapter_model.safetensors")["base_model.model.score.weight"]

    first = write_head_recipe(tmp_path, model_folder)
    assert main(["train", str(first)]) == 0
    (tmp_path / "second").mkdir()
    more = {"model": {"adapter": str(tmp_path / "run")}, "train": {"learning_rate": 0.0, "num_train_epochs": 1}}
    assert main(["train", str(write_head_recipe(tmp_path / "second", model_folder, **more))]) == 0
    assert torch.equal(head(tmp_path / "run"), head(tmp_path / "second" / "run"))


def test_resuming_and_training_on_do_not_fit_the_head_again(tmp_path, tokenizer, lora):
    rows = noisy_texts(48, 3)
    how = {"head_init": "probe", "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3}
    whole = build_head(tmp_path / "whole", tokenizer, lora, rows, **how)
    whole.train()
    stopped = build_head(tmp_path / "parts", tokenizer, lora, rows, **how)
    stopped.add_callback(StopAt(6))
    stopped.train()
    resumed = build_head(tmp_path / "parts", tokenizer, lora, rows, **how)
    resumed.train(resume_from_checkpoint=True)
    assert not resumed.head_is_settled and resumed.state.global_step == whole.state.global_step == 12
    for name, wanted in weights(whole).items():
        assert torch.allclose(weights(resumed)[name], wanted, atol=1e-6), name
    before = head_of(whole)
    init_head(whole)
    assert torch.equal(head_of(whole), before)


@pytest.mark.parametrize("base", ["BERT", "RoBERTa", "ModernBERT", "DeBERTa", "GPT-2"])
@pytest.mark.parametrize("adapter", [True, False])
def test_heads_of_every_shape(base, adapter, tmp_path):
    """A pooler or dense layer below the last layer stays as it is: the probe reads what comes out of it."""
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification

    tokenizer, rows = build_tokenizer(), make_texts(60)
    folder = save_base(base, tmp_path / "base", tokenizer)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, pad_token_id=0)
    lora = LoraConfig(r=4, lora_alpha=8) if adapter else None
    trainer = still(tmp_path, tokenizer, lora, rows, model=model, head_init="probe")
    before = weights(trainer)
    init_head(trainer)
    layer = trainer.backend.score_layer(trainer.model)
    changed = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    last = {name for name, p in trainer.model.named_parameters() if p is layer.weight or p is layer.bias}
    assert changed == last and len(last) == (1 if layer.bias is None else 2)
    features, labels = trainer.predictor.hidden_states(rows)
    weight, bias, *_ = fit_probe(features.double().numpy(), labels.numpy(), 3, layer.bias is not None)
    wanted = features.double().numpy() @ weight.T + (0.0 if bias is None else bias)
    found = trainer.predict_table(rows, "mine", "train").probs
    assert (found.argmax(-1) == wanted.argmax(-1)).all() and (found.argmax(-1) == labels.numpy()).mean() > 0.6


def test_labels_without_rows_get_the_lowest_logit():
    rng = np.random.default_rng(0)
    features, labels = rng.normal(2.0, 1.0, (40, 8)), np.arange(40) % 2 * 3  # labels 0 and 3 of 5
    features[:, 0] += labels
    for with_bias in (True, False):
        weight, bias, said, _ = fit_probe(features, labels, 5, with_bias)
        logits = features @ weight.T + (0.0 if bias is None else bias)
        assert weight.shape == (5, 8) and (bias is None) is not with_bias and "C = " in said
        assert (logits.argmax(-1) == labels).mean() > 0.85
        assert logits.mean(0)[[1, 2, 4]].max() < logits.mean(0)[[0, 3]].min()


def test_a_constant_feature_single_rows_and_many_labels_are_no_obstacle():
    rng = np.random.default_rng(0)
    features = np.concatenate([rng.normal(0, 1, (1000, 16)), np.ones((1000, 1))], axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight, bias, said, right = fit_probe(features, np.arange(1000), 1000, True)  # a row per label
    assert said == "C = 1" and right is None and np.isfinite(weight).all()
    assert ((features @ weight.T + bias).argmax(-1) == np.arange(1000)).mean() > 0.5
    weight, bias, said, _ = fit_probe(features[:41], np.array([*(np.arange(40) % 4), 4]), 5, True)
    assert "accuracy" in said and np.isfinite(weight).all()  # the label with one row is in no fold


def test_where_the_probe_cannot_be(tmp_path, tokenizer, lora):
    with pytest.raises(UserError, match=r"head_init: probe is for a new classification head .*set train.head_init"):
        build(tmp_path, tokenizer, lora, head_init="probe").train()
    with pytest.raises(UserError, match="head_init"):
        config(tmp_path, head_init="prob")
    trainer = still(tmp_path, tokenizer, lora, make_texts(12), head_init="probe")
    trainer.backend.score_layer(trainer.model).weight.ds_id = 0
    with pytest.raises(UserError, match="ZeRO-3"):
        trainer.train()
    with pytest.raises(UserError, match="rows of two labels at least"):
        fit_probe(np.ones((3, 2)), np.ones(3, dtype=int), 2, True)
