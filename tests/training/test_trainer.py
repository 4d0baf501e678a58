"""The trainer's invariants: accumulation, resuming, batching, saving, logging."""

import json
import logging

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from tiny import build_model, make_rows
from training_runs import METHOD, StopAt, build, build_head, config, steps, weights

from dappr_llm import DAPPrTrainer, UserError, load_checkpoint
from dappr_llm.methods.dappr import DAPPr
from dappr_llm.training.losses import training_progress


@pytest.mark.parametrize("build", [build, build_head])
def test_accumulation_equals_a_large_batch(tmp_path, tokenizer, lora, build):
    whole = build(tmp_path / "a", tokenizer, lora)
    whole.train()
    parts = build(tmp_path / "b", tokenizer, lora, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    parts.train()
    assert len(steps(whole)) == len(steps(parts)) == 4
    for one, other in zip(steps(whole), steps(parts), strict=True):
        for key in ("loss", "grad_norm", "loss/fit", "loss/reg", "paper_value", "accuracy", "alpha0"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key
    for name, value in weights(whole).items():
        assert torch.allclose(value, weights(parts)[name], atol=1e-5), name


def test_terms_add_up_to_the_loss(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, validation=make_rows(7, start=50))
    trainer.train()
    for entry in steps(trainer):
        assert entry["loss"] == pytest.approx(entry["loss/fit"] + entry["loss/reg"], rel=1e-5)
        assert "grad/common_mode" in entry and 0 <= entry["grad/common_mode"] <= 1
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(metrics["eval_loss/fit"] + metrics["eval_loss/reg"])
    assert {"eval_accuracy", "eval_nll", "eval_ece"} <= set(metrics)


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_evaluation_does_not_depend_on_the_batch_size(tmp_path, tokenizer, lora, batch):
    rows = make_rows(7, start=50)
    reference = build(tmp_path, tokenizer, lora, validation=rows, per_device_eval_batch_size=7).evaluate()
    other = build(tmp_path, tokenizer, lora, validation=rows, per_device_eval_batch_size=batch).evaluate()
    for key in ("eval_loss", "eval_nll", "eval_accuracy", "eval_ece", "eval_loss/reg", "eval_paper_value"):
        assert other[key] == pytest.approx(reference[key], rel=1e-4), key


@pytest.mark.parametrize("build", [build, build_head])
@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_resuming_equals_never_stopping(tmp_path, tokenizer, lora, strategy, build):
    lora.lora_dropout = 0.2  # the random state must be restored too
    options = {
        "train_sampling_strategy": strategy,
        "num_train_epochs": 3,
        "save_strategy": "steps",
        "save_steps": 5,
        "evidence_offset": "auto",
    }
    whole = build(tmp_path / "a", tokenizer, lora, **options)
    whole.train()

    first = build(tmp_path / "b", tokenizer, lora, **options)
    first.add_callback(StopAt(7))
    first.train()
    assert first.state.global_step == 7
    second = build(tmp_path / "b", tokenizer, lora, **options)
    second.backend.evidence_offset = 99.0  # must come from the checkpoint
    second.train(resume_from_checkpoint="auto")
    assert second.state.global_step == 12 and second.backend.evidence_offset == whole.backend.evidence_offset
    after = [entry["loss"] for entry in steps(second) if entry["step"] > 5]
    wanted = [entry["loss"] for entry in steps(whole) if entry["step"] > 5]
    assert after == pytest.approx(wanted, rel=1e-6)
    for name, value in weights(whole).items():
        assert torch.allclose(value, weights(second)[name], atol=1e-6), name


@pytest.mark.parametrize("build", [build, build_head])
def test_the_seed_decides_everything(tmp_path, tokenizer, lora, build):
    losses = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(losses))
        trainer = build(tmp_path / name, tokenizer, lora, seed=seed)
        trainer.train()
        losses[name] = [entry["loss"] for entry in steps(trainer)]
    assert losses["a"] == losses["b"] != losses["c"]


def test_resume_from_checkpoint_in_the_arguments_is_read(tmp_path, tokenizer, lora):
    options = {"save_strategy": "steps", "save_steps": 2}
    build(tmp_path, tokenizer, lora, **options).train()
    again = build(tmp_path, tokenizer, lora, resume_from_checkpoint=str(tmp_path / "checkpoint-2"), **options)
    again.train()
    assert [entry["step"] for entry in steps(again)] == [1, 2, 3, 4]  # 1 and 2 from the restored history
    fresh = build(tmp_path / "new", tokenizer, lora, resume_from_checkpoint="auto")
    fresh.train()
    assert fresh.state.global_step == 4
    with pytest.raises(UserError, match="no checkpoint"):
        build(tmp_path / "none", tokenizer, lora).train(resume_from_checkpoint=True)


def test_saved_adapter_is_whole_small_and_plain(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, evidence_offset=-1.5)
    trainer.train()
    trainer.save_model()
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())
    assert not list(tmp_path.rglob("*.bin")) and not list(tmp_path.rglob("*.pkl"))
    readme = (tmp_path / "README.md").read_text()
    assert "More Information Needed" not in readme and str(tmp_path) not in readme
    sidecar = json.loads((tmp_path / "uncertainty_config.json").read_text())
    assert sidecar["method"] == {"name": "dappr", "options": METHOD.options()}
    assert (sidecar["num_choices"], sidecar["letters"], sidecar["evidence_offset"]) == (4, list("ABCD"), -1.5)

    batch = trainer.backend.collate(list(trainer.backend.prepare(make_rows(5))))
    plain = PeftModel.from_pretrained(build_model(), tmp_path).eval()
    trainer.model.eval()
    with torch.no_grad():
        wanted = trainer.backend.read(trainer.model, batch).logits
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
        full = plain(**inputs).logits[:, -1, trainer.backend.readout.token_ids(4)]
    assert torch.allclose(full - 1.5, wanted, atol=1e-5)


