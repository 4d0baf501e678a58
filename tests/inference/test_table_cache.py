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
    """Its time is that of its imports: each of these would cost seconds."""
    evaluate(run_folder, tmp_path, tmp_path / "a")
    line = ["evaluate", str(run_folder), "--id", str(tmp_path / "one.jsonl"), "--ood", str(tmp_path / "two.jsonl")]
    line += ["--out", str(tmp_path / "b"), "--resamples", "20"]
    code = (
        f"import sys\nfrom dappr_llm.commands.main import main\nassert main({line!r}) == 0\n"
        "slow = {'torch', 'transformers', 'peft', 'datasets', 'pandas', 'sklearn'} & set(sys.modules)\n"
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


def test_large_files_are_read_once(tmp_path, cache):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * (1 << 20))
    first, stat = prediction_cache.file_hash(path), path.stat()
    path.write_bytes(b"y" * (1 << 20))
    assert prediction_cache.file_hash(path) != first  # its date has changed
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert prediction_cache.file_hash(path) == first  # remembered, not read


def test_no_cache_where_processes_share_the_work(monkeypatch, tmp_path):
    monkeypatch.setenv(prediction_cache.ENVIRONMENT, str(tmp_path))
    assert prediction_cache.cache_folder() == tmp_path
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert prediction_cache.cache_folder() is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(prediction_cache.ENVIRONMENT, "0")
    assert prediction_cache.cache_folder() is None
