"""Folders that are complete or not there, and which of them are kept."""

import json
import os
import re

import pytest

from dappr_llm.core import checkpoint, manifest
from dappr_llm.core.checkpoint import file_problem, last_checkpoint, manifest_checksum
from dappr_llm.core.errors import UserError


def save(run, step, when=None):
    folder = run / f"checkpoint-{step}"
    staged = manifest.staging(folder)
    staged.mkdir(parents=True)
    (staged / "weights.bin").write_text(f"step {step}")
    manifest.publish(staged, folder)
    if when is not None:
        os.utime(folder, (when, when))
    return folder


def steps(run):
    return sorted(int(path.name.split("-")[1]) for path in run.glob("checkpoint-*"))


def test_checkpoints_rotate_by_step_when_the_clock_jumps_back(tmp_path):
    for step in range(1, 7):
        newest = save(tmp_path, step, when=2_000_000_000 if step < 3 else 1_000_000_000 - step)
        manifest.rotate(tmp_path, 2, newest)
        assert steps(tmp_path) == [*range(max(1, step - 1), step + 1)]


def test_the_one_just_written_and_the_best_one_always_stay(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    newest = save(tmp_path, 5)  # resumed by hand from an early checkpoint
    manifest.rotate(tmp_path, 2, newest, best=str(tmp_path / "checkpoint-10"))
    assert steps(tmp_path) == [5, 10]
    manifest.rotate(tmp_path, 1, newest, best=str(tmp_path / "checkpoint-10"))
    assert steps(tmp_path) == [5, 10]
    for limit in (None, 0):
        manifest.rotate(tmp_path, limit, newest)
        assert steps(tmp_path) == [5, 10]


@pytest.mark.parametrize("damage", ["manifest.json", "weights.bin", "short"])
def test_damaged_checkpoints_are_not_kept_instead_of_whole_ones(tmp_path, damage):
    for step in (1, 2, 3):
        save(tmp_path, step)
    bad = tmp_path / "checkpoint-3"
    (bad / "weights.bin").write_text("") if damage == "short" else (bad / damage).unlink()
    manifest.rotate(tmp_path, 2, save(tmp_path, 4))
    assert steps(tmp_path) == [2, 4] and last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")


def test_a_checkpoint_half_removed_is_hidden_and_tidied_away(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    monkeypatch.setattr("shutil.rmtree", lambda *args, **kwargs: None)  # killed after the renaming
    manifest.remove(tmp_path / "checkpoint-2")
    monkeypatch.undo()
    assert steps(tmp_path) == [1] and last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    manifest.tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]  # not brought back


def lists(folder, **files):
    content = {"format_version": 1, "files": files}
    folder.mkdir(exist_ok=True)
    text = json.dumps({**content, "checksum": manifest_checksum(content)})
    (folder / checkpoint.MANIFEST).write_text(text)
    return file_problem(folder)


@pytest.mark.parametrize(
    "name", ["../secret", "/dev/zero", "/etc/passwd", "fifo", "link", "device", "", "a\0b", "sub"]
)
def test_a_manifest_names_regular_files_of_its_folder_only(tmp_path, monkeypatch, name):
    folder = tmp_path / "run"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    os.mkfifo(folder / "fifo")  # opening it would wait forever
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "device").symlink_to("/dev/zero")
    monkeypatch.setattr(checkpoint, "sha256", lambda path: pytest.fail(f"{path} was opened"))
    for size in (0, 1, 4096):
        problem = lists(folder, **{name: {"size": size, "sha256": "0" * 64}})
        assert re.search(
            "lists what is no file of the folder|stay in the folder|control char|min_length|is .*allowed: ", problem
        )


@pytest.mark.parametrize("facts", [None, 5, [], {}, {"size": "1"}, {"size": 1}])
def test_a_manifest_with_nonsense_is_a_problem_and_no_traceback(tmp_path, facts):
    (tmp_path / "a").write_text("x")
    assert "is damaged" in lists(tmp_path, a=facts)
    for content in ("[]", "{}", "5", '{"files": [], "checksum": 1}', "[" * 100_000):
        (tmp_path / checkpoint.MANIFEST).write_text(content)
        assert re.search("manifest.json is (damaged|not a valid JSON file)", file_problem(tmp_path))


@pytest.mark.parametrize("name", ["adapter_config.json", "tokenizer.json", "merges.txt"])
def test_a_checkpoint_with_a_device_or_a_fifo_in_it_is_refused(tmp_path, name):
    (tmp_path / checkpoint.SIDECAR).write_text("{}")
    for make in (lambda path: path.symlink_to("/dev/zero"), os.mkfifo, lambda path: path.symlink_to("nowhere")):
        make(tmp_path / name)
        with pytest.raises(UserError, match=f"{name} is no regular file"):
            checkpoint.load_sidecar(tmp_path)
        (tmp_path / name).unlink()
