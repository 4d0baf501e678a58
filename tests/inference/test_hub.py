"""
Publishing and loading through the real `huggingface_hub` client, against a stand-in for the Hub on loopback.

Clients run in processes of their own, because `huggingface_hub` reads its settings when it is imported.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fake_hub import TOKEN, FakeHub
from serving import questions

from dappr_llm.commands.main import main
from dappr_llm.core.errors import UserError
from dappr_llm.inference.card import eval_files, render_card, save_card
from dappr_llm.inference.hub import collect

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hub():
    with FakeHub() as server:
        yield server


@pytest.fixture(scope="module")
def calibrated(trained, tmp_path_factory):
    import shutil

    folder = shutil.copytree(trained / "run", tmp_path_factory.mktemp("hub") / "run")
    command = ["calibrate", str(folder), "--task", str(trained / "validation.jsonl"), "--max-risk", "0.9"]
    assert main(command) == 0
    return folder


def client(hub, tmp_path, code, token=TOKEN, **settings):
    """Run code in a fresh process that knows the stand-in as the Hub; its output, or its error."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    env = kept | hub.env(tmp_path, token) | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | settings
    return subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)


def command(*lines):
    """Code that runs command lines one after another and prints each exit code."""
    return "from dappr_llm.commands.main import main\n" + "\n".join(
        f"print('exit', main({list(map(str, line))!r}))" for line in lines
    )


def test_round_trip(hub, calibrated, trained, tmp_path):
    """Train, calibrate, push, load from the Hub in a fresh process: the same predictions and decisions."""
    pushed = client(hub, tmp_path, command(["push", calibrated, "tester/adapter", "--private", "--tables"]))
    assert "exit 0" in pushed.stdout, pushed.stderr
    assert "torch" not in pushed.stderr and "files in one commit" in pushed.stdout
    commits = [request for request in hub.requests if "/commit/" in request]
    assert len(commits) == 1 and any("PUT /lfs/" in request for request in hub.requests)
    files = hub.files("tester/adapter")
    assert hub.repos["tester/adapter"]["private"]
    assert files["adapter_model.safetensors"] == (calibrated / "adapter_model.safetensors").read_bytes()
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert {"decision.json", "results.json", "recipe.yaml", "predictions/mine-test.npz", "reliability.png"} <= set(
        files
    )
    for name, content in files.items():  # nothing of this machine leaves it
        assert str(trained).encode() not in content, name

    commit = re.search(r"tree/(\w{40})", pushed.stdout)[1]
    # A later commit on main must not change what the pinned revision gives.
    hub.commit("tester/adapter", "main", [{"key": "deletedFile", "value": {"path": "adapter_model.safetensors"}}])
    rows = questions(12, 21) + questions(5, 22, options=3)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    code = (
        "import json, sys; from dappr_llm import UncertaintyPipeline\n"
        f"pipe = UncertaintyPipeline.from_pretrained('tester/adapter', base_model={str(trained / 'base')!r}, "
        f"revision={commit!r})\n"
        "print('ANSWERS' + json.dumps([a.to_dict() for a in pipe(json.load(open('rows.json')))]))"
    )
    loaded = client(hub, tmp_path, code)
    assert "ANSWERS" in loaded.stdout, loaded.stderr
    there = json.loads(loaded.stdout.split("ANSWERS")[1])
    from dappr_llm import UncertaintyPipeline

    here = [answer.to_dict() for answer in UncertaintyPipeline.from_pretrained(calibrated)(rows)]
    assert there == here
    assert any("/resolve/" in request for request in hub.requests) and any("/cdn/" in r for r in hub.requests)


