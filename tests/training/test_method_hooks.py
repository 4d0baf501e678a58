"""The trainer's side of methods with heads and of auxiliary rows: real trainers, tiny models."""

import json

import numpy as np
import pytest
import torch
from tiny import make_rows
from training_runs import build as build_text

from dappr_llm import DAPPrConfig, DAPPrTrainer, UserError
from dappr_llm.inference.loading import load_checkpoint
from dappr_llm.methods import METHODS, Progress, get_method
from dappr_llm.training.auxiliary_rows import MixedRows
from dappr_llm.training.build import build_args, build_run, load_auxiliary
from dappr_llm.training.callbacks.method_hooks import head_of
from dappr_llm.vision.backend import ImageBackend
from dappr_llm.vision.data.images import ArrayImages
from dappr_llm.vision.data.noise import noise_rows
from dappr_llm.vision.data.rows import ImageRows
from dappr_llm.vision.model import ImageClassifier, ImageClassifierConfig
from dappr_llm.vision.transforms import ImageTransform

SMALL = {
    "natpn": {"latent_dim": 4, "layers": 2, "flow_finetune_steps": 20},
    "postnet": {"latent_dim": 2, "layers": 2},
    "rs_nn": {"embedding": "pca", "budget": 4},
    "fedl": {"hidden_dim": 8},
    "duq": {"centroid_dim": 4, "length_scale": 0.5},
}
WITH_HEAD = [name for name in METHODS if not get_method(name).needs <= {"auxiliary_rows"}]


def images(count=48, seed=0):
    """Three classes of 8 x 8 images: a bright row at the top, in the middle, at the bottom."""
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    pixels = draw.integers(0, 60, (count, 1, 8, 8), dtype=np.uint8)
    pixels[np.arange(count), 0, 1 + 3 * labels] += 180
    return ImageRows(ArrayImages(pixels, "bars"), labels, [f"bar-{i}" for i in range(count)], ["top", "mid", "low"])


