"""Baselines that need the model before training: frozen features, and zero-shot."""

import json

import numpy as np
import pytest
import torch
import yaml
from tiny import make_rows, make_texts
from training_runs import build, build_head, write_head_recipe

from dappr_llm.commands.main import main
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.inference.batching import RowSet
from dappr_llm.text.data.tasks import items_of
from dappr_llm.training import untrained
from dappr_llm.training.untrained import before_training


def results(run):
    return json.loads((run / "results.json").read_text())["results"]


def test_a_head_is_compared_with_features_of_the_frozen_model(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr(untrained, "_MOST_ROWS", 20)
    assert main(["train", str(write_head_recipe(tmp_path, model_folder))]) == 0
    found = results(tmp_path / "run")
    assert {"baseline/features/accuracy", "minus_baseline/features/accuracy"} <= set(found)
    assert not any("zero_shot" in key for key in found)  # a new head says nothing yet
    table = PredictionTable.load(tmp_path / "run" / "baselines" / "features.npz")
    assert (table.meta["baseline"]["rows"], table.meta["baseline"]["of"]) == (20, 48)


def test_tokens_are_compared_with_the_untrained_model(tmp_path, model_folder):
    sections = {"model": {"readout": "tokens"}, "train": {"num_train_epochs": 1}}
    path = write_head_recipe(tmp_path, model_folder, **sections)
    assert main(["train", str(path)]) == 0
    values = yaml.safe_load(path.read_text())
    values["method"], values["train"]["num_train_epochs"] = {"name": "ce"}, 0
    values["train"]["output_dir"] = str(tmp_path / "zero")
    path.write_text(yaml.safe_dump(values))
    assert main(["train", str(path)]) == 0
    zero = PredictionTable.load(tmp_path / "run" / "baselines" / "zero_shot.npz")
    own = PredictionTable.load(tmp_path / "zero" / "predictions" / "mine-test.npz")
    assert np.allclose(zero.probs, own.probs, atol=1e-6)  # of the trained method's run: the plain softmax
    assert "baseline/features/accuracy" in results(tmp_path / "run")
    assert not (tmp_path / "zero" / "baselines" / "zero_shot.npz").exists()  # it would be the run itself


@pytest.mark.parametrize("start", [build, build_head])
def test_looking_before_training_changes_nothing(tmp_path, tokenizer, lora, start):
    ways = []
    for number in range(2):
        trainer = start(tmp_path / str(number), tokenizer, lora)
        if number:
            rows = items_of(make_texts(12)) if start is build_head else items_of(make_rows(12))
            found = before_training(trainer, rows, RowSet(rows, "mine", "test"))
            assert (found.features is None) != (start is build_head) and (found.zero_shot is None) != (start is build)
        trainer.train()
        ways.append({name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad})
    assert all(torch.equal(ways[0][name], ways[1][name]) for name in ways[0])