def test_refusals_are_one_sentence_and_leave_nothing(hub, calibrated, tmp_path):
    hub.create("tester/there", private=False)
    hub.create("tester/secret", private=True)
    hub.fail = {"tester/large.git/info/lfs": 403, "tester/late/commit": 403, "tester/preupload/": 500}
    loads = [["ask", "tester/there", "--revision", "v9"], ["ask", "tester/nobody"], ["ask", "tester/there"],
             ["ask", "tester/secret"]]  # fmt: skip
    pushes = [["push", calibrated, "tester/x"], ["push", "nowhere", "tester/x"], ["push", calibrated, "just-a-name"]]
    token = "import os; os.environ['HF_TOKEN'] = {!r}\n"
    found = client(
        hub,
        tmp_path,
        command(*loads, *pushes)
        + "\n" + token.format("hf_wrong") + command(["push", calibrated, "tester/new"])
        + "\n" + token.format(TOKEN) + command(["push", calibrated, "tester/large"], ["push", calibrated, "tester/late"]),
        token=None,
    )  # fmt: skip
    assert found.stdout.count("exit 2") == 10 and "Traceback" not in found.stderr, found.stderr
    lines = [line for line in found.stderr.splitlines() if line.startswith("dappr:")]
    wanted = [
        "no revision 'v9'", "knows no tester/nobody", "not a checkpoint", "private", "hf auth login", "no such folder",
        "user/name", "refused the token", "Nothing was published to tester/large", "Nothing was published to tester/late",
    ]  # fmt: skip
    for line, words in zip(lines, wanted, strict=True):
        assert words in line
    assert "tester/x" not in hub.repos and "tester/new" not in hub.repos
    for name in ("tester/large", "tester/late"):
        assert set(hub.files(name)) == {".gitattributes"}


def test_no_network(hub, calibrated, tmp_path, capsys):
    # Not `ask`: for downloads the client tries again for half a minute before it gives up.
    gone = client(hub, tmp_path, command(["push", calibrated, "tester/x"]), HF_ENDPOINT="http://127.0.0.1:9")
    assert "exit 2" in gone.stdout and "Traceback" not in gone.stderr, gone.stderr
    assert "Nothing was published to tester/x" in gone.stderr
    # The tests themselves run offline.
    assert main(["push", str(calibrated), "tester/x"]) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    assert main(["ask", "tester/x"]) == 2
    assert capsys.readouterr().err.count("dappr:") == 1


def test_training_publishes_its_own_card(hub, trained, tmp_path, monkeypatch):
    """`push_to_hub=True`: our card and tags, no pickle, no draft of Trainer's or PEFT's."""
    import transformers.trainer
    from huggingface_hub import HfApi, constants
    from peft import LoraConfig

    from dappr_llm import DAPPrConfig, DAPPrTrainer

    # Trainer keeps its client, which an earlier test may have made for another endpoint.
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: HfApi(endpoint=hub.endpoint))

    for name, value in {"ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    args = DAPPrConfig(
        str(tmp_path / "out"), push_to_hub=True, hub_model_id="tester/trained", max_steps=2, save_steps=1, max_length=64,
        report_to="none", logging_steps=1, disable_tqdm=True, per_device_train_batch_size=8, hub_token=TOKEN,
        run_name="https://me:secret-word@tracker.example/run",
    )  # fmt: skip
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = DAPPrTrainer(str(trained / "base"), args, questions(16, 0), questions(8, 1), peft_config=lora)
    trainer.train()
    written = (tmp_path / "out" / "checkpoint-2" / "training_args.json").read_text()
    assert TOKEN not in written and "secret-word" not in written and "tracker.example" in written
    assert trainer.push_to_hub(tags=["ignored"]).url.endswith("tester/trained")
    files = hub.files("tester/trained")
    card = files["README.md"].decode()
    assert "dappr_llm" in yaml.safe_load(card.split("---")[1])["tags"] and "More Information Needed" not in card
    assert "Training log" in card and "Trainer" not in card
    assert not [name for name in files if name.endswith((".bin", ".pt"))]
    assert not list((tmp_path / "out").glob("*.bin"))
    assert len([r for r in hub.requests if "/commit/" in r]) == 3  # two saves and the end
    # A branch of its own, made on the way; main stays as it is.
    before = dict(files)
    from dappr_llm import push

    done = push(tmp_path / "out", "tester/trained", revision="v1", license="mit")
    assert hub.repos["tester/trained"]["branches"]["v1"] == done.commit
    assert b"license: mit" in hub.files("tester/trained", "v1")["README.md"] and hub.files("tester/trained") == before


