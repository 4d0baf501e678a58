"""One call from a question to a decision: same answers whatever the batch, bad input in one sentence."""

import json
import logging
import shutil
import socket

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from serving import questions

from dappr_llm import UncertaintyPipeline, load_checkpoint
from dappr_llm.commands.main import main
from dappr_llm.core.errors import UserError
from dappr_llm.evaluation.prediction_table import PredictionTable


@pytest.fixture(scope="module")
def calibrated(trained, tmp_path_factory):
    """The run with a decision rule."""
    folder = shutil.copytree(trained / "run", tmp_path_factory.mktemp("calibrated") / "run")
    wishes = ["--max-risk", "0.9", "--alpha", "0.2"]
    assert main(["calibrate", str(folder), "--task", str(trained / "validation.jsonl"), *wishes]) == 0
    return folder


@pytest.fixture(scope="module")
def pipe(calibrated):
    return UncertaintyPipeline.from_pretrained(calibrated)


def same(left, right):
    for one, two in zip(left, right, strict=True):
        assert (one.id, one.answer, one.letter) == (two.id, two.answer, two.letter)
        assert np.allclose(
            [*one.probs, one.aleatoric, one.epistemic], [*two.probs, two.aleatoric, two.epistemic], atol=1e-4
        )
        assert (one.prediction_set, one.abstain) == (two.prediction_set, two.abstain)


def test_one_question(pipe):
    out = pipe("Which one is a fruit ?", choices=["hammer", "plum", "sky"])
    assert out.answer == out.choices["ABC".index(out.letter)] and out.choices == ("hammer", "plum", "sky")
    assert sum(out.probs) == pytest.approx(1) and max(out.probs) == out.probs["ABC".index(out.letter)]
    assert out.aleatoric == pytest.approx(1 - max(out.probs))
    assert out.epistemic == pytest.approx(3 / sum(out.alpha), rel=1e-4)  # K/alpha0, untouched by calibration
    assert out.letter in out.prediction_set and set(out.prediction_set) <= set("ABC") and out.abstain in (True, False)
    assert json.loads(json.dumps(out.to_dict()))["prediction_set"] == list(out.prediction_set)


def test_batches_order_and_layout_change_nothing(pipe):
    rows = questions(30, 7) + questions(10, 8, options=2) + questions(10, 9, options=3)
    wanted = pipe(rows, batch_size=1)
    same(wanted, pipe(rows, batch_size=7))
    same(wanted, pipe(rows[::-1], batch_size=16)[::-1])
    same(wanted[:30], pipe(Dataset.from_list(rows[:30]), progress=True))
    same(wanted[:30], pipe(pd.DataFrame(rows[:30])))
    same(wanted[:30], list(pipe.stream(pd.DataFrame(rows[:30]))))
    texts = pipe([row["question"] for row in rows], choices=[row["choices"] for row in rows])
    assert [a.answer for a in texts] == [a.answer for a in wanted]


def test_a_generator_is_streamed(pipe):
    taken = []

    def endless():
        for number in range(10**9):
            taken.append(number)
            yield questions(1, f"stream {number}")[0]

    answers = pipe(endless(), batch_size=2)
    first = [next(answers) for _ in range(3)]
    assert len(first) == 3 and len(taken) <= 64