def test_round_trip_through_a_checkpoint(tmp_path, tokenizer, lora, model_folder):
    trainer = DAPPrTrainer(str(model_folder), config(tmp_path / "run"), make_rows(32), peft_config=lora, method=METHOD)
    trainer.train()
    trainer.save_model()
    before = trainer.predict_table(make_rows(9, start=40), "mine", "test")
    loaded = load_checkpoint(tmp_path / "run")
    assert loaded.method == METHOD
    rows = make_rows(9, start=40)
    answer = loaded.predict([row["question"] for row in rows], [row["choices"] for row in rows])
    assert np.allclose(answer.probs.numpy(), before.probs, atol=1e-5)
    assert np.allclose(answer.epistemic.numpy(), before.epistemic, atol=1e-5)
    one = loaded.predict(rows[0]["question"], rows[0]["choices"])
    assert np.allclose(one.probs.numpy()[0], before.probs[0], atol=1e-5)


def test_tables_keep_order_ids_and_unknown_labels(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, per_device_eval_batch_size=2)
    rows = make_rows(7, start=40)
    rows[3].pop("answer")
    table = trainer.predict_table(rows, "mine", "test")
    assert table.ids.tolist() == [row["id"] for row in rows]
    assert table.labels.tolist() == ["ABCDEF".index(row["answer"]) if "answer" in row else -1 for row in rows]
    assert table.meta["task"] == "mine" and table.meta["num_choices"] == 4 and table.meta["method"] == "dappr"
    assert np.allclose(table.epistemic, 4 / table.alpha.sum(-1), atol=1e-6)


def test_rows_with_other_option_counts_than_trained(tmp_path, tokenizer, lora):
    """Five options at prediction: all five letters are read; the four trained ones come out as before."""
    trainer = build(tmp_path, tokenizer, lora)
    mixed = make_rows(3, options=3) + make_rows(3, start=10, options=5)
    table = trainer.predict_table(mixed, "mixed", "test")
    assert table.probs.shape == (6, 5) and table.num_options.tolist() == [3] * 3 + [5] * 3
    narrow = trainer.predict_table(mixed[:3], "three", "test")
    assert np.allclose(table.alpha[:3, :4], narrow.alpha, atol=1e-4)


def test_training_on_rows_with_fewer_options(tmp_path, tokenizer, lora):
    """A ragged batch gives each row the loss it would have among rows of its own kind."""
    mixed = make_rows(4, options=3) + make_rows(4, start=10, options=4)
    trainer = build(tmp_path, tokenizer, lora, train=mixed)
    backend, model = trainer.backend, trainer.model.eval()
    prepared = list(backend.prepare(mixed))
    assert backend.num_choices == 4

    def loss(part):
        with torch.no_grad():
            return trainer.compute_loss(model, backend.collate(part)).item()

    assert loss(prepared) == pytest.approx((loss(prepared[:4]) + loss(prepared[4:])) / 2, rel=1e-5)
    batch = backend.collate(prepared[:4])
    with torch.no_grad():
        logits = backend.read(model, batch).logits[:, :3]
        wanted = METHOD.loss(
            type(backend.read(model, batch))(logits=logits), batch["labels"], training_progress(trainer)
        )
    assert loss(prepared[:4]) == pytest.approx(sum(wanted.values()).mean().item(), rel=1e-5)


