"""Ensembles: from saved tables, from runs, and from adapters that share one base model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_rows, write_rows

from dappr_llm import AdapterEnsemble, UserError, load_checkpoint
from dappr_llm.commands.main import main
from dappr_llm.evaluation.ensemble_tables import combine
from dappr_llm.evaluation.prediction_table import PredictionTable


@pytest.fixture
def runs(recipe, tmp_path):
    """Trains one run per seed, of any method."""

    def train(*seeds, method="{name: dappr, reg_weight: 5e-3, schedule: constant}"):
        folders = []
        for seed in seeds:
            folder = tmp_path / f"seed{seed}"
            settings = [f"method={method}", f"train.seed={seed}", "train.num_train_epochs=1", "train.eval_strategy=no"]
            options = [part for setting in settings for part in ("--set", setting)]
            assert main(["train", str(recipe), "--output-dir", str(folder), *options]) == 0
            folders.append(str(folder))
        return folders

    return train


def read(path):
    return json.loads(Path(path).read_text())


def tables(folders, name="mine-test"):
    return [PredictionTable.load(f"{folder}/predictions/{name}.npz") for folder in folders]


@pytest.mark.parametrize("method", ["{name: dappr}", "{name: ce}", "{name: ib_edl}"])
def test_one_base_and_many_adapters_equal_separate_models(runs, tmp_path, method):
    folders = runs(0, 1, 2, method=method)
    wanted = combine(tables(folders))
    out = tmp_path / "ensemble.npz"
    assert main(["predict", *folders, "--task", str(tmp_path / "test.jsonl"), "--out", str(out)]) == 0
    found = PredictionTable.load(out)
    np.testing.assert_allclose(found.probs, wanted.probs[:, :4], atol=1e-5)
    np.testing.assert_allclose(found.epistemic, wanted.epistemic, atol=1e-4)
    assert found.meta["ensemble"] == 3

    ensemble = AdapterEnsemble.from_pretrained(folders)
    rows = make_rows(11, 60)
    answer = ensemble.predict([row["question"] for row in rows], [row["choices"] for row in rows])
    np.testing.assert_allclose(answer.probs.numpy(), found.probs, atol=1e-5)
    np.testing.assert_allclose(answer.epistemic.numpy(), found.epistemic, atol=1e-4)


@pytest.mark.parametrize("method", ["{name: dappr}", "{name: ib_edl}"])
def test_members_side_by_side_equal_members_in_turn(runs, method):
    """One forward pass for all of them, each with its own adapter (of the head too) and offset."""
    ensemble = AdapterEnsemble.from_pretrained(runs(0, 1, 2, method=method))
    ensemble.members[1] = replace(ensemble.members[1], evidence_offset=0.7)
    model, calls = ensemble.run.model, []
    assert "member2" in model.get_output_embeddings().lora_A
    model.get_base_model().register_forward_hook(lambda *_: calls.append(1))
    for count in (1, 5):
        rows = make_rows(count, 60)
        encoded = ensemble.run.encoded([r["question"] for r in rows], [r["choices"] for r in rows])
        together, turns = ensemble.predict_together(*encoded), ensemble.predict_in_turn(*encoded)
        for one, other in zip(together, turns, strict=True):
            assert torch.allclose(one.alpha, other.alpha, atol=1e-4)
        assert not torch.allclose(together[0].alpha, together[2].alpha, atol=1e-4)
    calls.clear()
    ensemble.predict("Which one is a fruit ?", ["plum", "saw", "red", "sky"])
    assert len(calls) == 1


def test_members_take_turns_where_rows_cannot_mix_adapters(runs):
    ensemble = AdapterEnsemble.from_pretrained(runs(0, 1))
    many = make_rows(400, 60)
    encoded = ensemble.run.encoded([r["question"] for r in many], [r["choices"] for r in many])
    assert ensemble.predict_together(*encoded) is None
    few = ensemble.run.encoded("Which one is a fruit ?", ["plum", "saw", "red", "sky"])
    assert ensemble.predict_together(*few) is not None
    ensemble.run.model.peft_config["member1"].use_dora = True
    assert ensemble.predict_together(*few) is None


def test_memory_grows_by_adapters(runs):
    folders = runs(0, 1, 2)
    one = sum(p.numel() for p in load_checkpoint(folders[0]).model.parameters())
    ensemble = AdapterEnsemble.from_pretrained(folders)
    three = sum(p.numel() for p in ensemble.run.model.parameters())
    adapter = sum(p.numel() for n, p in ensemble.run.model.named_parameters() if ".member1." in n)
    assert adapter > 0 and three - one == 2 * adapter


def test_members_keep_their_own_offset_and_leave_no_trace(runs):
    folders = runs(0, 1)
    configs = [read(f"{folder}/uncertainty_config.json") for folder in folders]
    ensemble = AdapterEnsemble.from_pretrained(folders)
    assert [member.evidence_offset for member in ensemble.members] == [c["evidence_offset"] for c in configs]
    question = ("Which one is a fruit ?", ["plum", "saw", "red", "sky"])
    before = load_checkpoint(folders[0]).predict(*question)
    ensemble.predict(*question)
    assert torch.allclose(ensemble.run.predict(*question).probs, before.probs, atol=1e-6)


def test_evaluate_an_ensemble(runs, tmp_path, capsys):
    folders = runs(0, 1)
    tasks = ["--id", str(tmp_path / "test.jsonl"), "--ood", str(tmp_path / "other.jsonl")]
    assert main(["evaluate", *folders, *tasks]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["evaluate", *folders, *tasks, "--out", str(tmp_path / "both")]) == 0
    by_model = read(tmp_path / "both" / "results.json")["results"]
    assert main(["combine", *folders, "--out", str(tmp_path / "combined")]) == 0
    by_tables = read(tmp_path / "combined" / "results.json")["results"]
    assert by_model == pytest.approx(by_tables, abs=1e-4)
    assert (tmp_path / "combined" / "reliability.png").is_file()


def test_combine_single_tables(runs, tmp_path):
    folders = runs(0, 1)
    paths = [f"{folder}/predictions/mine-test.npz" for folder in folders]
    out = tmp_path / "both.npz"
    assert main(["combine", *paths, "--out", str(out)]) == 0
    np.testing.assert_allclose(PredictionTable.load(out).alpha, np.mean([t.alpha for t in tables(folders)], axis=0))


def test_what_cannot_be_combined_is_refused(runs, tmp_path, capsys):
    (folder,) = runs(0)
    paths = [f"{folder}/predictions/{name}-test.npz" for name in ("mine", "other")]
    assert main(["combine", *paths, "--out", str(tmp_path / "x.npz")]) == 2
    assert "items and letters" in capsys.readouterr().err
    table = PredictionTable.load(paths[0])
    table.labels[3] = (table.labels[3] + 1) % 4
    table.save(tmp_path / "changed.npz")
    assert main(["combine", paths[0], str(tmp_path / "changed.npz"), "--out", str(tmp_path / "x.npz")]) == 2
    assert "labels[3]" in capsys.readouterr().err
    assert main(["combine", folder, str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert "no prediction table at" in capsys.readouterr().err
    assert main(["combine", folder, folder, "--out", folder]) == 2
    assert "holds a run" in capsys.readouterr().err
    assert main(["combine", *paths, "--out", str(tmp_path / "folder")]) == 2
    assert "must end in .npz" in capsys.readouterr().err
    assert not (tmp_path / "x.npz").exists()


def test_members_that_read_other_questions_are_refused(runs, recipe, tmp_path):
    folders = runs(0)
    other = tmp_path / "other_prompt"
    options = ["--set", "train.max_length=77", "--set", "train.num_train_epochs=1"]
    assert main(["train", str(recipe), "--output-dir", str(other), *options]) == 0
    with pytest.raises(UserError, match="max_length is 77, not 256"):
        AdapterEnsemble.from_pretrained([*folders, str(other)])
    with pytest.raises(UserError, match="at least one"):
        AdapterEnsemble.from_pretrained([])


def test_zero_epochs_test_the_starting_adapter_with_another_method(runs, recipe, tmp_path):
    """MC dropout trains like cross-entropy, so it may read the weights of a cross-entropy run."""
    (folder,) = runs(0, method="{name: ce}")
    write_rows(tmp_path / "train.jsonl", make_rows(32))
    settings = ["method={name: mc_dropout, passes: 3}", f"model.adapter={folder}", "train.num_train_epochs=0"]
    options = [part for setting in settings for part in ("--set", setting)]
    out = tmp_path / "mc"
    assert main(["train", str(recipe), "--output-dir", str(out), *options]) == 2  # no dropout in this recipe
    config = read(f"{folder}/adapter_config.json")
    config["lora_dropout"] = 0.3
    Path(folder, "adapter_config.json").write_text(json.dumps(config))
    Path(folder, "manifest.json").unlink()  # changed on purpose
    assert main(["train", str(recipe), "--output-dir", str(out), *options, "--resume"]) == 0
    (table,) = tables([out])
    assert table.members.shape[0] == 3 and table.epistemic.max() > 0
    assert load_checkpoint(out).method.passes == 3
