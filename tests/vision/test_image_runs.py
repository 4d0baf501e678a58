"""Image recipes through the command line and the trainer: the bundled digits, a few steps each."""

import json
import shutil

import numpy as np
import pytest
import torch

from dappr_llm import DAPPrConfig, DAPPrTrainer, PredictionTable, UncertaintyPipeline, load_checkpoint
from dappr_llm.commands.main import main
from dappr_llm.core.errors import UserError
from dappr_llm.core.recipe import list_recipes, load_recipe
from dappr_llm.methods import METHODS
from dappr_llm.scale.sweep import load_table
from dappr_llm.training.auxiliary_rows import check_auxiliary
from dappr_llm.training.callbacks.method_hooks import check_arguments
from dappr_llm.vision.data.tasks import load_image_task

QUICK = [
    *("--set", "train.max_steps=12", "--set", "train.disable_tqdm=true", "--set", "data.max_test_samples=60"),
    *("--set", "train.eval_strategy=no", "--set", "train.load_best_model_at_end=false"),
    *("--set", "train.save_strategy=no", "--set", "train.eval_every_epochs=null"),
]
LOGITS_ONLY = [name for name in METHODS if not METHODS[name]().needs]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run on the digits. Copy it before you change it."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    assert main(["train", "digits/dappr", *QUICK, "--output-dir", str(folder)]) == 0
    return folder