@pytest.mark.parametrize("ending", ["command", "save_model", "push_to_hub"])
def test_the_end_of_training_writes_once_and_commits_once(hub, trained, tmp_path, monkeypatch, ending):
    import transformers.trainer
    from huggingface_hub import HfApi, constants
    from peft import LoraConfig

    from dappr_llm import DAPPrConfig, DAPPrTrainer
    from dappr_llm.training import trainer as module

    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: HfApi(endpoint=hub.endpoint))
    for name, value in {"ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    writes, write = [], module.write_checkpoint
    monkeypatch.setattr(module, "write_checkpoint", lambda *args: (writes.append(1), write(*args)))
    if ending == "command":
        settings = {"output_dir": tmp_path / "out", "push_to_hub": "true", "hub_model_id": "tester/once"}
        settings |= {"max_steps": 1, "save_strategy": "no", "eval_strategy": "no"}
        given = [part for key, value in settings.items() for part in ("--set", f"train.{key}={value}")]
        assert main(["train", str(trained / "recipe.yaml"), *given]) == 0
    else:
        lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        args = DAPPrConfig(
            str(tmp_path / "out"), push_to_hub=True, hub_model_id="tester/once", max_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, max_length=64,
        )  # fmt: skip
        trainer = DAPPrTrainer(str(trained / "base"), args, questions(16, 0), peft_config=lora)
        trainer.train()
        getattr(trainer, ending)()
    assert writes == [1]
    assert len([request for request in hub.requests if "/commit/" in request]) == 1
    files = hub.files("tester/once")
    assert "adapter_model.safetensors" in files
    assert ("results.json" in files) == (ending == "command")  # the card of a run has its results


def test_card_numbers_are_those_of_the_results(calibrated):
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard_data import model_index_to_eval_results

    results = json.loads((calibrated / "results.json").read_text())["results"]
    card = ModelCard(render_card(calibrated, "tester/adapter"))
    _, found = model_index_to_eval_results(card.data.to_dict()["model-index"])
    names = {"accuracy": "accuracy", "nll": "nll", "ece": "expected_calibration_error", "brier": "brier_score"}
    names["macro_f1"] = "f1"
    values = {(entry.dataset_name, entry.metric_type): entry.metric_value for entry in found}
    for key, kind in names.items():
        assert values["mine", kind] == results[f"id/{key}"]
    assert values["other (out of distribution)", "roc_auc"] == results["ood/other/auroc"]
    # Of answers under shift, accuracy alone.
    shifted = {kind for name, kind in values if name == "other (out of distribution)"}
    assert shifted == {"accuracy", "roc_auc", "average_precision"}
    assert f"{100 * results['id/accuracy']:.2f}" in card.text and f"{results['id/nll']:.3f}" in card.text


def test_the_card_is_whole(calibrated):
    from huggingface_hub import ModelCard

    text = render_card(calibrated, "tester/adapter", license="mit")
    card = ModelCard(text)
    data = card.data.to_dict()
    assert "base_model" not in data and data["library_name"] == "peft" and data["license"] == "mit"  # a local base
    assert {"dappr_llm", "uncertainty", "lora", "dappr"} <= set(data["tags"])
    for part in ("0.005", "mine", "reliability.png", "Decision rule", "Training log", "Limits", "Versions", "torch",
                 "Answer:", "UncertaintyPipeline.from_pretrained", "| step |"):  # fmt: skip
        assert part in text, part
    assert "[More Information Needed]" not in text and "{{" not in text and "None" not in text
    assert str(calibrated.parent) not in text and "\n\n\n" not in text
    assert str(ModelCard(str(card))) == str(card)


def test_the_cards_snippet_runs(calibrated, trained):
    text = render_card(calibrated, "tester/adapter")
    snippet = re.search(r"```python\n(.*?)```", text, flags=re.S)[1]
    assert 'base_model="folder of the base model"' in snippet
    snippet = snippet.replace("folder of the base model", str(trained / "base")).replace(
        "tester/adapter", str(calibrated)
    )
    scope = {}
    exec(snippet, scope)
    assert scope["out"].answer in ("hammer", "plum", "violin", "sock")


def test_a_hub_base_is_named_and_kept(run_folder, tmp_path):
    for name, key in (("uncertainty_config.json", "base_model"), ("adapter_config.json", "base_model_name_or_path")):
        content = json.loads((run_folder / name).read_text()) | {key: "mistralai/Mistral-7B-v0.1"}
        (run_folder / name).write_text(json.dumps(content))
    text = render_card(run_folder, "tester/adapter")
    assert yaml.safe_load(text.split("---")[1])["base_model"] == "mistralai/Mistral-7B-v0.1"
    assert "base_model=" not in re.search(r"```python\n(.*?)```", text, flags=re.S)[1]
    assert collect(run_folder)["adapter_config.json"] == str(run_folder / "adapter_config.json")


def test_intervals_reach_card_and_eval_files(run_folder):
    from huggingface_hub import parse_eval_result_entries

    path = run_folder / "results.json"
    content = json.loads(path.read_text())
    content["meta"] |= {"id": "obqa", "ood": ["other"]}
    content["intervals"] = {"id/accuracy": [0.1234, 0.5678]}
    path.write_text(json.dumps(content))
    text = render_card(run_folder, "tester/adapter")
    assert "0.1234" in text and "95 % interval 0.1234 to 0.5678" in text
    files = eval_files(run_folder, "https://huggingface.co/tester/adapter")
    assert list(files) == [
        ".eval_results/obqa.yaml"
    ]  # the other task is a file of this machine: no dataset of the Hub
    (entry,) = parse_eval_result_entries(yaml.safe_load(files[".eval_results/obqa.yaml"]))
    assert (entry.dataset_id, entry.task_id) == ("allenai/openbookqa", "main")
    assert entry.value == content["results"]["id/accuracy"] and "0.1234 to 0.5678" in entry.notes


def test_a_card_without_results(run_folder):
    for name in ("results.json", "reliability.png", "alpha0.png", "recipe.yaml"):
        (run_folder / name).unlink()
    text = render_card(run_folder, "tester/adapter")
    assert "Not evaluated yet" in text and "None" not in text and "reliability.png" not in text


def test_saving_writes_the_short_card(trained, tmp_path):
    """The same template without what a saved model cannot know yet; results in the folder are another model's."""
    text = (trained / "run" / "README.md").read_text()
    data = yaml.safe_load(text.split("---")[1])
    assert data["library_name"] == "peft" and {"dappr_llm", "lora", "dappr"} <= set(data["tags"])
    assert "base_model" not in data and "model-index" not in data and "license" not in data
    for part in ("# Uncertainty-aware adapter", "up to 4 options", "0.005", "uncertainty_config.json"):
        assert part in text, part
    for part in ("## Results", "Training log", "Versions", "None", "{{", str(trained), "\n\n\n"):
        assert part not in text, part
    assert len(text.splitlines()) < 50
    config = json.loads((trained / "run" / "uncertainty_config.json").read_text())
    save_card(tmp_path, config | {"base_model": "mistralai/Mistral-7B-v0.1"})
    text = (tmp_path / "README.md").read_text()
    assert yaml.safe_load(text.split("---")[1])["base_model"] == "mistralai/Mistral-7B-v0.1"


def test_a_damaged_results_file_is_named(run_folder):
    (run_folder / "results.json").write_text('{"meta": {}, "results": {}, "intervals": {"id/nll": [1]}}')
    with pytest.raises(UserError, match="results.json is damaged: intervals.id/nll"):
        render_card(run_folder, "tester/adapter")


def test_nothing_damaged_is_uploaded(run_folder, calibrated):
    import shutil

    weights = run_folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    with pytest.raises(UserError, match="adapter_model.safetensors is damaged"):
        collect(run_folder)
    weights.write_bytes(whole)
    shutil.copy(calibrated / "decision.json", run_folder)
    collect(run_folder)
    text = (run_folder / "decision.json").read_text()
    (run_folder / "decision.json").write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match="decision.json is not a valid JSON file"):
        collect(run_folder)
    weights.unlink()
    with pytest.raises(UserError, match="holds no weights"):
        collect(run_folder)


