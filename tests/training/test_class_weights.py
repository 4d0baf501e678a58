"""Class weights and label smoothing: golden values, the same steps however a batch is cut, refusals."""

import numpy as np
import pytest
import torch
from tiny import build_classifier, make_texts
from torch.nn.functional import cross_entropy
from training_runs import METHOD, build, build_head, config, steps, weights

from dappr_llm import DAPPrTrainer, UserError
from dappr_llm.core.backend import option_rows
from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import METHODS, Progress, get_method
from dappr_llm.training.class_weights import balanced_weights, named_weights
from dappr_llm.training.losses import row_losses, smooth_labels

CE = get_method("ce")
UNEVEN = [*make_texts(20, labels=1), *make_texts(12, labels=3)]


# --- golden values --------------------------------------------------------------------------------------------------


def test_balanced_is_scikit_learns_formula():
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.array([0] * 7 + [1] * 2 + [2] * 3)
    wanted = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    np.testing.assert_allclose(balanced_weights(labels, 3).numpy(), wanted)
    np.testing.assert_allclose(balanced_weights(labels, 3).numpy(), [12 / 21, 12 / 6, 12 / 9])
    assert balanced_weights(np.array([0, 0, 1, -1]), 3).tolist() == [0.5, 1.0, 1.0]  # no row of class 2; one without


def test_weights_by_label_leave_others_at_1():
    assert named_weights({"b": 3, 2: 0.5}, ("a", "b", "2")).tolist() == [1, 3, 0.5]


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_smoothed_cross_entropy_is_torchs_own(smoothing):
    logits, labels = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 3, 0])
    groups = option_rows([4] * 6)
    terms, _ = row_losses(CE, 4, Outputs(logits), labels, groups, Progress(0, 1), smoothing)
    wanted = cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(terms["fit"], wanted)


def test_smoothing_spreads_over_the_options_of_a_row():
    soft = smooth_labels(torch.tensor([1, -1]), 4, 0.2, torch.float32)
    torch.testing.assert_close(soft, torch.tensor([[0.05, 0.85, 0.05, 0.05], [0.0] * 4]))
    logits = torch.randn(4, 3)
    found, _ = row_losses(
        CE, 3, Outputs(logits), torch.tensor([0, 1, 2, 0]), option_rows([2, 2, 3, 3]), Progress(0, 1), 0.3
    )
    two = cross_entropy(logits[:2, :2], torch.tensor([0, 1]), reduction="none", label_smoothing=0.3)
    torch.testing.assert_close(found["fit"][:2], two)


SOFT = [name for name in METHODS if not METHODS[name]().needs - {"auxiliary_rows"}]