def test_the_pipeline_says_what_the_table_says(pipe, calibrated, trained):
    """Two ways through the code, one set of numbers; and the rule on top of them by hand."""
    assert (
        main(["predict", str(calibrated), "--task", str(trained / "test.jsonl"), "--out", str(trained / "t.npz")]) == 0
    )
    table = PredictionTable.load(trained / "t.npz")
    rows = [json.loads(line) for line in (trained / "test.jsonl").read_text().splitlines()]
    raw = UncertaintyPipeline.from_pretrained(calibrated, decision=False)(rows)
    assert np.allclose([a.probs for a in raw], table.probs[:, :4], atol=1e-4)
    assert np.allclose([a.epistemic for a in raw], table.epistemic, atol=1e-4)
    assert raw[0].prediction_set is None and raw[0].abstain is None
    power = np.array([a.probs for a in raw]) ** (1 / pipe.decision.temperature)
    assert np.allclose([a.probs for a in pipe(rows)], power / power.sum(axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize(
    "question, choices, words",
    [
        ("Which ?", ["plum", "fig", "pear", "saw", "sky"], "trained on 4 letters .*extra_letters"),
        ("Which ?", ["plum", " "], "choice B is empty"),
        ("Which ?", ["plum", "fig", "plum "], "choices A and C are the same"),
        ("Which ?", ["plum"], "at least 2"),
        ("", ["plum", "fig"], "question is empty"),
        ("very long story " * 40, ["plum", "fig"], "longer than the 64 tokens .*truncate"),
        ("Which ?", None, "needs its choices"),
        ("Which ?", "plum", "list of texts"),
    ],
)
def test_bad_questions_are_one_sentence(pipe, question, choices, words):
    with pytest.raises(UserError, match=words):
        pipe(question, choices=choices)


def test_what_is_refused_can_be_asked_for(calibrated, caplog):
    pipe = UncertaintyPipeline.from_pretrained(calibrated, extra_letters=True, truncate=True)
    assert len(pipe("Which ?", choices=["plum", "fig", "pear", "saw", "sky"]).probs) == 5
    assert len(pipe("very long story " * 40, choices=["plum", "fig"]).probs) == 2
    run = load_checkpoint(calibrated)
    with pytest.raises(UserError, match="only 4 letters are trained"):
        run.predict("Which ?", list("abcde"))
    assert run.predict("Which ?", list("abcde"), extra_letters=True).probs.shape == (1, 5)


def test_a_rule_for_other_weights_is_refused(run_folder, calibrated):
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copy(calibrated / "decision.json", run_folder)
    weights = load_file(run_folder / "adapter_model.safetensors")
    save_file({k: v + 0.01 * torch.ones_like(v) for k, v in weights.items()}, run_folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="other weights"):
        UncertaintyPipeline.from_pretrained(run_folder)
    (run_folder / "manifest.json").unlink()  # changed on purpose
    assert UncertaintyPipeline.from_pretrained(run_folder, decision=False).decision is None


def test_a_truncated_adapter_and_a_pickle_are_refused(run_folder):
    path = run_folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="adapter_model.safetensors is damaged"):
        UncertaintyPipeline.from_pretrained(run_folder, decision=False)
    (run_folder / "manifest.json").unlink()  # as on the Hub
    with pytest.raises(UserError, match="adapter_model.safetensors is damaged"):
        UncertaintyPipeline.from_pretrained(run_folder, decision=False)
    path.rename(run_folder / "adapter_model.bin")
    with pytest.raises(UserError, match="no adapter_model.safetensors"):
        UncertaintyPipeline.from_pretrained(run_folder)


def test_a_missing_base_and_one_of_another_shape(run_folder, tmp_path, make_model, tokenizer):
    with pytest.raises(UserError, match="Could not load the model"):
        UncertaintyPipeline.from_pretrained(run_folder, base_model=str(tmp_path / "gone"))
    from transformers import GPT2Config, GPT2LMHeadModel

    others = {
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=80, n_embd=32, n_layer=2, n_head=4, n_positions=256)),
        "deeper": _deeper(),
    }
    for name, model in others.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        with pytest.raises(UserError, match="Could not load the adapter"):
            UncertaintyPipeline.from_pretrained(run_folder, base_model=str(tmp_path / name))


def _deeper():
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(
        MistralConfig(
            vocab_size=80,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            pad_token_id=0,
        )  # fmt: skip
    )


def test_as_a_transformers_pipeline(calibrated, pipe):
    import transformers

    from dappr_llm import register_pipeline

    theirs = transformers.pipeline(register_pipeline(), model=str(calibrated))
    rows = questions(6, 11)
    ours = pipe(rows)
    found = theirs(rows)
    assert [a["answer"] for a in found] == [a.answer for a in ours]
    assert np.allclose([a["probs"] for a in found], [a.probs for a in ours], atol=1e-4)
    single = theirs(rows[0]["question"], choices=rows[0]["choices"])
    assert single["answer"] == ours[0].answer and single["abstain"] == ours[0].abstain


def test_a_transformers_pipeline_of_a_local_folder_needs_no_hub(calibrated, pipe, tmp_path, monkeypatch):
    """An adapter on the bundled model names the original on the Hub, for others; its base is here all the same."""
    import transformers

    from dappr_llm import register_pipeline

    folder = tmp_path / "run"
    shutil.copytree(calibrated, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "owner/not-in-the-cache"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "manifest.json").unlink()  # it holds the checksum of what was changed
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("asked the network"))
    found = transformers.pipeline(register_pipeline(), model=str(folder))("Which one ?", choices=["plum", "saw"])
    assert found["probs"] == pytest.approx(pipe("Which one ?", choices=["plum", "saw"]).probs, abs=1e-5)


def test_other_tasks_of_transformers_load_their_configs_as_ever(model_folder):
    from transformers import AutoConfig, pipelines

    from dappr_llm import register_pipeline

    register_pipeline()
    for task in (None, "text-generation"):
        found = pipelines.AutoConfig.from_pretrained(str(model_folder), _from_pipeline=task)
        assert found.to_dict() == AutoConfig.from_pretrained(str(model_folder)).to_dict()
    assert issubclass(pipelines.AutoConfig, AutoConfig)


def test_a_4bit_base_answers(calibrated):
    pytest.importorskip("bitsandbytes")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    out = UncertaintyPipeline.from_pretrained(calibrated, load_in_4bit=True)("Which one ?", choices=["plum", "saw"])
    assert sum(out.probs) == pytest.approx(1)


def test_an_id_of_100_000_characters_is_one_sentence(pipe, calibrated, tmp_path, capsys):
    rows = [*questions(3, 5), dict(questions(1, 6)[0], id="x" * 100_000)]
    with pytest.raises(UserError, match="3: the id 'xxxxxxxxxxxxxxxxxxxx'… has 100,000 characters"):
        pipe(rows)
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for out in ("answers.jsonl", "table.npz"):
        command = ["predict", str(calibrated), "--task", str(tmp_path / "mine.jsonl"), "--out", str(tmp_path / out)]
        assert main(command) == 2
        assert "mine.jsonl, line 4: the id" in capsys.readouterr().err
    (tmp_path / "mine.jsonl").write_text("[" * 100_000)
    assert main(command) == 2 and "line 1: JSON that is nested too deeply" in capsys.readouterr().err