def test_more_options_than_letters_trained(tmp_path, tokenizer, lora):
    with pytest.raises(UserError, match="train_dataset, row 0: 5 options.*num_choices: 5"):
        build(tmp_path, tokenizer, lora, train=make_rows(4, options=5), num_choices=4)


def test_schedule_counts_whole_epochs(tmp_path, tokenizer, lora):
    method = DAPPr(reg_weight=1e-2, schedule="warmup", warmup_epochs=2)
    trainer = build(tmp_path, tokenizer, lora, method=method, num_train_epochs=3, learning_rate=0.0)
    trainer.train()
    terms = [entry["loss/reg"] for entry in steps(trainer)]
    assert terms[:4] == [0.0] * 4
    assert np.mean(terms[8:]) == pytest.approx(2 * np.mean(terms[4:8]), rel=1e-4)


def test_offset_auto_moves_the_start_to_one(tmp_path, tokenizer, lora, caplog):
    trainer = build(tmp_path, tokenizer, lora, evidence_offset="auto", learning_rate=0.0)
    trainer.train()
    assert steps(trainer)[0]["logits/mean"] == pytest.approx(1.0, abs=0.05)


def test_dead_evidence_is_warned_about(tmp_path, tokenizer, lora, caplog):
    with caplog.at_level(logging.WARNING):
        build(tmp_path, tokenizer, lora, evidence_offset=-20).train()
    assert "evidence is dead" in caplog.text and "evidence_offset: auto" in caplog.text


@pytest.mark.parametrize(
    "metric, greater",
    [("nll", False), ("eval_ece", False), ("accuracy", True), ("loss", False), ("aurc", False), ("conf_auroc", True)],
)
def test_best_checkpoint_knows_its_direction(tmp_path, metric, greater):
    args = config(tmp_path, metric_for_best_model=metric, eval_strategy="epoch", save_strategy="epoch")
    assert args.greater_is_better is greater


def test_best_checkpoint_is_loaded_at_the_end(tmp_path, tokenizer, lora):
    trainer = build(
        tmp_path, tokenizer, lora, validation=make_rows(12, start=50), num_train_epochs=4, learning_rate=0.05,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="nll",
    )  # fmt: skip
    trainer.train()
    history = [entry["eval_nll"] for entry in trainer.state.log_history if "eval_nll" in entry]
    assert trainer.state.best_metric == min(history)
    assert trainer.evaluate()["eval_nll"] == pytest.approx(min(history), rel=1e-5)


def test_learns(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, train=make_rows(96), num_train_epochs=15, evidence_offset="auto")
    before = trainer.predict_table(make_rows(96), "t", "train")
    trainer.train()
    after = trainer.predict_table(make_rows(96), "t", "train")
    right = [(table.probs.argmax(-1) == table.labels).mean() for table in (before, after)]
    assert right[0] < 0.6 and right[1] > 0.9


@pytest.mark.parametrize("value", ["some", "1,5"])
def test_bad_offset(tmp_path, value):
    with pytest.raises(UserError, match="evidence_offset is '.*allowed: a number or auto"):
        config(tmp_path, evidence_offset=value)


def test_empty_dataset(tmp_path, tokenizer, lora):
    with pytest.raises(UserError, match="train_dataset has no rows"):
        build(tmp_path, tokenizer, lora, train=[])


def test_an_object_needs_its_tokenizer(tmp_path, model):
    with pytest.raises(UserError, match="processing_class"):
        DAPPrTrainer(model, config(tmp_path), make_rows(4))


