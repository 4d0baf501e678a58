"""`dappr plan`: its arithmetic against a real tiny model's counts and bytes."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import build_model

from dappr_llm import UserError
from dappr_llm.commands.main import main
from dappr_llm.scale.plan import Sizes, gpu_memory, measure, weight_bytes
from dappr_llm.text.plan_model import _blocks, forward, load_config, meta_model
from dappr_llm.training.memory import kept_bytes, kept_bytes_by_block

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "lm_head"], "task_type": "CAUSAL_LM"}


def test_counts_and_kept_bytes_are_those_of_a_real_model():
    real = get_peft_model(build_model(), LoraConfig(**LORA))
    sizes = measure(meta_model(build_model().config, LoraConfig(**LORA), length=20, dtype=torch.float32), batch=3)
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
    kept, within = kept_bytes_by_block(real, lambda: forward(real, 3, 20), _blocks(real))
    assert len(within) == 2 and min(within) > 0 and sum(within) < kept
    assert kept == kept_bytes(real, lambda: forward(real, 3, 20))
    assert sizes.activations == pytest.approx(kept, rel=0.3)  # kernels keep a little more or less
    assert sizes.activations_checkpointed < sizes.activations


def test_activations_grow_with_batch_and_length():
    config = build_model().config
    small, twice, long = (
        measure(meta_model(config, LoraConfig(**LORA), n), b).activations for b, n in ((2, 20), (4, 20), (2, 40))
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
    whole = Sizes(1000, 1000, 0, 0, 1000, 0, 0)  # an image classifier: nothing is quantised
    for precision in ("float32", "bf16 autocast"):
        assert gpu_memory(whole, precision, "single_gpu", 4, 8000, 50) == 4000 + 4000 + 8000 + 50
    assert gpu_memory(whole, "8-bit", "single_gpu", 4, 8000, 50) is None
    assert gpu_memory(whole, "4-bit", "single_gpu", 4, 8000, 50) is None


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


def test_an_image_recipes_figures_are_those_of_its_real_model(capsys):
    from dappr_llm.core.recipe import load_recipe
    from dappr_llm.training.build import build_args, build_run

    assert main(["plan", "digits/dappr", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    recipe = load_recipe("digits/dappr")
    real = build_run(recipe, build_args(recipe))
    parameters = sum(p.numel() for p in real.model.parameters())
    assert found["sizes"]["parameters"] == found["sizes"]["trainable"] == parameters
    assert found["model"] == "convnet" and found["example"] == [1, 8, 8] and found["batch"] == 32
    rows = len(real.train)
    assert (found["rows"], found["steps_per_epoch"], found["steps"]) == (rows, -(-rows // 32), 30 * -(-rows // 32))
    assert found["coefficients"][0] == [0, pytest.approx(real.method.reg_weight)]
    pixels = torch.zeros(32, 1, 8, 8)
    kept = kept_bytes(real.model, lambda: real.model.train()(pixel_values=pixels))
    assert found["sizes"]["activations"] == pytest.approx(kept, rel=0.02)
    assert found["sizes"]["activations_autocast"] < found["sizes"]["activations"]
    state = found["optimizer_bytes"]
    assert state == 8 * parameters and list(found["memory"]) == ["single_gpu", "multi_gpu"]
    single = found["memory"]["single_gpu"]
    assert single["float32"] == 8 * parameters + state + found["sizes"]["activations"]
    assert found["memory"]["multi_gpu"]["float32"] == single["float32"] + 4 * parameters
    assert single["8-bit"] is None and single["4-bit"] is None
    assert found["length"] is None and found["tokens"] is None


@pytest.mark.parametrize("name", ["mnist/dappr", "mnist/daedl", "mnist/natpn", "imagenet_mae/dappr"])
def test_image_recipes_plan_without_data_weights_or_network(name, capsys, monkeypatch):
    """A ConvNet, spectral normalisation, a head that wants class counts, and a frozen ViT with pretrained weights."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", name, "--rows", "48000"]) == 0
    printed = capsys.readouterr().out
    assert "48,000 rows" in printed and "single_gpu" in printed and "bf16 autocast" in printed
    assert "tokens" not in printed and "gradient checkpointing" not in printed and "fsdp2" not in printed
    (row,) = (line.split() for line in printed.splitlines() if line.startswith("  single_gpu"))
    assert row[-2:] == ["-", "-"]


def test_steps_count_dropped_batches_and_auxiliary_rows(capsys):
    def steps(name, *settings):
        assert main(["plan", name, "--rows", "1000", "--json", *(p for s in settings for p in ("--set", s))]) == 0
        return json.loads(capsys.readouterr().out)["steps_per_epoch"]

    assert steps("mnist/dappr") == 16  # batches of 64, the last one short
    assert steps("mnist/dappr", "train.dataloader_drop_last=true") == 15
    assert steps("mnist/dappr", "train.gradient_accumulation_steps=5") == 4
    half = ["train.per_device_train_batch_size=64", "data.auxiliary_share=0.5"]
    assert steps("mnist/kl_pn", *half) == 32  # as many auxiliary rows again


def test_a_run_without_steps_has_no_plan(capsys):
    assert main(["plan", "mnist/dappr", "--set", "train.num_train_epochs=0", "--rows", "64"]) == 2
    assert "no step to train" in capsys.readouterr().err


def test_options_of_language_models_are_refused_for_images(capsys):
    assert main(["plan", "mnist/dappr", "--rows", "1000", "--length", "20"]) != 0
    assert "trains on images" in capsys.readouterr().err
