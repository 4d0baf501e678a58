"""What `dtype: auto` means on a machine, and which dtype a checkpoint is loaded in."""

import logging

import pytest
import torch
from peft import LoraConfig

from dappr_llm import UserError
from dappr_llm.text import precision


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    """No setting in the environment, no GPU, and nothing remembered about this CPU."""
    monkeypatch.delenv(precision.CPU_DTYPE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    precision.cpu_has_bfloat16.cache_clear()
    yield
    precision.cpu_has_bfloat16.cache_clear()


def cpu(monkeypatch, **found):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)


@pytest.mark.parametrize(
    "found, wanted",
    [
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "avx512_vnni": True}, torch.float32),
        ({"neon": True}, torch.float32),
    ],
)
def test_auto_asks_the_cpu_for_its_instructions(found, wanted, monkeypatch):
    cpu(monkeypatch, **found)
    assert precision.resolve_dtype("auto") == precision.resolve_dtype(None) == wanted
    assert precision.resolve_dtype("auto", frozen=False) == torch.float32


@pytest.mark.parametrize(
    "flags, wanted", [("fpu avx512_bf16 sse", True), ("fpu avx512f avx512bw", False), ("", False)]
)
def test_an_older_torch_leaves_it_to_linux(flags, wanted, monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(precision, "_linux_flags", lambda: dict.fromkeys(flags.split(), True))
    assert precision.cpu_has_bfloat16() is wanted


def test_the_flags_of_this_machine_are_those_that_torch_finds():
    """Where both can be asked, they agree."""
    flags = precision._linux_flags()
    if not flags or not hasattr(torch.cpu, "get_capabilities"):
        pytest.skip("nothing to compare")
    found = torch.cpu.get_capabilities()
    for name in precision._INSTRUCTIONS:
        assert found.get(name, False) == flags.get(name, False)


def test_the_environment_decides_for_machines_that_are_to_compute_alike(monkeypatch):
    cpu(monkeypatch, avx512_bf16=True)
    monkeypatch.setenv(precision.CPU_DTYPE, "fp32")
    assert precision.resolve_dtype("auto") == torch.float32
    monkeypatch.setenv(precision.CPU_DTYPE, "bfloat16")
    cpu(monkeypatch)
    assert precision.resolve_dtype("auto") == torch.bfloat16
    assert precision.resolve_dtype("float32") == torch.float32
    assert precision.resolve_dtype("auto", frozen=False) == torch.float32
    monkeypatch.setenv(precision.CPU_DTYPE, "float16")
    with pytest.raises(UserError, match="DAPPR_CPU_DTYPE"):
        precision.resolve_dtype("auto")


def test_unknown_dtypes_are_answered_with_the_nearest():
    assert precision.resolve_dtype("bfloat16") == precision.resolve_dtype("bf16") == torch.bfloat16
    with pytest.raises(UserError, match="'bfloat16'"):
        precision.resolve_dtype("bfloat61")


def test_what_trains_the_base_model_itself():
    assert precision.trains_base(None)
    assert not precision.trains_base(LoraConfig())
    assert precision.trains_base(LoraConfig(modules_to_save=["embed_tokens"]))
    assert precision.trains_base(LoraConfig(bias="lora_only"))
    assert precision.trains_base(LoraConfig(trainable_token_indices=[3]))


@pytest.mark.parametrize(
    "asked, held, wanted",
    [
        ("auto", "bfloat16", "bfloat16"),
        (None, "float32", "float32"),
        ("auto", "float16", "float16"),
        ("float32", "bfloat16", "float32"),
        ("auto", None, torch.float32),
        ("auto", "float32, 4bit nf4", torch.float32),
    ],
)
def test_a_checkpoint_is_loaded_as_it_was_trained_unless_asked_otherwise(asked, held, wanted, monkeypatch):
    cpu(monkeypatch, avx512_bf16=True)
    assert precision.trained_dtype(asked, {"precision": held}) == wanted


def test_a_cpu_without_instructions_says_that_it_is_slow(monkeypatch, caplog):
    cpu(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        precision.warn_if_slow(torch.float32)
        assert not caplog.records
        precision.warn_if_slow(torch.bfloat16)
    assert "no instructions" in caplog.text and "float32 is faster" in caplog.text
    caplog.clear()
    cpu(monkeypatch, amx_bf16=True)
    precision.cpu_has_bfloat16.cache_clear()
    precision.warn_if_slow(torch.bfloat16)
    assert not caplog.records
