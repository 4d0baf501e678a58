"""What must never be uploaded, tried with the real client against the stand-in: secrets, names of this machine, links."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from fake_hub import TOKEN, FakeHub
from safetensors.numpy import load_file, save_file

from dappr_llm.commands.main import main
from dappr_llm.core import local_names
from dappr_llm.core.errors import UserError
from dappr_llm.decisions.rule import Decision
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.inference.card import render_card
from dappr_llm.inference.hub import push
from dappr_llm.inference.upload_files import check_contents, collect

SECRET = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"  # assembled, so that scanners of repositories pass over it
TABLE = "predictions/mine-test.npz"


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    with FakeHub() as server:
        for name, value in {"ENDPOINT": server.endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture(scope="session")
def calibrated(trained, tmp_path_factory):
    import shutil

    folder = shutil.copytree(trained / "run", tmp_path_factory.mktemp("calibrated") / "run")
    assert main(["calibrate", str(folder), "--task", str(trained / "validation.jsonl"), "--max-risk", "0.9"]) == 0
    return folder


@pytest.fixture
def folder(calibrated, tmp_path):
    import shutil

    return shutil.copytree(calibrated, tmp_path / "copy")


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2))


def with_metadata(path, **facts):
    save_file(load_file(path), path, metadata={"format": "pt", **facts})


def change_table(path, ids=None, **meta):
    table = PredictionTable.load(path)
    table.meta |= meta
    table.ids = table.ids if ids is None else np.array([f"{name}{ids}" for name in table.ids])
    table.save(path)


def change_recipe(path, section, **values):
    content = yaml.safe_load(path.read_text())
    content[section] |= values
    path.write_text(yaml.safe_dump(content))


def change_command(path, command):
    content = json.loads(path.read_text())
    content["meta"]["command"] = command
    path.write_text(json.dumps(content, indent=2))


def rewrite_decision(folder, **values):
    from dataclasses import replace

    decision = Decision.load(folder)
    replace(decision, calibration_set=decision.calibration_set | values).save(folder)


HIDING_PLACES = {
    "results.json": lambda f: change_command(f / "results.json", f"dappr train x --set train.hub_token={SECRET}"),
    "recipe.yaml": lambda f: change_recipe(f / "recipe.yaml", "train", hub_token="any-password-at-all"),
    "training_args.json": lambda f: change(f / "training_args.json", hub_token=SECRET),
    "tokenizer_config.json": lambda f: change(f / "tokenizer_config.json", auth_token="any-password-at-all"),
    "tokenizer.json": lambda f: change(f / "tokenizer.json", note=f"made with {SECRET}"),
    "adapter_config.json": lambda f: change(f / "adapter_config.json", note=f"https://me:{SECRET[:9]}@host/x"),
    "uncertainty_config.json": lambda f: change(f / "uncertainty_config.json", note=SECRET),
    "decision.json": lambda f: rewrite_decision(f, note=SECRET),
    "adapter_model.safetensors": lambda f: with_metadata(f / "adapter_model.safetensors", note=SECRET),
    "reliability.png": lambda f: (f / "reliability.png").write_bytes(b"\x89PNG\xff\n" + SECRET.encode()),
    TABLE: lambda f: change_table(f / TABLE, note=SECRET),
}


@pytest.mark.parametrize("name", HIDING_PLACES)
def test_secrets_are_found_wherever_they_hide(hub, folder, name):
    HIDING_PLACES[name](folder)
    if name == "adapter_model.safetensors":
        (folder / "decision.json").unlink()  # it is bound to the weights' hash
    with pytest.raises(UserError) as error:
        push(folder, "tester/x", tables=True)
    assert name in str(error.value) and ", line " in str(error.value) and "nothing is uploaded" in str(error.value)
    assert SECRET not in str(error.value) and "any-password" not in str(error.value)
    assert hub.requests == [] and hub.repos == {}


def test_the_token_in_use_is_found_whatever_it_looks_like(hub, folder):
    (folder / "chat_template.jinja").write_text("one\ntwo\nx stand-in-for-a-token\n")
    with pytest.raises(UserError, match="chat_template.jinja, line 3 holds an access token in use here"):
        push(folder, "tester/x", token="stand-in-for-a-token")
    assert hub.requests == []


def test_links_are_not_followed(hub, folder, tmp_path):
    secret = tmp_path / "elsewhere.json"
    secret.write_text("{}")
    for name in ("vocab.json", TABLE, "predictions"):
        path = folder / name
        kept = tmp_path / f"kept-{path.name}"
        if path.exists():
            path.rename(kept)
        path.symlink_to(secret if name == "vocab.json" else kept)
        with pytest.raises(UserError, match=f"{path.name} is a symbolic link"):
            push(folder, "tester/x", tables=True)
        path.unlink()
        if kept.exists():
            kept.rename(path)
    assert hub.requests == []


NAMES = ("jane", "Jane", "Doe", "gpu-server", "my data", "workbench7")
PATHS = [
    "/home/jane/my data/x.jsonl", "/home/Jane Doe/x.jsonl", "file:///home/jane/x.jsonl", r"C:\Users\Jane Doe\x.jsonl",
    "C:/Users/Jane Doe/x.jsonl", "~jane/x.jsonl", r"\\gpu-server\share\x.jsonl", "jane@gpu-server:/mnt/x.jsonl",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_names_of_this_machine_do_not_go_up(hub, folder, path, monkeypatch):
    monkeypatch.setattr(local_names, "_own_names", lambda: ("workbench7",))
    for name, key in (("adapter_config.json", "base_model_name_or_path"), ("uncertainty_config.json", "base_model"),
                      ("tokenizer_config.json", "name_or_path"), ("training_args.json", "output_dir"),
                      ("training_args.json", "logging_dir")):  # fmt: skip
        change(folder / name, **{key: path})
    change(folder / "training_args.json", run_name="exp-workbench7", label_names=[path])
    for section, key in (("train", "output_dir"), ("model", "name"), ("data", "root")):
        change_recipe(folder / "recipe.yaml", section, **{key: path})
    change_recipe(folder / "recipe.yaml", "data", train={"path": path, "name": "mine"}, ood=[path])
    change_command(folder / "results.json", f"dappr train {path} --set 'data.root={path}' --output-dir '{path}'")
    rewrite_decision(folder, task=path)
    change_table(folder / TABLE, checkpoint=path)
    push(folder, "tester/x", tables=True)
    files = hub.files("tester/x")
    assert len(files) > 10
    for name, content in files.items():
        text = content.decode("utf-8", errors="replace")
        if name == TABLE:
            (folder / "there.npz").write_bytes(content)
            text = json.dumps(PredictionTable.load(folder / "there.npz").meta)
        for word in NAMES:
            assert word not in text, f"{name} holds {word}"
    (folder / "there").mkdir()
    for name in ("decision.json", "uncertainty_config.json"):
        (folder / "there" / name).write_bytes(files[name])
    assert Decision.load(folder / "there").calibration_set["task"] == "x.jsonl"  # its checksum fits


def test_special_tokens_and_templates_are_no_paths(folder):
    change(folder / "tokenizer_config.json", eos_token="</s>", chat_template="{{ a / b }}</think>/no_think")
    assert collect(folder)["tokenizer_config.json"] == str(folder / "tokenizer_config.json")


def test_weights_with_a_path_in_their_metadata_are_refused(folder):
    (folder / "decision.json").unlink()
    with_metadata(folder / "adapter_model.safetensors", source="/home/jane/x")
    with pytest.raises(UserError, match="adapter_model.safetensors: its metadata 'source' holds a path"):
        collect(folder)


def test_own_paths_in_files_of_other_libraries_are_refused(hub, folder):
    (folder / "chat_template.jinja").write_text(f"first\n{{# from {folder.parent}/base #}}\n")
    with pytest.raises(UserError, match="chat_template.jinja, line 2 holds a path of this machine"):
        push(folder, "tester/x")
    assert hub.requests == []


def test_tables_whose_ids_become_equal_are_refused(folder):
    change_table(folder / TABLE)
    table = PredictionTable.load(folder / TABLE)
    table.ids = np.array([f"/data/{number}/x.png" for number in range(len(table))])
    table.save(folder / TABLE)
    with pytest.raises(UserError, match="end alike; push without --tables"):
        collect(folder, tables=True)


@pytest.mark.parametrize("text", ["[]", "data: [1]", "{", "data: x", "\\x80"])
def test_a_damaged_recipe_is_one_sentence(folder, text):
    (folder / "recipe.yaml").write_bytes(text.encode().replace(b"\\x80", b"\x80"))
    with pytest.raises(UserError, match="recipe.yaml is damaged"):
        collect(folder)


def test_private_is_kept(hub, folder):
    hub.create("tester/public", private=False)
    hub.create("tester/private", private=True)
    with pytest.raises(UserError, match="tester/public exists and is public, so nothing was published there"):
        push(folder, "tester/public", private=True)
    assert set(hub.files("tester/public")) == {".gitattributes"}
    assert not any("/commit/" in request or "/preupload/" in request for request in hub.requests)
    push(folder, "tester/private", private=True)
    push(folder, "tester/new", private=True)
    push(folder, "tester/public")
    assert hub.repos["tester/new"]["private"] and "README.md" in hub.files("tester/public")


def test_a_failure_after_the_commit_says_what_was_published(hub, folder, monkeypatch):
    hub.fail = {"tester/listed/tree": 403}
    with pytest.raises(UserError, match=r"tester/listed was published \(commit \w{40}\), but could not be checked"):
        push(folder, "tester/listed")
    assert "README.md" in hub.files("tester/listed")
    # The commit is made, but its answer is an error.
    hub.lost = {"tester/lost": 403}
    with pytest.raises(UserError, match=r"tester/lost was published \(commit \w{40}\), but with an error"):
        push(folder, "tester/lost")
    assert "README.md" in hub.files("tester/lost")
    # The commit fails, and the Hub says that there is no new one.
    hub.lost, hub.fail = {}, {"tester/refused/commit": 403}
    with pytest.raises(UserError, match="Nothing was published to tester/refused"):
        push(folder, "tester/refused")
    # The card cannot be written here afterwards.
    from dappr_llm.inference import hub as module

    def fail(path, text):
        raise UserError("Cannot write README.md: No space left on device.")

    hub.fail = {}
    monkeypatch.setattr(module, "write_text", fail)
    with pytest.raises(UserError, match=r"tester/saved was published \(commit \w{40}\), but its card not saved here"):
        push(folder, "tester/saved")


def test_when_the_hub_is_gone_after_the_commit_nothing_is_claimed(hub, folder, monkeypatch):
    from huggingface_hub import HfApi

    def lose(*args, **options):
        hub.fail = {"/api/": 403}
        raise ConnectionResetError("the line went dead")

    monkeypatch.setattr(HfApi, "create_commit", lose)
    with pytest.raises(UserError, match="It is not known whether tester/x was published"):
        push(folder, "tester/x")


def test_the_command_refuses_with_one_sentence(folder, tmp_path):
    HIDING_PLACES["results.json"](folder)
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)}
    code = [sys.executable, "-m", "dappr_llm", "push", str(folder), "tester/x"]
    done = subprocess.run(code, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("dappr:") == 1 and "Traceback" not in done.stderr
    assert "results.json, line" in done.stderr and SECRET not in done.stderr


def test_a_whole_run_passes(folder):
    contents = collect(folder, tables=True)
    contents["README.md"] = render_card(folder, "tester/x").encode()
    check_contents(contents, folder, TOKEN)
