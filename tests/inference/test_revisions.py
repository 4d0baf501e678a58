"""The commits of base model and datasets are recorded, and loaded again when the branch has moved on."""

import json
import shutil

import pytest
import torch
from tiny import build_model, build_tokenizer, make_rows, write_recipe

from dappr_llm import UncertaintyPipeline, UserError, load_checkpoint
from dappr_llm.commands.main import main
from dappr_llm.core import hub_revisions
from dappr_llm.inference import table_cache
from dappr_llm.inference.ensemble import AdapterEnsemble
from dappr_llm.inference.import_adapter import adopt

OLD, NEW = "a1" * 20, "b2" * 20
QUESTION = ("Which one is a fruit ?", ["plum", "saw", "red", "sky"])


class Repo:
    """A base model in the Hub's cache on this machine, with two commits; nothing is fetched."""

    name = "someone/base"

    def __init__(self, folder):
        self.folder = folder / "models--someone--base"
        for seed, commit in enumerate((OLD, NEW)):
            place = self.folder / "snapshots" / commit
            build_model(seed).save_pretrained(place)
            build_tokenizer().save_pretrained(place)
        self.point_to(OLD)

    def point_to(self, commit):
        (self.folder / "refs").mkdir(exist_ok=True)
        (self.folder / "refs" / "main").write_text(commit)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return Repo(tmp_path / "hub")


@pytest.fixture
def recipe(tmp_path, hub):
    splits = {split: make_rows(12, start) for split, start in (("train", 0), ("validation", 40), ("test", 60))}
    settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 6}
    return write_recipe(tmp_path, hub.name, splits, make_rows(6, 80), **settings)


def sidecar(folder):
    return json.loads((folder / "uncertainty_config.json").read_text())


def test_a_run_records_the_commit_and_everything_loads_it_again(tmp_path, hub, recipe):
    assert main(["train", str(recipe)]) == 0
    run = tmp_path / "run"
    assert sidecar(run)["base_revision"] == OLD and sidecar(run)["precision"] == "float32"
    assert json.loads((run / "adapter_config.json").read_text())["revision"] == OLD
    assert f"revision: {OLD}" in (run / "recipe.yaml").read_text()
    assert json.loads((run / "results.json").read_text())["meta"]["base_revision"] == OLD
    wanted = load_checkpoint(run).predict(*QUESTION).probs
    key = table_cache.model_key([str(run)])
    hub.point_to(NEW)
    assert table_cache.model_key([str(run)]) == key is not None
    loaders = {
        "checkpoint": load_checkpoint,
        "pipeline": lambda name: UncertaintyPipeline.from_pretrained(name).run,
        "named base": lambda name: load_checkpoint(name, base_model=hub.name),
        "ensemble": lambda name: AdapterEnsemble.from_pretrained([name, name]).run,
    }
    for name, load in loaders.items():
        found = load(run)
        assert found.backend.base_revision == OLD, name
        assert torch.equal(found.predict(*QUESTION).probs, wanted), name
    # The new commit has other weights, which a checkpoint of an older version, without a commit, would be read with.
    for name, key in (("uncertainty_config.json", "base_revision"), ("adapter_config.json", "revision")):
        path = run / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: None}))
    (run / "manifest.json").unlink()
    assert not torch.equal(load_checkpoint(run).predict(*QUESTION).probs, wanted)


def test_a_transformers_pipeline_loads_it_too(tmp_path, hub, recipe):
    import transformers

    from dappr_llm import register_pipeline

    assert main(["train", str(recipe)]) == 0
    hub.point_to(NEW)
    pipe = transformers.pipeline(register_pipeline(), model=str(tmp_path / "run"))
    assert pipe.model.uncertainty_pipeline.run.backend.base_revision == OLD


def test_an_imported_adapter_keeps_its_revision(tmp_path, hub, recipe):
    assert main(["train", str(recipe)]) == 0
    hub.point_to(NEW)
    source = tmp_path / "adapter"
    source.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "run" / name, source)
    out = adopt(str(source), tmp_path / "adopted")
    assert sidecar(out)["base_revision"] == OLD
    assert load_checkpoint(out).backend.base_revision == OLD
    # Another base than the adapter names has commits of its own.
    shutil.copytree(hub.folder / "snapshots" / NEW, tmp_path / "elsewhere")
    assert sidecar(adopt(str(source), tmp_path / "other", str(tmp_path / "elsewhere")))["base_revision"] is None


