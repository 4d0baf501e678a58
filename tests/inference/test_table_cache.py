"""A second evaluation computes nothing; anything that changes a prediction is computed again."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from tiny import make_rows, write_rows

from dappr_llm.commands import shared
from dappr_llm.commands.main import main
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.inference import table_cache as prediction_cache
from dappr_llm.inference.batching import RowSet


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(prediction_cache.ENVIRONMENT, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def loads(monkeypatch):
    """How often a model was loaded."""
    seen = []
    load = shared.load_predictor
    monkeypatch.setattr(shared, "load_predictor", lambda *args, **kwargs: seen.append(args) or load(*args, **kwargs))
    return seen


def evaluate(run, folder, out, *more):
    rows = [write_rows(folder / f"{name}.jsonl", make_rows(7, start)) for name, start in (("one", 40), ("two", 60))]
    line = ["evaluate", str(run), "--id", rows[0], "--ood", rows[1], "--out", str(out), "--resamples", "0", *more]
    assert main(line) == 0
    return {path.name: PredictionTable.load(path) for path in (out / "predictions").glob("*.npz")}


def test_a_second_evaluation_loads_no_model(run_folder, tmp_path, cache, loads):
    first = evaluate(run_folder, tmp_path, tmp_path / "a")
    assert len(loads) == 1 and len(list(cache.glob("*.npz"))) == 2
    second = evaluate(run_folder, tmp_path, tmp_path / "b")
    assert len(loads) == 1 and first.keys() == second.keys() == {"one-test.npz", "two-test.npz"}
    for name, table in first.items():
        assert np.array_equal(table.probs, second[name].probs) and table.meta == second[name].meta
    results = [json.loads((tmp_path / out / "results.json").read_text())["results"] for out in "ab"]
    assert results[0] == results[1]
    evaluate(run_folder, tmp_path, tmp_path / "c", "--no-cache")
    assert len(loads) == 2


def test_a_second_evaluation_imports_nothing_slow(run_folder, tmp_path, cache):
    """Its time is that of its imports: each of these would cost seconds. TF-IDF beside OOD figures is scikit-learn's."""
    evaluate(run_folder, tmp_path, tmp_path / "a")
    line = ["evaluate", str(run_folder), "--id", str(tmp_path / "one.jsonl"), "--ood", str(tmp_path / "two.jsonl")]
    line += ["--out", str(tmp_path / "b"), "--resamples", "20"]
    code = (
        f"import sys\nfrom dappr_llm.commands.main import main\nassert main({line!r}) == 0\n"
        "slow = {'torch', 'transformers', 'peft', 'datasets'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr


def test_only_what_is_missing_is_computed(run_folder, tmp_path, cache, loads):
    evaluate(run_folder, tmp_path, tmp_path / "a")
    line = ["predict", str(run_folder), "--task", str(tmp_path / "two.jsonl"), "--out", str(tmp_path / "t.npz")]
    assert main(line) == 0 and len(loads) == 1
    assert main([*line, "--limit", "3"]) == 0 and len(loads) == 2
    for path in cache.glob("*.npz"):
        path.write_bytes(path.read_bytes()[:50])  # damaged: computed again, no error
    assert main(line) == 0 and len(loads) == 3


def test_a_name_holds_all_that_matters(run_folder, tmp_path, cache):
    from datasets import Dataset

    copy = shutil.copytree(run_folder, tmp_path / "other" / run_folder.name)
    key = prediction_cache.model_key([str(run_folder)])
    assert key and key == prediction_cache.model_key([str(copy)])  # contents, not places
    assert key != prediction_cache.model_key([str(run_folder)], quantization={"load_in_4bit": True})
    assert key != prediction_cache.model_key([str(run_folder), str(copy)])
    sidecar = copy / "uncertainty_config.json"
    config = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps({**config, "evidence_offset": config["evidence_offset"] + 1}))
    assert key != prediction_cache.model_key([str(copy)])
    sidecar.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    assert key == prediction_cache.model_key([str(copy)])
    weights = copy / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert key != prediction_cache.model_key([str(copy)])

    row = {"id": "1", "question": "Which ?", "options": ["a", "b"], "label": 0}
    names = set()
    for changes in ({}, {"id": "2"}, {"question": "What ?"}, {"options": ["b", "a"]}, {"label": 1}):
        names.add(prediction_cache.table_key(key, RowSet(Dataset.from_list([{**row, **changes}]), "t", "test")))
    names.add(prediction_cache.table_key(key, RowSet(Dataset.from_list([row]), "t", "train")))
    names.add(prediction_cache.table_key(key, RowSet(Dataset.from_list([row]), "t", "test", {"checkpoint": "x"})))
    assert len(names) == 7 and None not in names
    assert prediction_cache.table_key(key, RowSet([{"image": 1}], "t")) is None