def build_vision(folder, name, train=None, seed=0, auxiliary=None, options=None, **changes):
    method = get_method(name, **{**SMALL.get(name, {}), **(options or {})})
    transform = ImageTransform(size=8, channels=1, mean=(0.0,), std=(1.0,))
    config = ImageClassifierConfig(
        "convnet", num_classes=3, class_names=["top", "mid", "low"], channels=1, image_size=8,
        transform=transform.to_dict(), backbone_options={"width": 8}, class_counts=[16, 16, 16],
        method={"name": name, "options": method.options()},
    )  # fmt: skip
    torch.manual_seed(seed)
    model = ImageClassifier(config)
    settings = {
        "max_steps": 3, "per_device_train_batch_size": 16, "logging_steps": 1, "learning_rate": 1e-2,
        "save_strategy": "no", "seed": 0, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    args = DAPPrConfig(str(folder), **{**settings, **changes})
    rows = images() if train is None else train
    backend = ImageBackend(model, method)
    return DAPPrTrainer(model, args, rows, method=method, backend=backend, auxiliary_dataset=auxiliary)


@pytest.mark.parametrize("name", [*WITH_HEAD, "kl_pn"])
def test_train_save_load_predict(name, tmp_path):
    auxiliary = noise_rows(1, 8) if name == "kl_pn" else None
    trainer = build_vision(tmp_path / "run", name, auxiliary=auxiliary)
    trainer.train()
    for entry in trainer.state.log_history:
        assert all(np.isfinite(value) for value in entry.values() if isinstance(value, float)), entry
    table = trainer.predict_table(images(9, seed=5), "bars", "test")
    assert np.isfinite(table.epistemic).all() and np.ptp(table.epistemic) > 0
    assert np.isfinite(trainer.evaluate(trainer.backend.prepare(images(9, seed=5)))["eval_loss"])
    trainer.save_model(str(tmp_path / "run"))
    assert not list((tmp_path / "run").glob("*.bin"))
    run = load_checkpoint(tmp_path / "run")
    args = DAPPrConfig(str(tmp_path / "again"), report_to="none", disable_tqdm=True)
    again = DAPPrTrainer(run.model, args, method=run.method, backend=run.backend)
    loaded = again.predict_table(images(9, seed=5), "bars", "test")
    np.testing.assert_allclose(loaded.probs, table.probs, atol=1e-6)
    np.testing.assert_allclose(loaded.epistemic, table.epistemic, rtol=1e-5, atol=1e-6)


def test_collected_features_are_those_of_the_rows_without_augmentation(tmp_path):
    trainer = build_vision(tmp_path, "daedl", per_device_eval_batch_size=10)
    rows = trainer.backend.plain(trainer.labelled_rows)
    state = torch.get_rng_state()
    features, labels = trainer.predictor.hidden_states(rows)
    assert torch.equal(state, torch.get_rng_state())
    assert labels.tolist() == (np.arange(48) % 3).tolist() and features.shape[0] == 48
    with torch.no_grad():
        batch = trainer.backend.collate([rows[i] for i in range(48)])
        wanted = trainer.model.eval()(batch["pixel_values"]).features
    torch.testing.assert_close(features, wanted, atol=1e-5, rtol=1e-5)


def test_a_density_is_fitted_after_training_to_the_final_weights(tmp_path):
    trainer = build_vision(tmp_path, "daedl")
    trainer.train()
    head = head_of(trainer.model)
    features, labels = trainer.predictor.hidden_states(trainer.labelled_rows)
    means = torch.stack([features[labels == k].mean(0) for k in range(3)])
    torch.testing.assert_close(head.means, means, atol=1e-4, rtol=1e-4)
    assert head.present.all() and head.bounds[0] < head.bounds[1]


def test_an_interrupted_run_fits_nothing_until_it_ends(tmp_path):
    trainer = build_vision(tmp_path, "daedl", max_steps=4)
    trainer.interrupt.on_train_begin = lambda *args, **kwargs: setattr(trainer.interrupt, "requested", True)
    trainer.train()
    assert trainer.interrupt.stopped and not head_of(trainer.model).present.any()
    again = build_vision(tmp_path, "daedl", max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert head_of(again.model).present.all() and again.state.global_step == 4


@pytest.mark.parametrize("name", ["rs_nn", "duq"])
def test_a_resumed_run_ends_as_an_uninterrupted_one(name, tmp_path):
    """Sets chosen before training, and centroids, come back from the checkpoint."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 24}
    whole = build_vision(tmp_path / "a", name, **settings)
    whole.train()
    part = build_vision(tmp_path / "a", name, seed=7, **settings)  # other weights: all must come from the file
    calls = []
    object.__setattr__(part.method, "fit_head", lambda *args: calls.append(args))
    part.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert not calls
    for key, value in whole.model.state_dict().items():
        torch.testing.assert_close(part.model.state_dict()[key], value, atol=1e-6, rtol=1e-5, msg=key)


def test_sets_are_chosen_before_the_first_step(tmp_path):
    trainer = build_vision(tmp_path, "rs_nn")
    assert head_of(trainer.model).members[3:].sum() == 0
    seen = []
    trainer.method.fit_head(head_of(trainer.model), *trainer.predictor.hidden_states(trainer.labelled_rows))
    wanted = head_of(trainer.model).members.clone()
    head_of(trainer.model).use([])
    original = trainer.compute_loss
    trainer.compute_loss = lambda *a, **k: (seen.append(head_of(trainer.model).members.clone()), original(*a, **k))[1]
    trainer.train()
    assert wanted[3:].sum() > 0 and all(torch.equal(members, wanted) for members in seen)


def test_centroids_see_every_micro_batch_of_a_step(tmp_path):
    """One update per optimizer step, with all its rows: accumulation must change nothing."""
    settings = {"learning_rate": 0.0, "max_steps": 2}
    whole = build_vision(tmp_path / "a", "duq", per_device_train_batch_size=16, **settings)
    whole.train()
    parts = build_vision(
        tmp_path / "b", "duq", per_device_train_batch_size=4, gradient_accumulation_steps=4, **settings
    )
    parts.train()
    one, other = head_of(whole.model), head_of(parts.model)
    assert one.counts.sum().item() == pytest.approx(39 * 0.999**2 + 0.016 * (1 + 0.999), rel=1e-5)
    torch.testing.assert_close(one.counts, other.counts)
    torch.testing.assert_close(one.sums, other.sums, atol=1e-5, rtol=1e-4)


def test_the_penalty_is_trained_but_not_evaluated(tmp_path):
    trainer = build_vision(tmp_path, "duq")
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all("loss/penalty" in entry for entry in logged)
    metrics = trainer.evaluate(trainer.backend.prepare(images(6)))
    assert "eval_loss/fit" in metrics and "eval_loss/penalty" not in metrics


@pytest.mark.parametrize("setting", ["gradient_checkpointing", "bf16"])
def test_what_forbids_a_second_backward_pass_is_refused(setting, tmp_path):
    with pytest.raises(UserError, match=f"train.{setting}"):
        build_vision(tmp_path, "duq", **{setting: True})


def test_only_the_flow_moves_in_its_phases(tmp_path):
    """48 rows, batches of 12, ten epochs: the first epoch belongs to the flow, and so does what follows the last."""
    trainer = build_vision(
        tmp_path, "natpn", max_steps=-1, num_train_epochs=10, per_device_train_batch_size=12, weight_decay=0.1
    )
    moved = {}
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    class Watch(type(trainer.interrupt).__mro__[1]):
        def on_step_end(self, args, state, control, **kwargs):
            for name, p in trainer.model.named_parameters():
                if not torch.equal(p, before[name]):
                    moved.setdefault(state.global_step, set()).add(name)
                before[name] = p.detach().clone()

    trainer.add_callback(Watch())
    trainer.train()
    every, flow = set(before), {name for name in before if ".flow." in name}
    assert flow and all(moved[step] <= flow for step in range(1, 5))
    assert all(moved[step] & (every - flow) for step in range(5, 41))
    after = dict(trainer.model.named_parameters())
    assert {name for name in every if not torch.equal(after[name], before[name])} == flow


# --- auxiliary rows ------------------------------------------------------------------------------------------------


def test_mixed_rows_have_their_share_and_no_labels():
    own = [{"labels": i % 3, "row": i, "x": i} for i in range(12)]
    for share, extra, others in ((0.5, 12, 5), (0.25, 4, 40), (0.75, 36, 7)):
        mixed = MixedRows(own, [{"labels": 9, "row": i, "x": 100 + i} for i in range(others)], share)
        rows = [mixed[i] for i in range(len(mixed))]
        assert len(mixed) == 12 + extra and [row["row"] for row in rows] == list(range(len(mixed)))
        assert [row["labels"] for row in rows[:12]] == [i % 3 for i in range(12)]
        assert all(row["labels"] == -1 and row["x"] >= 100 for row in rows[12:])
        used = np.unique([row["x"] for row in rows[12:]], return_counts=True)[1]
        assert len(used) == min(extra, others) and np.ptp(used) <= 1  # cycled, none more than once too often
    assert [row["x"] for row in mixed.__getitems__([13, 2, 20])][1] == 2
    with pytest.raises(UserError, match="auxiliary_share"):
        MixedRows(own, own, 1.0)


def test_columns_of_mixed_rows():
    from datasets import Dataset

    own = Dataset.from_dict({"labels": [0, 1], "length": [5, 6], "only": [1, 1]})
    mixed = MixedRows(own, Dataset.from_dict({"labels": [4], "length": [9]}), 0.5)
    assert mixed["labels"] == [0, 1, -1, -1] and mixed["length"] == [5, 6, 9, 9]
    assert set(mixed.column_names) == {"labels", "length"}


def other_rows(count=16):
    """Questions of another kind, without answers."""
    return [{**row, "question": "Which one is story about sky ?", "answer": None} for row in make_rows(count, 300)]


@pytest.mark.parametrize("name", ["kl_pn", "rkl_pn"])
def test_text_learns_from_an_auxiliary_task(name, tmp_path, tokenizer, lora):
    trainer = build_text(
        tmp_path, tokenizer, lora, method=name, validation=make_rows(6, 60), auxiliary_dataset=other_rows(),
        max_steps=20, learning_rate=2e-2, logging_steps=20, max_grad_norm=10.0,
    )  # fmt: skip
    assert len(trainer.train_dataset) == 64
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["loss"] == pytest.approx(entry["loss/fit"] + entry["loss/ood"], rel=1e-3)
    assert 0 <= entry["accuracy"] <= 1 and {"alpha0", "ood/alpha0"} <= set(entry)
    strange = [{**row, "question": "Which one is story about sky ?"} for row in make_rows(9, 500)]
    known, unknown = (trainer.predict_table(rows, "t") for rows in (make_rows(9, 60), strange))
    if name == "rkl_pn":  # the forward KL meets classes it cannot tell apart yet with alpha below 1
        assert unknown.epistemic.mean() > known.epistemic.mean()
    assert np.isfinite(trainer.evaluate()["eval_loss"])


def test_rows_without_labels_are_not_counted_as_wrong(tmp_path, tokenizer, lora):
    """Accuracy is that of the labelled rows: the same as when they are trained alone."""
    trainer = build_text(
        tmp_path, tokenizer, lora, method="kl_pn", auxiliary_dataset=other_rows(), learning_rate=0.0, max_steps=8,
        logging_steps=8, per_device_train_batch_size=8,
    )  # fmt: skip
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    table = trainer.predict_table(make_rows(32), "toy")
    assert entry["accuracy"] == pytest.approx((table.probs.argmax(-1) == table.labels).mean(), abs=1e-6)


def test_methods_and_auxiliary_rows_must_belong_together(tmp_path, tokenizer, lora):
    with pytest.raises(UserError, match="'kl_pn' learns from auxiliary rows.*data.auxiliary"):
        build_text(tmp_path, tokenizer, lora, method="kl_pn")
    with pytest.raises(UserError, match="'dappr' has no use for auxiliary rows.*kl_pn or rkl_pn"):
        build_text(tmp_path, tokenizer, lora, auxiliary_dataset=other_rows())


@pytest.mark.parametrize("name", WITH_HEAD)
def test_text_refuses_what_it_cannot_serve(name, tmp_path, tokenizer, lora):
    with pytest.raises(UserError, match=f"'{name}' needs .*features.*on text use one of: ce, .*kl_pn.*dappr"):
        build_text(tmp_path, tokenizer, lora, method=name)


def test_a_recipe_names_its_auxiliary_task(recipe, tmp_path):
    from dappr_llm.core.recipe import load_recipe

    path = tmp_path / "aux.jsonl"
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if v}) + "\n" for row in other_rows()))
    method = "method={name: rkl_pn}"
    found = load_recipe(recipe, [method, f"data.auxiliary={path}", "data.auxiliary_share=0.2"])
    run = build_run(found, build_args(found))
    assert len(run.auxiliary) == 16 and set(run.auxiliary["label"]) == {-1}
    same = load_recipe(recipe, [method, f"data.auxiliary={tmp_path / 'other.jsonl'}"])
    with pytest.raises(UserError, match="'other', which is also an OOD test task"):
        build_run(same, build_args(same))
    with pytest.raises(UserError, match="data.auxiliary"):
        build_run(load_recipe(recipe, [method]), build_args(found))
    heads = load_recipe(recipe, ["method={name: duq}"])
    with pytest.raises(UserError, match="'duq' needs after_step, features, input_grad"):
        build_run(heads, build_args(heads))


def test_noise_is_the_auxiliary_task_of_images():
    from dappr_llm.core.recipe import build_recipe
    from dappr_llm.vision.data.tasks import get_image_task

    def recipe(auxiliary, method="kl_pn"):
        data = {"train": "digits", "ood": ["digits_letters"], "auxiliary": auxiliary}
        return build_recipe({"model": {"backbone": "convnet"}, "data": data, "method": {"name": method}})

    task = get_image_task("digits")
    rows = load_auxiliary(recipe("noise"), get_method("kl_pn"), task, 0)
    assert rows[0]["pixel_values"].shape == (1, 8, 8) and set(rows.labels) == {-1}
    pixels = rows.images.pixels
    assert (pixels == 0).mean() == pytest.approx(0.5, abs=0.01) and (pixels == 255).mean() == pytest.approx(
        0.159, abs=0.01
    )
    assert len(load_auxiliary(recipe("digits_photos"), get_method("kl_pn"), task, 0)) == 500
    for name in ("digits", "digits_letters"):
        with pytest.raises(UserError, match=f"data.auxiliary is '{name}'"):
            load_auxiliary(recipe(name), get_method("kl_pn"), task, 0)
    with pytest.raises(UserError, match="'ce' has no use"):
        load_auxiliary(recipe("noise", "ce"), get_method("ce"), task, 0)


def test_progress_of_an_evaluation_is_never_a_phase():
    assert not get_method("natpn").flow_only(Progress.final(10))


def test_another_methods_weights_may_lack_a_classifier_or_bring_one(tmp_path):
    """Sets are chosen from trained features by starting from a checkpoint of another method."""
    plain, sets = (build_vision(tmp_path, name, seed=seed).model for name, seed in (("ce", 1), ("rs_nn", 2)))
    sets.load_weights(plain.state_dict(), "there", head=False)
    for name, value in plain.backbone.state_dict().items():
        assert torch.equal(sets.backbone.state_dict()[name], value)
    build_vision(tmp_path, "ce").model.load_weights(sets.state_dict(), "there", head=False)
    with pytest.raises(UserError, match="does not fit this model"):
        sets.load_weights(plain.state_dict(), "there")
