"""Fixtures: a tiny model, its tokenizer, rows, a recipe and a trained run, all generated; nothing is downloaded."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("DAPPR_PREDICTION_CACHE", "0")  # tests of the cache set it themselves
# `dtype: auto` on every machine: most tests compare to 1e-4 or better. Those of bfloat16 say so (the fixture below).
os.environ["DAPPR_CPU_DTYPE"] = "float32"

import pytest
from tiny import build_model, build_tokenizer, make_rows, write_recipe


@pytest.fixture
def in_bfloat16(monkeypatch):
    """`dtype: auto` is bfloat16, as on CPUs with instructions for it; on others it is computed without, and slowly."""
    monkeypatch.setenv("DAPPR_CPU_DTYPE", "bfloat16")


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def model():
    return build_model()


@pytest.fixture
def make_model():
    return build_model


@pytest.fixture
def rows():
    return make_rows()


@pytest.fixture
def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM")


@pytest.fixture
def model_folder(tmp_path, tokenizer):
    """Folder of a saved base model and tokenizer."""
    folder = tmp_path / "base"
    build_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path, model_folder):
    """Path of a recipe that trains the tiny model on generated JSONL files."""
    sizes = {"train": (32, 0), "validation": (9, 40), "test": (11, 60)}
    splits = {split: make_rows(count, start) for split, (count, start) in sizes.items()}
    settings = {"per_device_train_batch_size": 8, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3}
    return write_recipe(
        tmp_path, model_folder, splits, make_rows(10, 80, options=5), evidence_offset="auto", **settings
    )


@pytest.fixture(scope="session")
def trained(tmp_path_factory, tokenizer):
    """Folder with a finished run (`trained / "run"`), its base model and data; shared by all tests, so do not modify it."""
    from serving import serving_recipe

    from dappr_llm.commands.main import main

    folder = tmp_path_factory.mktemp("trained")
    build_model().save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    assert main(["train", str(serving_recipe(folder, folder / "base"))]) == 0
    return folder


@pytest.fixture
def run_folder(trained, tmp_path):
    """A copy of the finished run that a test may modify."""
    import shutil

    return shutil.copytree(trained / "run", tmp_path / "copy")