def test_a_base_model_that_is_not_here_means_no_cache(run_folder, cache):
    assert prediction_cache.model_key([str(run_folder)], base="somebody/elsewhere") is None


def test_large_files_are_read_once(tmp_path, cache, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * (1 << 20))
    read, real = [], prediction_cache.sha256
    monkeypatch.setattr(prediction_cache, "sha256", lambda path: read.append(path) or real(path))
    first = prediction_cache.file_hash(path)
    assert prediction_cache.file_hash(path) == first and len(read) == 2  # written a moment ago: not yet remembered
    monkeypatch.setattr(prediction_cache, "_SETTLED", -1.0)
    for _ in range(3):
        assert prediction_cache.file_hash(path) == first
    assert len(read) == 3


@pytest.mark.parametrize("replaced", [False, True])
def test_a_hash_is_not_remembered_by_size_and_date_alone(tmp_path, cache, monkeypatch, replaced):
    monkeypatch.setattr(prediction_cache, "_SETTLED", -1.0)
    path, other = tmp_path / "model.safetensors", tmp_path / "other"
    path.write_bytes(b"x" * (1 << 20))
    first, stat = prediction_cache.file_hash(path), path.stat()
    (other if replaced else path).write_bytes(b"y" * (1 << 20))
    if replaced:
        other.rename(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert prediction_cache.file_hash(path) != first


def test_a_blob_of_the_hubs_cache_is_hashed_whatever_its_name(tmp_path, cache):
    path = tmp_path / "blobs" / ("0" * 64)
    path.parent.mkdir()
    path.write_bytes(b"x" * (1 << 20))
    assert prediction_cache.file_hash(path) != path.name


@pytest.mark.parametrize(
    "name",
    [
        *("pytorch_model.bin", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "vocab.json"),
        *("pytorch_model.bin.index.json", "merges.txt", "special_tokens_map.json", "tokenizer.model"),
    ],
)
def test_every_file_of_the_base_model_is_in_the_key(run_folder, trained, tmp_path, cache, name):
    base = shutil.copytree(trained / "base", tmp_path / "base_copy")
    keys = [prediction_cache.model_key([str(run_folder)], str(base))]
    for content in (b"one", b"two"):
        (base / name).write_bytes(content)
        keys.append(prediction_cache.model_key([str(run_folder)], str(base)))
    assert len(set(keys)) == 3 and None not in keys


@pytest.mark.parametrize("change", ["ids", "labels", "num_options", "task"])
def test_an_entry_of_other_rows_is_not_used(run_folder, tmp_path, cache, loads, change):
    first = evaluate(run_folder, tmp_path, tmp_path / "a")
    for path in cache.glob("*.npz"):
        table = PredictionTable.load(path)
        if change == "task":
            table.meta["task"] = "elsewhere"
        elif change == "ids":
            table.ids = table.ids[::-1]
        elif change == "labels":
            table.labels = (table.labels + 1) % 4
        else:
            table.num_options, table.labels = table.num_options - 1, np.minimum(table.labels, 2)
        table.save(path)
    second = evaluate(run_folder, tmp_path, tmp_path / "b")
    assert len(loads) == 2
    for name, table in first.items():
        assert np.array_equal(table.probs, second[name].probs) and table.ids.tolist() == second[name].ids.tolist()


def test_the_folder_is_its_owners_alone(run_folder, tmp_path, cache, loads):
    evaluate(run_folder, tmp_path, tmp_path / "a")
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o777)  # as an older version may have left it
    evaluate(run_folder, tmp_path, tmp_path / "b")
    assert cache.stat().st_mode & 0o777 == 0o700 and len(loads) == 1


def test_a_folder_of_somebody_else_is_not_used(run_folder, tmp_path, cache, loads, monkeypatch):
    evaluate(run_folder, tmp_path, tmp_path / "a")
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    evaluate(run_folder, tmp_path, tmp_path / "b")
    assert len(loads) == 2


def test_no_cache_where_processes_share_the_work(monkeypatch, tmp_path):
    monkeypatch.setenv(prediction_cache.ENVIRONMENT, str(tmp_path))
    assert prediction_cache.cache_folder() == tmp_path
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert prediction_cache.cache_folder() is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(prediction_cache.ENVIRONMENT, "0")
    assert prediction_cache.cache_folder() is None