@pytest.fixture
def run_folder(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


def test_training_writes_what_a_run_of_text_writes(trained):
    names = {path.name for path in trained.iterdir()}
    assert {
        "config.json", "model.safetensors", "uncertainty_config.json", "recipe.yaml", "results.json", "README.md",
        "training_args.json", "trained_rows.json", "predictions", "reliability.png", "alpha0.png",
    } <= names  # fmt: skip
    content = json.loads((trained / "results.json").read_text())
    results = content["results"]
    assert "confusion.png" in names and [entry["name"] for entry in content["classes"]] == list("0123456789")
    assert "minus_baseline/majority/accuracy" in results
    assert {"id/conf_aupr", "ood/digits_letters/aupr", "ood/digits_photos/fpr95"} <= set(results)
    assert "ood/digits_letters/accuracy" not in results, "letters are no digits"
    assert results["id/n"] == 60


def test_a_checkpoint_predicts_as_training_did(trained, tmp_path):
    run = load_checkpoint(trained)
    args = DAPPrConfig(str(tmp_path), report_to="none")
    trainer = DAPPrTrainer(run.model, args, method=run.method, backend=run.backend)
    table = PredictionTable.load(trained / "predictions" / "digits-test.npz")
    again = trainer.predict_table(load_image_task("digits", "test", limit=60), "digits")
    np.testing.assert_allclose(again.alpha, table.alpha, rtol=1e-5)
    assert (again.ids == table.ids).all() and (again.labels == table.labels).all() and table.labels.min() >= 0
    rows = load_image_task("digits", "test", limit=60)
    out = run.predict([rows.load(0), rows.load(1)])
    np.testing.assert_allclose(out.probs.numpy(), table.probs[:2], rtol=1e-4)


def test_verbs_on_an_image_checkpoint(run_folder, tmp_path, capsys, monkeypatch):
    path = str(run_folder)
    table = tmp_path / "letters.npz"
    assert main(["predict", path, "--task", "digits_letters", "--limit", "20", "--out", str(table)]) == 0
    found = PredictionTable.load(table)
    assert len(found) == 20 and (found.labels == -1).all() and found.meta["modality"] == "vision"
    assert main(["evaluate", path, "--id", "digits", "--ood", "digits_photos", "--limit", "30"]) == 0
    assert main(["report", path, "--resamples", "20"]) == 0
    assert (run_folder / "report").is_dir()
    assert main(["calibrate", path, "--task", "digits", "--max-risk", "0.9"]) == 0
    answers = tmp_path / "answers.jsonl"
    assert main(["predict", path, "--task", "digits", "--limit", "7", "--out", str(answers)]) == 0
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(lines) == 7 and {"label", "correct", "prediction_set"} <= set(lines[0])
    image = tmp_path / "one.png"
    load_image_task("digits", "test").load(0).save(image)
    lines = iter([str(image), "missing.png"])

    def answer(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    capsys.readouterr()
    from dappr_llm.commands.ask import ask

    assert ask(UncertaintyPipeline.from_pretrained(run_folder), answer) == 1
    shown = capsys.readouterr().out
    assert "epistemic" in shown and "missing.png" in shown
    with pytest.raises(UserError, match="rotate"):
        from dappr_llm.commands.audit import AuditOptions, audit

        audit(AuditOptions(path, "digits", batch_size=8, resamples=10))


def test_verbs_need_no_flags_for_the_runs_own_images(run_folder):
    path = str(run_folder)
    assert main(["evaluate", path, "--resamples", "0"]) == 0
    (found,) = (run_folder / "evaluations").glob("*/results.json")
    again, before = (json.loads(each.read_text())["results"] for each in (found, run_folder / "results.json"))
    assert again == pytest.approx({key: before[key] for key in again}, rel=1e-4, nan_ok=True)
    assert main(["calibrate", path, "--max-risk", "0.9"]) == 0
    assert main(["predict", path]) == 0 and len(list((run_folder / "answers").glob("*.csv"))) == 1
    assert main(["predict", path, "--text", "x"]) == 2


def test_training_rows_cannot_calibrate(run_folder, capsys):
    assert main(["calibrate", str(run_folder), "--task", "digits", "--split", "train"]) == 2
    assert "trained on" in capsys.readouterr().err
    assert len(json.loads((run_folder / "trained_rows.json").read_text())["sha256_64"]) > 1000


def test_the_card_of_an_image_model(run_folder):
    from dappr_llm.inference.card import render_card
    from dappr_llm.inference.hub import collect

    text = render_card(run_folder, "user/digits")
    assert "pipeline_tag: image-classification" in text and 'pipe("image.png")' in text
    assert "letters" not in text.replace("digits_letters", "").split("## Results")[0]
    assert {"config.json", "model.safetensors"} <= set(collect(run_folder))


@pytest.mark.parametrize("method", LOGITS_ONLY)
def test_every_method_trains_on_images(method, tmp_path):
    """Two steps, finite losses; the saved model predicts what the trained one did."""
    from dappr_llm.training.build import build_args, build_run

    overrides = [
        f"method={{name: {method}}}", f"train.output_dir={tmp_path}", "data.max_train_samples=64",
        "data.max_validation_samples=32", "train.max_steps=2", "train.disable_tqdm=true", "model.dropout=0.5",
        "train.eval_strategy=no", "train.load_best_model_at_end=false", "train.save_strategy=no",
    ]  # fmt: skip
    recipe = load_recipe("digits/dappr", overrides)
    args = build_args(recipe)
    run = build_run(recipe, args)
    trainer = DAPPrTrainer(run.model, args, run.train, run.validation, method=run.method, backend=run.backend)
    trainer.train()
    assert np.isfinite(trainer.evaluate()["eval_loss"])
    table = trainer.predict_table(run.validation, "digits")
    trainer.save_model(str(tmp_path))
    loaded = load_checkpoint(tmp_path)
    again = DAPPrTrainer(loaded.model, args, method=loaded.method, backend=loaded.backend)
    np.testing.assert_allclose(again.predict_table(run.validation, "digits").probs, table.probs, atol=1e-6)


def test_another_methods_reading_of_trained_weights(trained, tmp_path):
    from dappr_llm.training.build import build_args, build_run

    overrides = [f"model.adapter={trained}", "method={name: edl}", f"train.output_dir={tmp_path}"]
    recipe = load_recipe("digits/dappr", overrides)
    model = build_run(recipe, build_args(recipe)).model
    assert torch.equal(model.classifier.weight.cpu(), load_checkpoint(trained, device="cpu").model.classifier.weight)
    with pytest.raises(UserError, match="model.safetensors"):
        bad = load_recipe("digits/dappr", [*overrides, f"model.adapter={tmp_path}"])
        build_run(bad, build_args(bad))


def test_images_without_a_backbone_are_refused():
    from dappr_llm.training.build import build_tests as read_tasks

    with pytest.raises(UserError, match="model.backbone"):
        read_tasks(load_recipe("digits/dappr", ["model.backbone=null"]))


IMAGE_RECIPES = [name for name, _, path in list_recipes() if load_recipe(path).model.backbone]


def test_every_benchmark_has_its_recipes():
    folders = {name.partition("/")[0] for name in IMAGE_RECIPES}
    assert {"mnist", "cifar10", "cifar10_lt", "cifar100", "cub", "dogs", "tinyimagenet", "imagenet_mae"} < folders
    for folder in folders:
        assert {f"{folder}/{method}" for method in ("ce", "mc_dropout", "edl", "dappr")} <= set(IMAGE_RECIPES)
    lambdas = {name: load_recipe(f"{name}/dappr").method["reg_weight"] for name in folders - {"digits"}}
    assert lambdas == {
        "mnist": 1e-5, "cifar10": 2e-3, "cifar10_lt": 2e-3, "cifar100": 5e-3, "cub": 2e-4, "dogs": 2e-4,
        "tinyimagenet": 5e-3, "imagenet_mae": 5e-3,
    }  # fmt: skip


# Models differ by benchmark and by how many outputs or dropouts a method wants.
@pytest.mark.parametrize("name", [n for n in IMAGE_RECIPES if n.endswith(("/mc_dropout", "/ib_edl"))])
def test_the_models_of_all_recipes_can_be_built(name):
    """Without memory (meta), but with the real classes: backbone, stem, options, dense layers, method."""
    from torch.nn.modules.batchnorm import _BatchNorm

    from dappr_llm.training.build import build_args, build_method
    from dappr_llm.vision.build import build_classifier, build_task
    from dappr_llm.vision.data.images import ArrayImages
    from dappr_llm.vision.data.rows import ImageRows

    recipe = load_recipe(name, ["model.pretrained=false", "model.channels=3"])
    task = build_task(recipe)
    classes = task.num_classes or 10
    pixels = np.zeros((classes, task.size, task.size), dtype=np.uint8)
    rows = ImageRows(ArrayImages(pixels, name), np.arange(classes), [str(i) for i in range(classes)])
    method = build_method(recipe)
    with torch.device("meta"):
        model, backend = build_classifier(recipe, task, rows, method, recipe.method["name"], 0)
    assert backend.num_choices == task.num_classes
    outputs = model.classifier.out_features if model.classifier is not None else 0
    assert outputs == method.num_outputs(task.num_classes)
    check_auxiliary(method, name, recipe.data.auxiliary is not None)
    args = build_args(recipe)  # unknown training arguments, and such as forbid the method's loss
    check_arguments(method, args)
    # A head with batch statistics must not meet a batch of one row.
    normalised = model.method_head is not None and any(isinstance(m, _BatchNorm) for m in model.method_head.modules())
    assert args.dataloader_drop_last or not normalised


@pytest.mark.parametrize("folder", ["mnist", "cifar10", "cub", "dogs", "tinyimagenet"])
def test_tables_hold_every_method_of_the_paper(folder):
    found = {load_recipe(row.recipe).method["name"] for row in load_table(f"{folder}/table").rows}
    assert found == set(METHODS) - {"ib_edl", "edl_spurious", "dappr_no_reg", "dappr_kl", "dappr_exp"}


def test_the_cpu_table_holds_every_method():
    """All but the ablations, which have a table of their own."""
    found, ablations = (
        {load_recipe(row.recipe).method["name"] for row in load_table(f"mnist/{name}").rows}
        for name in ("rivals_cpu", "ablations")
    )
    assert found | ablations == set(METHODS) and {"duq", "natpn", "fedl", "dappr", "ce"} <= found


# --- the gate -------------------------------------------------------------------------------------------------------


def test_images_have_a_gate_as_text_has(trained):
    """Means per class on the backbone's pooled features; calibration images where the run keeps any."""
    from dappr_llm.decisions.gate import Gate

    gate = Gate.load(trained)
    assert gate.kind == "class_gaussian" and gate.groups == ("pooled features",)
    assert gate.tensors["means"].shape[1] == 10
    table = PredictionTable.load(trained / "predictions" / "digits-test.npz")
    run = load_checkpoint(trained)
    again = run.predictor().predict_table(load_image_task("digits", "test", limit=60))
    np.testing.assert_allclose(again.density, table.density, atol=1e-3)
    photos = PredictionTable.load(trained / "predictions" / "digits_photos-test.npz")
    assert np.median(photos.density) < np.median(table.density)


def test_calibration_images_are_kept_apart():
    from dappr_llm.vision.build import build_data, build_task, load_calibration, settle

    recipe = load_recipe("digits/dappr")
    settled = settle(recipe)
    chosen = recipe.model_copy(update={"data": recipe.data.model_copy(update={"calibration_fraction": 0.5})})
    halved = settle(chosen)
    assert halved.data.calibration_split == "calibration" and settle(halved) == halved
    whole = {
        name: set(build_data(each, build_task(each), 0)[1].ids) for name, each in (("all", recipe), ("half", halved))
    }
    kept = set(load_calibration(halved, build_task(halved)).ids)
    assert kept | whole["half"] == whole["all"] and not kept & whole["half"]
    assert abs(len(kept) - len(whole["half"])) <= 10
    if len(whole["all"]) < 400:
        assert settled.data.calibration_split is None
