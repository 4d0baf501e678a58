"""`dappr plan`: its arithmetic against a real tiny model's counts and bytes."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import build_model

from dappr_llm import UserError
from dappr_llm.commands.main import main
from dappr_llm.scale.plan import Sizes, _blocks, _kept_bytes, gpu_memory, load_config, measure, weight_bytes

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "lm_head"], "task_type": "CAUSAL_LM"}


def test_counts_and_kept_bytes_are_those_of_a_real_model():
    real = get_peft_model(build_model(), LoraConfig(**LORA))
    sizes = measure(build_model().config, LoraConfig(**LORA), batch=3, length=20, dtype=torch.float32)
    assert sizes.parameters == sum(p.numel() for p in real.parameters())
    assert sizes.trainable == sum(p.numel() for p in real.parameters() if p.requires_grad)
    base = build_model()
    assert sizes.largest_unit == max(
        sum(p.numel() for p in part.parameters()) for part in (base.model.layers[0], base.lm_head)
    )
    layer = base.model.layers[0]
    linear = [m.weight for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    assert sizes.linear == 2 * sum(w.numel() for w in linear)
    assert sizes.linear_rows == 2 * sum(w.shape[0] for w in linear)
    kept, within = _kept_bytes(real, _blocks(real), 3, 20)
    assert len(within) == 2 and sizes.activations == pytest.approx(kept, rel=0.3)  # kernels keep a little more or less
    assert sizes.activations_checkpointed < sizes.activations


def test_activations_grow_with_batch_and_length():
    config = build_model().config
    small, twice, long = (
        measure(config, LoraConfig(**LORA), b, n).activations for b, n in ((2, 20), (4, 20), (2, 40))
    )
    assert twice == pytest.approx(2 * small, rel=0.02) and long == pytest.approx(2 * small, rel=0.02)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_bytes_are_those_of_bitsandbytes(bits):
    """One layer, really quantised: weights and scales, byte for byte."""
    bnb = pytest.importorskip("bitsandbytes")
    rows, columns = 512, 256
    sizes = Sizes(rows * columns, 0, rows * columns, rows, 0, 0, 0)
    if bits == 8:
        wanted = rows * columns + 4 * rows
        assert weight_bytes(sizes, "8-bit") == wanted
        return
    layer = bnb.nn.Linear4bit(columns, rows, bias=False, compress_statistics=True, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(torch.randn(rows, columns), requires_grad=False, quant_type="nf4")
    layer = layer.to("cpu")
    state = layer.weight.quant_state
    if state is None:
        packed, state = bnb.functional.quantize_4bit(
            torch.randn(rows, columns), quant_type="nf4", compress_statistics=True
        )
    else:
        packed = layer.weight.data
    real = packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert weight_bytes(sizes, "4-bit") == pytest.approx(real, abs=16)


def test_memory_adds_up():
    sizes = Sizes(1000, 100, 600, 10, 300, 0, 0)
    weights = 2 * 900 + 4 * 100
    assert weight_bytes(sizes, "bf16") == weights
    assert gpu_memory(sizes, "bf16", "single_gpu", 4, 800, 50) == weights + 400 + 800 + 50
    assert gpu_memory(sizes, "bf16", "multi_gpu", 4, 800, 50) == weights + 800 + 800 + 50
    assert gpu_memory(sizes, "bf16", "fsdp2", 4, 800, 50) == (weights + 1200) // 4 + 2 * round(0.3 * weights) + 50
    assert gpu_memory(sizes, "8-bit", "fsdp2", 4, 800, 50) is None


def test_the_mistral_recipe_plans_without_network(capsys):
    assert main(["plan", "obqa_mistral7b/dappr", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Mistral-7B-v0.1 has 7,241,732,096 parameters; LoRA of rank 8 on q, v and the head adds the rest.
    lora = 32 * (8 * (4096 + 4096) + 8 * (4096 + 1024)) + 8 * (4096 + 32000)
    assert found["sizes"]["trainable"] == lora and found["sizes"]["parameters"] == 7_241_732_096 + lora
    assert (found["steps"], found["steps_per_epoch"], found["rows"]) == (10080, 1240, 4957)
    assert found["tokens"] == 10080 * 4 * 300
    assert found["coefficients"][-1] == [8, pytest.approx(1.6e-4)]
    assert "never completes" in found["warnings"][0]


def test_no_warning_where_the_warm_up_completes(capsys):
    settings = ["--set", "method.warmup_epochs=4", "--rows", "1000", "--length", "64"]
    assert main(["plan", "obqa_mistral7b/dappr", *settings]) == 0
    printed = capsys.readouterr().out
    assert "warning" not in printed and "GiB per GPU" in printed and "fsdp2" in printed


def test_a_config_file_is_enough_and_a_missing_one_is_named(tmp_path, monkeypatch):
    build_model().config.save_pretrained(tmp_path)
    assert load_config("org/elsewhere", str(tmp_path / "config.json")).hidden_size == 32
    with pytest.raises(UserError, match="no such file"):
        load_config("org/elsewhere", str(tmp_path / "none.json"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="--config FILE"):
        load_config("org/elsewhere")