def test_evaluate_and_predict_take_the_rows_that_training_takes(tmp_path, tokenizer, lora):
    raw = make_rows(7, start=50)
    prepared = build(tmp_path / "a", tokenizer, lora, validation=raw)
    wanted = prepared.evaluate()
    trainer = build(tmp_path / "b", tokenizer, lora)
    for rows in (raw, trainer.backend.prepare(raw)):
        found = trainer.evaluate(rows)
        for key in ("eval_loss", "eval_nll", "eval_accuracy"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-5)
    both = trainer.evaluate({"one": raw, "two": raw})
    assert both["eval_one_nll"] == both["eval_two_nll"] == pytest.approx(wanted["eval_nll"])
    output = trainer.predict(raw)
    assert output.predictions.shape == (7, 4) and output.metrics["test_nll"] == pytest.approx(wanted["eval_nll"])
    assert output.label_ids.tolist() == ["ABCD".index(row["answer"]) for row in raw]  # in the order of the rows
    model, backend = trainer.model.eval(), trainer.backend
    with torch.no_grad():
        alone = [backend.read(model, backend.collate([row])).logits for row in prepared.eval_dataset]
    assert np.allclose(output.predictions, torch.cat(alone).numpy(), atol=1e-4)
    unlabelled = [{key: value for key, value in row.items() if key != "answer"} for row in raw]
    assert trainer.predict(unlabelled).predictions.shape == (7, 4)
    some = trainer.predict([*raw[:4], *unlabelled[4:]]).metrics
    first = trainer.predict(raw[:4]).metrics
    assert some["test_n"] == 4 and some["test_loss"] == pytest.approx(first["test_loss"], rel=1e-5)
    with pytest.raises(UserError, match="eval_dataset, row 0: the row has no answer"):
        trainer.evaluate(unlabelled)


def test_the_predictor_hands_over_hidden_states(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora)
    rows = make_rows(9) + [{**row, "id": f"again {row['id']}"} for row in make_rows(2)]
    states, labels = trainer.predictor.hidden_states(rows)
    assert states.shape == (11, 32) and labels.tolist()[:3] == ["ABCD".index(row["answer"]) for row in rows[:3]]
    assert torch.equal(states[0], states[9])  # the same question
    table = trainer.predict_table(rows)
    head = trainer.model.get_output_embeddings()
    with torch.no_grad():
        logits = head(states)[:, trainer.backend.readout.token_ids(4)]
    assert np.allclose(table.alpha, (torch.nn.functional.softplus(logits) + 1).numpy(), atol=1e-4)


def test_ood_rows_are_watched_in_python_too(tmp_path, tokenizer, lora):
    model = build_model()
    trainer = DAPPrTrainer(
        model,
        config(tmp_path, monitor_ood_rows=4, eval_strategy="epoch"),
        train_dataset=make_rows(16),
        eval_dataset=make_rows(6, start=40),
        processing_class=tokenizer,
        peft_config=lora,
        method=METHOD,
        ood_datasets={"other": make_rows(9, start=80, options=3)},
    )
    trainer.train()
    watched = [entry for entry in trainer.state.log_history if "ood/other/epistemic" in entry]
    assert len(watched) == 1 and 0 < watched[0]["ood/other/epistemic"] <= 1


def test_an_image_classifier_trains_in_plain_python(tmp_path):
    from PIL import Image

    from dappr_llm import ImageClassifier, ImageClassifierConfig

    shades = [Image.new("L", (12, 12), 80 * (i % 3)) for i in range(24)]
    rows = [{"image": image, "label": i % 3} for i, image in enumerate(shades)]
    shape = {"num_classes": 3, "class_names": ["dark", "grey", "light"], "channels": 1, "image_size": 12}
    model = ImageClassifier(
        ImageClassifierConfig(backbone="convnet", method={"name": "dappr", "options": {}}, **shape)
    )
    trainer = DAPPrTrainer(model, config(tmp_path, num_train_epochs=2), train_dataset=rows, eval_dataset=rows[:6])
    trainer.train()
    assert trainer.evaluate()["eval_n"] == 6 and trainer.predict_table(rows).probs.shape == (24, 3)
    trainer.save_model()
    assert load_checkpoint(tmp_path).predict(shades[0]).probs.shape == (1, 3)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "train.lr_scheduler_type cannot be used: .*min_lr"),
        ({"optim": "galore_adamw"}, "train.optim cannot be used"),
    ],
)
def test_settings_that_lack_others_are_named(tmp_path, tokenizer, lora, settings, words):
    with pytest.raises(UserError, match=words):
        build(tmp_path, tokenizer, lora, max_steps=1, **settings).train()


def test_a_lora_section_that_trains_nothing_is_refused(tmp_path, tokenizer):
    from peft import LoraConfig

    idle = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", inference_mode=True)
    with pytest.raises(UserError, match=r"trains nothing: lora\.inference_mode"):
        build(tmp_path, tokenizer, idle)