def test_members_of_an_ensemble_share_a_commit(tmp_path, hub, recipe):
    assert main(["train", str(recipe)]) == 0
    other = shutil.copytree(tmp_path / "run", tmp_path / "other")
    (other / "manifest.json").unlink()
    (other / "uncertainty_config.json").write_text(json.dumps(sidecar(other) | {"base_revision": NEW}))
    with pytest.raises(UserError, match="base_revision is 'b2b2"):
        AdapterEnsemble.from_pretrained([tmp_path / "run", other])


def stop_early(recipe):
    """Leave a run with its first checkpoint only, as an interruption does."""
    run = recipe.parent / "run"
    (run / "results.json").unlink()
    for folder in sorted(run.glob("checkpoint-*"))[1:]:
        shutil.rmtree(folder)
    return run


def test_a_resumed_training_refuses_another_commit(tmp_path, hub, recipe, capsys):
    assert main(["train", str(recipe)]) == 0
    stop_early(recipe)
    hub.point_to(NEW)
    assert main(["train", str(recipe), "--resume"]) == 2
    said = capsys.readouterr().err
    assert "base_revision" in said and OLD in said and NEW in said and "Traceback" not in said
    assert main(["train", str(recipe), "--resume", "--set", f"model.revision={NEW}"]) == 2
    assert "model.revision" in capsys.readouterr().err
    assert main(["train", str(recipe), "--resume", "--set", f"model.revision={OLD}"]) == 0


def test_a_resumed_training_refuses_another_precision(tmp_path, hub, recipe, capsys):
    assert main(["train", str(recipe)]) == 0
    run = stop_early(recipe)
    assert main(["train", str(recipe), "--resume", "--set", "model.dtype=bfloat16"]) == 2
    assert "its model.dtype is 'float32', now 'bfloat16'" in capsys.readouterr().err
    older = (run / "recipe.yaml").read_text().replace("dtype: float32", "dtype: bfloat16")
    (run / "recipe.yaml").write_text(older)
    assert main(["train", str(recipe), "--resume", "--set", "model.dtype=bfloat16"]) == 2
    assert "its precision is 'float32', now 'bfloat16'" in capsys.readouterr().err


def test_a_resumed_training_refuses_other_rows(tmp_path, hub, recipe, capsys):
    assert main(["train", str(recipe)]) == 0
    stop_early(recipe)
    path = tmp_path / "train.jsonl"
    path.write_text(path.read_text().replace("very long", "very very long"))
    assert main(["train", str(recipe), "--resume"]) == 2
    assert "training rows" in capsys.readouterr().err


# --- datasets -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiz(monkeypatch):
    """A dataset on the Hub; `newest` is the commit of its main branch, `loads` what was asked of `datasets`."""
    import datasets
    import huggingface_hub

    class Quiz:
        newest, loads = OLD, []

    def info(self, path, revision=None, timeout=None):
        sha = Quiz.newest if revision in (None, "main") else revision
        return type("Info", (), {"sha": sha})()

    def load(path, config, split, revision):
        Quiz.loads.append((split, revision))
        return datasets.Dataset.from_list(make_rows(12, {"train": 0, "validation": 40, "test": 60}[split]))

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub_revisions, "_READ", {})
    monkeypatch.delenv("DAPPR_DATA_ROOT", raising=False)
    return Quiz


def test_a_run_records_the_commits_of_its_data_and_evaluates_on_them(
    tmp_path, model_folder, quiz, monkeypatch, capsys
):
    recipe = write_recipe(
        tmp_path, model_folder, {}, make_rows(6, 80), num_train_epochs=2, save_strategy="steps", save_steps=1
    )
    command = ["train", str(recipe), "--set", "data.train=someone/quiz"]
    assert main(command) == 0
    run = tmp_path / "run"
    assert {revision for _, revision in quiz.loads} == {OLD}
    assert sidecar(run)["data_revisions"] == {"someone/quiz": OLD}
    assert json.loads((run / "results.json").read_text())["meta"]["data_revisions"] == {"someone/quiz": OLD}
    quiz.newest = NEW
    hub_revisions._READ.clear()
    quiz.loads.clear()
    assert main(["evaluate", str(run), "--id", "someone/quiz", "--out", str(tmp_path / "again")]) == 0
    assert set(quiz.loads) == {("test", OLD)}
    stop_early(recipe)
    assert main([*command, "--resume"]) == 2
    said = capsys.readouterr().err
    assert "data_revisions.someone/quiz" in said and OLD in said and NEW in said


def test_a_commit_that_is_none_is_refused():
    from dappr_llm.inference.modality import find_task

    assert find_task("a/b", "text", {"a/b": OLD}).revision == OLD
    assert find_task({"path": "a/b", "revision": "v1"}, "text", {"a/b": OLD}).revision == "v1"
    with pytest.raises(UserError, match="data_revisions"):
        find_task("a/b", "text", {"a/b": "../../x"})
