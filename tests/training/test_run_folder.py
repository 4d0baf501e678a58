"""Who may write into an output folder."""

import pytest

from dappr_llm.core import checkpoint
from dappr_llm.core.errors import UserError
from dappr_llm.core.recipe import load_recipe
from dappr_llm.training.run_folder import claim_folder


@pytest.fixture
def claim(tmp_path):
    """Claims the folder `run` for a recipe with these settings; its `save` puts such a run there."""
    path, folder = tmp_path / "mine.yaml", tmp_path / "run"
    path.write_text("data: {train: obqa}\nmethod: {name: ce}\n")

    def call(*settings, resume=None, overwrite=False):
        return claim_folder(load_recipe(path, settings), folder, resume, overwrite)

    def save(*settings):
        folder.mkdir(exist_ok=True)
        (folder / checkpoint.RECIPE).write_text(load_recipe(path, settings).to_yaml())

    call.save, call.folder = save, folder
    return call


def test_a_free_folder(claim):
    assert claim() is False
    claim.folder.mkdir()
    assert claim() is False


def test_this_run_needs_resume_and_says_whether_it_is_finished(claim):
    claim.save()
    with pytest.raises(UserError, match="pass --resume"):
        claim()
    assert claim(resume="auto") is False
    (claim.folder / checkpoint.RESULTS).write_text("{}")
    assert claim(resume="auto") is True


def test_another_run_is_named_by_its_first_difference(claim):
    claim.save("train.learning_rate=0.01")
    with pytest.raises(UserError, match=r"its train.learning_rate is 0.01, now 0.1"):
        claim("train.learning_rate=0.1", resume="auto")


@pytest.mark.parametrize("setting", ["train.logging_steps=3", "train.output_dir=elsewhere", "data.root=there"])
def test_settings_that_do_not_change_the_weights_may_differ(claim, setting):
    claim.save()
    assert claim(setting, resume="auto") is False


def test_overwrite_removes_the_run_and_nothing_else(claim):
    claim.save()
    for name in ("results.json", "decision.json", "adapter_model.safetensors", "notes.txt"):
        (claim.folder / name).write_text("{}")
    for name in ("checkpoint-3", checkpoint.TABLES):
        (claim.folder / name).mkdir()
    assert claim("train.seed=9", overwrite=True) is False
    assert [path.name for path in claim.folder.iterdir()] == ["notes.txt"]


def test_a_folder_of_something_else_is_never_touched(claim):
    claim.folder.mkdir()
    (claim.folder / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="holds no run of ours"):
        claim(overwrite=True)
    assert (claim.folder / "thesis.tex").exists()