@pytest.mark.parametrize("name", SOFT)
def test_every_loss_on_logits_takes_smoothed_labels(name):
    """With no smoothing at all the soft labels are the hard ones; with some the loss is another, and finite."""
    method = get_method(name)
    logits = torch.randn(5, method.num_outputs(4), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels, groups = torch.tensor([0, 1, 2, 3, 1]), option_rows([4] * 5)

    def total(smoothing):
        torch.manual_seed(0)
        terms, _ = row_losses(method, 4, Outputs(logits), labels, groups, Progress(5, 10), smoothing)
        return sum(terms.values())

    torch.testing.assert_close(total(1e-12), total(0.0))
    assert total(0.2).isfinite().all() and not torch.allclose(total(0.2), total(0.0))


# --- steps of training ----------------------------------------------------------------------------------------------


def test_a_step_minimises_torchs_weighted_mean(tmp_path, tokenizer, lora):
    given = {"label 0": 0.5, "label 2": 4.0}
    trainer = build_head(
        tmp_path,
        tokenizer,
        lora,
        UNEVEN[:24],
        method=CE,
        class_weights=given,
        max_steps=1,
        per_device_train_batch_size=24,
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(24)])
    with torch.no_grad():
        logits = trainer.backend.read(trainer.model.eval(), batch).logits
    wanted = cross_entropy(logits, batch["labels"], weight=torch.tensor([0.5, 1.0, 4.0])).item()
    trainer.train()
    assert steps(trainer)[0]["loss"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("name", ["ce", "dappr", "edl", "iedl", "redl"])
def test_parts_of_a_batch_make_the_step_of_the_whole(name, tmp_path, tokenizer, lora):
    """32 rows in batches of 12, the last of them smaller: cut into 3 micro-batches of 4, the same weights result."""
    method = get_method(name)
    how = {"class_weights": "balanced", "label_smoothing_factor": 0.1, "num_train_epochs": 1}
    cut = build_head(
        tmp_path / "cut", tokenizer, lora, UNEVEN, method=method, per_device_train_batch_size=4,
        gradient_accumulation_steps=3, **how,
    )  # fmt: skip
    whole = build_head(
        tmp_path / "whole", tokenizer, lora, UNEVEN, method=method, per_device_train_batch_size=12, **how
    )
    plain = build_head(tmp_path / "plain", tokenizer, lora, UNEVEN, method=method, per_device_train_batch_size=12)
    for trainer in (cut, whole, plain):
        trainer.train()
    for key, value in weights(whole).items():
        torch.testing.assert_close(weights(cut)[key], value, atol=2e-5, rtol=1e-4)
    assert any(not torch.allclose(weights(plain)[key], value, atol=1e-4) for key, value in weights(whole).items())
    assert [entry["loss"] for entry in steps(cut)] == pytest.approx([e["loss"] for e in steps(whole)], rel=1e-3)


def test_evaluation_knows_neither_weights_nor_smoothing(tmp_path, tokenizer, lora):
    rows = make_texts(9, start=50)
    plain = build_head(tmp_path / "a", tokenizer, lora, UNEVEN, rows).evaluate()
    other = build_head(
        tmp_path / "b", tokenizer, lora, UNEVEN, rows, class_weights="balanced", label_smoothing_factor=0.2
    ).evaluate()
    assert other["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)


def test_letters_may_be_smoothed(tmp_path, tokenizer, lora):
    plain = build(tmp_path / "a", tokenizer, lora, max_steps=1)
    smooth = build(tmp_path / "b", tokenizer, lora, max_steps=1, label_smoothing_factor=0.3)
    for trainer in (plain, smooth):
        trainer.train()
    assert steps(plain)[0]["loss"] != pytest.approx(steps(smooth)[0]["loss"], rel=1e-4)


def test_images_have_class_weights(tmp_path):
    from dappr_llm.vision.build import load_rows
    from dappr_llm.vision.data.tasks import get_image_task
    from dappr_llm.vision.model import ImageClassifier, ImageClassifierConfig

    rows = load_rows(get_image_task("digits"), "train", limit=40)
    names = list(rows.class_names)
    model = ImageClassifier(ImageClassifierConfig(class_names=names, num_labels=len(names), image_size=8, channels=1))
    args = config(tmp_path, max_steps=2, class_weights={names[3]: 5}, label_smoothing_factor=0.1)
    trainer = DAPPrTrainer(model, args, rows, method=METHOD)
    assert trainer.class_weights.tolist() == [1, 1, 1, 5, *[1] * (len(names) - 4)]
    trainer.train()
    assert len(steps(trainer)) == 2 and all(np.isfinite(entry["loss"]) for entry in steps(trainer))


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"label 9": 2.0}, "no label 'label 9'"),
        ({"label 0": 0.0}, "class_weights"),
        ({"label 0": -1.0}, "class_weights"),
        ({"label 0": float("nan")}, "class_weights"),
        ("even", "class_weights"),
    ],
)
def test_wrong_weights_are_refused(given, said, tmp_path, tokenizer, lora):
    with pytest.raises(UserError, match=said):
        build_head(tmp_path, tokenizer, lora, class_weights=given)


def test_weights_need_fixed_labels(tmp_path, tokenizer, lora):
    with pytest.raises(UserError, match="class_weights are for fixed labels.*model.readout: head or tokens"):
        build(tmp_path, tokenizer, lora, class_weights="balanced")


def test_a_stream_cannot_be_counted(tmp_path, tokenizer, lora):
    from datasets import Dataset, Features, Value

    rows = Dataset.from_list(make_texts(12), features=Features({"text": Value("string"), "label": Value("string")}))
    model = build_classifier(3)
    model.config.id2label = {i: f"label {i}" for i in range(3)}
    how = {"tokenizer": tokenizer, "lora": lora, "model": model, "train": rows.to_iterable_dataset(), "max_steps": 1}
    with pytest.raises(UserError, match="balanced counts the training rows.*give the weights by label"):
        build_head(tmp_path, class_weights="balanced", **how)
    build_head(tmp_path, class_weights={"label 1": 2}, **how)


def test_a_loss_on_centroids_takes_no_shared_labels(tmp_path):
    from dappr_llm.training.class_weights import find_class_weights

    with pytest.raises(UserError, match="label_smoothing_factor: the loss of 'duq'"):
        find_class_weights(config(tmp_path, label_smoothing_factor=0.1), None, get_method("duq"), None)