def test_mistral_recipes_adapter_is_small_and_its_keys_are_vllms():
    """Counted from the config on the meta device: no weights needed. vLLM loads q/v/lm_head LoRA pairs and no more."""
    import torch
    from peft import get_peft_model, get_peft_model_state_dict
    from transformers import MistralConfig, MistralForCausalLM

    from dappr_llm.core.recipe import load_recipe
    from dappr_llm.text.build import build_lora

    with torch.device("meta"):
        model = MistralForCausalLM(MistralConfig())  # transformers' defaults are Mistral-7B-v0.1's
        model = get_peft_model(model, build_lora(load_recipe("obqa_mistral7b/dappr")))
    assert sum(p.numel() for p in model.get_base_model().parameters() if not p.requires_grad) > 7.2e9
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert all(value.dtype == torch.float32 for value in state.values())
    size = 4 * sum(value.numel() for value in state.values())
    assert size == 4 * (32 * 8 * (4096 + 4096) + 32 * 8 * (4096 + 1024) + 8 * (4096 + 32000))  # 14.1 MiB
    assert size < 15 * 2**20  # leaves 5 MiB for the tokenizer and the sidecar files
    for name in state:
        assert re.fullmatch(
            r"base_model\.model\.(model\.layers\.\d+\.self_attn\.[qv]_proj|lm_head)\.lora_[AB]\.weight", name
        ), name
