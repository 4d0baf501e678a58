"""Who may write into an output folder."""

from pathlib import Path

import pytest

from dappr_llm.core import checkpoint, manifest
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


@pytest.mark.parametrize("setting", ["train.logging_steps=3", "train.output_dir=elsewhere"])
def test_settings_that_do_not_change_the_weights_may_differ(claim, setting):
    claim.save()
    assert claim(setting, resume="auto") is False


def test_another_data_root_is_another_run(claim, tmp_path, monkeypatch):
    claim.save("data.root=there")
    with pytest.raises(UserError, match="its data.root is .*there.*, now .*elsewhere"):
        claim("data.root=elsewhere", resume="auto")
    assert claim(f"data.root={Path.cwd() / 'there'}", resume="auto") is False  # the same, written otherwise


def test_a_recorded_commit_is_not_another_run_than_its_branch(claim):
    claim.save(f"model.revision={'a1' * 20}")
    assert claim(resume="auto") is False and claim("model.revision=main", resume="auto") is False
    with pytest.raises(UserError, match="its model.revision is 'a1a1"):
        claim(f"model.revision={'b2' * 20}", resume="auto")


def fill(folder):
    for name in ("results.json", "decision.json", "adapter_model.safetensors", "tokenizer.json", ".x.json.7.tmp"):
        (folder / name).write_text("{}")
    for name in (
        "checkpoint-3/optimizer.pt",
        "predictions/mine-test.npz",
        "baselines/tfidf.npz",
        "evaluations/a/mine.txt",
        "report/my.html",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def test_overwrite_removes_the_run_and_nothing_else(claim):
    claim.save()
    fill(claim.folder)
    (claim.folder / "own.bin").write_text("x")
    manifest.write(claim.folder, ["own.bin"])  # whatever it is called, the run wrote it
    assert claim("train.seed=9", overwrite=True) is False
    assert sorted(path.name for path in claim.folder.iterdir()) == ["evaluations", "report"]


@pytest.mark.parametrize(
    "name",
    ["notes.txt", "checkpoint-3/notes.txt", "checkpoint-best/x", "predictions/thesis.tex", "data/x.csv", ".git/x"],
)
def test_overwrite_refuses_what_no_run_wrote_and_removes_nothing(claim, name):
    claim.save()
    fill(claim.folder)
    (claim.folder / name).parent.mkdir(exist_ok=True)
    (claim.folder / name).write_text("precious")
    before = sorted(claim.folder.rglob("*"))
    with pytest.raises(UserError, match="was not written by a run of ours") as error:
        claim(overwrite=True)
    assert name.split("/")[0] in str(error.value) and sorted(claim.folder.rglob("*")) == before


def test_overwrite_follows_no_links(claim, tmp_path):
    claim.save()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "x").write_text("x")
    (claim.folder / "checkpoint-3").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="checkpoint-3 was not written"):
        claim(overwrite=True)
    (claim.folder / "checkpoint-3").unlink()
    claim.folder.rename(tmp_path / "real")
    claim.folder.symlink_to(tmp_path / "real")
    with pytest.raises(UserError, match="is a link"):
        claim(overwrite=True)
    assert (tmp_path / "real" / checkpoint.RECIPE).is_file()


def test_overwrite_never_empties_home_or_the_working_directory(claim, monkeypatch):
    claim.save()
    (claim.folder / "below").mkdir()
    for variable in ("home", "cwd"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, variable, staticmethod(lambda: claim.folder / "below"))
            with pytest.raises(UserError, match="folder of its own"):
                claim(overwrite=True)
    (claim.folder / checkpoint.RECIPE).write_text("flour: 500 g\n")
    with pytest.raises(UserError, match="holds no run of ours"):
        claim(overwrite=True)


def test_asking_about_a_folder_changes_nothing_in_it(claim):
    claim.save()
    (claim.folder / ".results.json.77.tmp").write_text("being written")
    assert claim(resume="auto") is False
    (claim.folder / checkpoint.RECIPE).unlink()
    assert claim(resume="auto") is False  # killed before it had written anything
    assert (claim.folder / ".results.json.77.tmp").exists()


def test_a_folder_of_something_else_is_never_touched(claim):
    claim.folder.mkdir()
    (claim.folder / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="holds no run of ours"):
        claim(overwrite=True)
    assert (claim.folder / "thesis.tex").exists()
