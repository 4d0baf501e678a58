"""An adapter holds LoRA weights as its config says, and nothing that changes the base model behind its back."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dappr_llm import UserError, load_checkpoint
from dappr_llm.inference.ensemble import AdapterEnsemble
from dappr_llm.inference.import_adapter import adopt
from dappr_llm.text.adapter_files import check_adapter

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def changed(run_folder):
    """Rewrites the adapter of a run: tensors by name, or what a function makes of all; keys of its config."""

    def change(tensors=None, **config):
        (run_folder / "manifest.json").unlink(missing_ok=True)  # as on the Hub
        path = run_folder / "adapter_model.safetensors"
        weights = load_file(path)
        weights = tensors(weights) if callable(tensors) else weights | (tensors or {})
        save_file(weights, path)
        path = run_folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return run_folder

    return change


@pytest.fixture
def refused(trained):
    return lambda folder, *words: check_refused(folder, trained / "run", words)


def check_refused(folder, sound, words):
    """A checkpoint, and a later member of an ensemble, whose adapter is loaded beside the first one's."""
    for load in (load_checkpoint, lambda name: AdapterEnsemble.from_pretrained([sound, name])):
        with pytest.raises(UserError) as found:
            load(folder)
        message = str(found.value)
        assert all(word in message for word in words), message
        assert "\n" not in message


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.model.norm.weight",
        "base_model.model.lm_head.base_layer.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
        "base_model.model.model.layers.0.mlp.up_proj.bias",
        "model.norm.weight",
    ],
)
def test_weights_of_the_base_model_are_refused(changed, refused, name):
    refused(changed({name: torch.ones(32)}), "adapter_model.safetensors", name, "base model")


def test_a_weight_that_is_named_but_nowhere_in_the_model_is_refused(changed, refused):
    name = "base_model.model.elsewhere.weight"
    refused(changed({name: torch.ones(3)}, modules_to_save=["elsewhere"]), name)


def test_integer_weights_are_refused(changed, refused):
    refused(changed(lambda all: all | {FIRST: (all[FIRST] * 100).to(torch.int8)}), FIRST, "I8", "floating-point")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(changed, refused, bad):
    def spoil(weights):
        weights[FIRST][0, 0] = bad
        return weights

    refused(changed(spoil), "adapter_model.safetensors", FIRST, "NaN or infinite")


@pytest.mark.parametrize("shape", [(4, 33), (5, 32), (128,), (0, 32), (5000, 32)])
def test_wrong_shapes_are_refused(changed, refused, shape):
    refused(changed({FIRST: torch.zeros(shape)}), FIRST)


def test_missing_weights_are_refused(changed, refused):
    refused(changed(lambda all: {name: value for name, value in all.items() if name != FIRST}), FIRST)


def test_a_file_without_lora_weights_is_refused(changed, refused):
    refused(changed(lambda all: {}), "no LoRA weights")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"r": 10**9}, "r is 1000000000; allowed: a whole number of at least 1 and at most 4096"),
        ({"r": 4000}, "rank 4000"),
        ({"rank_pattern": {"q_proj": 4000}}, "rank 4000"),
        ({"rank_pattern": {"q_proj": 10**6}}, "rank_pattern"),
        ({"target_modules": r"(.*\.)*(.*_)*(.*)*!"}, "target_modules"),
        ({"target_modules": "(a+)+$"}, "target_modules"),
        ({"exclude_modules": "(a|a)*$"}, "exclude_modules"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "alpha_pattern"),
        ({"layers_to_transform": [0], "layers_pattern": "(a+)+"}, "layers_pattern"),
        ({"megatron_config": {"x": 1}, "megatron_core": "antigravity"}, "megatron"),
        ({"peft_type": "PROMPT_TUNING"}, "only LORA"),
        ({"peft_type": ["LORA"]}, "only LORA"),
        ({"revision": "../../../x"}, "revision"),
        ({"revision": 3}, "revision"),
        ({"base_model_name_or_path": {}}, "base_model_name_or_path"),
    ],
)
def test_unsafe_configs_are_refused_before_anything_is_loaded(changed, config, word, monkeypatch):
    monkeypatch.setattr("dappr_llm.text.lm.load_lm", lambda *_, **__: pytest.fail("the base model was loaded"))
    folder = changed(**config)
    with pytest.raises(UserError, match="adapter_config.json") as found:
        load_checkpoint(folder)
    assert word in str(found.value)


@pytest.mark.parametrize("content", ["", "[]", "null", '{"peft_type": ', "[" * 10_000, "\udc80"])
def test_damaged_configs_are_refused(changed, content):
    path = changed() / "adapter_config.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match="adapter_config.json"):
        load_checkpoint(path.parent)


def test_an_import_is_checked_too(changed, tmp_path, trained):
    folder = changed({"base_model.model.model.norm.weight": torch.ones(32)})
    (folder / "uncertainty_config.json").unlink()
    with pytest.raises(UserError, match="norm.weight"):
        adopt(str(folder), tmp_path / "out", str(trained / "base"))
    assert not (tmp_path / "out").exists()


def test_what_modules_to_save_names_is_loaded(tmp_path, model):
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["q_proj"], "modules_to_save": ["norm"], "bias": "lora_only", "use_dora": True}
    get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **options)).save_pretrained(tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert any("norm.weight" in name for name in names) and any("magnitude" in name for name in names)
    check_adapter(tmp_path)


# --- the sidecar's tokens -------------------------------------------------------------------------------------------


def test_swapped_letters_in_the_tokenizer_are_refused(run_folder, monkeypatch):
    monkeypatch.setattr("dappr_llm.text.lm.load_lm", lambda *_, **__: pytest.fail("the base model was loaded"))
    (run_folder / "manifest.json").unlink()
    path = run_folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="uncertainty_config.json: letter_token_ids.*tokenizer"):
        load_checkpoint(run_folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("letter_token_ids", [37, 36, 38, 39]),
        ("letter_token_ids", [36, 37]),
        ("letters", ["B", "A", "C", "D"]),
        ("extra_token_ids", [[36, 37, 38, 39]]),
        ("base_revision", "../../x"),
    ],
)
def test_token_ids_and_revision_of_the_sidecar_are_compared(run_folder, key, value):
    (run_folder / "manifest.json").unlink()
    path = run_folder / "uncertainty_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=f"uncertainty_config.json.*{key}"):
        load_checkpoint(run_folder)


def test_a_sidecar_without_them_has_its_old_meaning(run_folder):
    (run_folder / "manifest.json").unlink()
    path = run_folder / "uncertainty_config.json"
    content = json.loads(path.read_text())
    for key in ("extra_token_ids", "base_revision", "precision", "data_revisions"):
        content.pop(key)
    path.write_text(json.dumps(content))
    assert load_checkpoint(run_folder).backend.num_choices == 4


def test_a_damaged_tokenizer_is_one_sentence(run_folder):
    (run_folder / "manifest.json").unlink()
    path = run_folder / "tokenizer.json"
    for content in ("{", '{"model": 3}', path.read_text().replace('"WordLevel"', '"Nothing"')):
        path.write_text(content)
        with pytest.raises(UserError, match="Could not load the tokenizer"):
            load_checkpoint(run_folder)
