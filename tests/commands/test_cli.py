"""The real commands, end to end on a tiny model; mistakes are one sentence and exit code 2."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny import make_rows, write_rows

from dappr_llm.commands.main import main
from dappr_llm.evaluation.prediction_table import PredictionTable

ROOT = Path(__file__).resolve().parents[2]


def test_train_predict_evaluate(recipe, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", str(recipe)]) == 0
    printed = capsys.readouterr().out
    assert "accuracy" in printed and "matched" in printed and str(run) in printed
    wanted = {
        "adapter_model.safetensors", "adapter_config.json", "uncertainty_config.json", "recipe.yaml", "results.json",
        "reliability.png", "alpha0.png",
    }  # fmt: skip
    assert wanted <= {path.name for path in run.iterdir()}
    trained = json.loads((run / "results.json").read_text())
    assert trained["schema_version"] == 2 and len(trained["intervals"]["id/nll"]) == 2
    assert trained["meta"]["tables"] == {"mine": "predictions/mine-test.npz", "other": "predictions/other-test.npz"}
    assert trained["results"]["id/n"] == 11 and trained["results"]["ood/other/n"] == 10
    assert trained["results"]["ood/other/options/5"] == 10
    assert {"longest_option", "majority_letter", "tfidf_options", "zero_shot"} == set(trained["meta"]["baselines"])
    assert len(trained["intervals"]["minus_baseline/tfidf_options/accuracy"]) == 2 and "worth it" in printed
    assert 0 <= trained["results"]["ood/other/auroc_trivial_length"] <= 1
    assert len(trained["intervals"]["ood/other/auroc_trivial_tfidf"]) == 2  # against the training rows
    table = PredictionTable.load(run / "predictions" / "other-test.npz")
    assert table.text_distance is not None and len(table.lengths) == len(table.logits) == 10
    assert trained["meta"]["versions"]["torch"] and trained["meta"]["command"].startswith("dappr")

    # The same figures from the checkpoint, and from tables with no model at all.
    other = str(tmp_path / "other.jsonl")
    command = [
        "evaluate",
        str(run),
        "--id",
        str(tmp_path / "test.jsonl"),
        "--ood",
        other,
        "--out",
        str(tmp_path / "e1"),
    ]
    assert main([*command, "--batch-size", "3"]) == 0
    tables = [str(run / "predictions" / name) for name in ("mine-test.npz", "other-test.npz")]
    code = (
        "import sys; from dappr_llm.commands.main import main;"
        f"assert main(['evaluate', '--id', {tables[0]!r}, '--ood', {tables[1]!r}, '--out', {str(tmp_path / 'e2')!r}]) == 0;"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)
    for folder in ("e1", "e2"):
        results = json.loads((tmp_path / folder / "results.json").read_text())["results"]
        assert results == pytest.approx(trained["results"], abs=1e-4)

    # Without --out the run's own results and tables stay as they are, whatever is evaluated.
    own = {path: path.read_bytes() for path in (run / "results.json", *(run / "predictions").iterdir())}
    assert main([*command[:-2], "--limit", "5", "--resamples", "20"]) == 0
    assert {path: path.read_bytes() for path in own} == own
    elsewhere = run / "evaluations" / "test-test+other-first5"
    assert json.loads((elsewhere / "results.json").read_text())["results"]["id/n"] == 5
    assert len((elsewhere / "predictions" / "test-test.items.jsonl").read_text().splitlines()) == 5

    # A report from what training wrote, with the words of the questions.
    assert main(["report", str(run), "--resamples", "20"]) == 0
    assert "Which one is a" in (run / "report" / "report.html").read_text()

    # Every rotation of every question, and the same figures from the audit's table alone.
    assert main(["audit", str(run), "--task", str(tmp_path / "test.jsonl"), "--resamples", "20"]) == 0
    audited = json.loads((run / "audits" / "test-test" / "audit.json").read_text())
    assert audited["results"]["n"] == 11 and audited["results"]["options/4"] == 11
    assert audited["results"]["accuracy_original"] == pytest.approx(trained["results"]["id/accuracy"])
    table = str(run / "audits" / "test-test" / "audit.npz")
    assert main(["audit", table, "--out", str(tmp_path / "again"), "--resamples", "20"]) == 0
    assert json.loads((tmp_path / "again" / "audit.json").read_text())["results"] == audited["results"]

    # Rows without answers, into Parquet.
    rows = make_rows(6, 90)
    for row in rows:
        del row["answer"]
    task = write_rows(tmp_path / "asked.jsonl", rows)
    assert main(["predict", str(run), "--task", task, "--out", str(tmp_path / "asked.npz")]) == 0
    table = PredictionTable.load(tmp_path / "asked.npz")
    assert table.ids.tolist() == [row["id"] for row in rows] and set(table.labels) == {-1}
    assert np.allclose(table.probs.sum(-1), 1, atol=1e-5)
    assert main(["predict", str(run), "--task", task, "--out", str(tmp_path / "asked.parquet"), "--limit", "2"]) == 0
    import pyarrow.parquet

    assert pyarrow.parquet.read_table(tmp_path / "asked.parquet").num_rows == 2


def test_starting_from_an_existing_adapter(recipe, tmp_path, capsys):
    assert main(["train", str(recipe)]) == 0
    first = tmp_path / "run"
    settings = [
        "--set",
        f"model.adapter={first}",
        "--set",
        "train.learning_rate=0",
        "--set",
        "train.evidence_offset=null",
    ]
    assert main(["train", str(recipe), "--output-dir", str(tmp_path / "second"), *settings]) == 0
    one, two = (
        json.loads((folder / "results.json").read_text())["results"] for folder in (first, tmp_path / "second")
    )
    # Learning rate 0: it is the same adapter, offset included. Only the model before training is another one.
    own, other = ({key: value for key, value in found.items() if "zero_shot" not in key} for found in (one, two))
    assert other == pytest.approx(own, abs=1e-5)
    offsets = [
        json.loads((f / "uncertainty_config.json").read_text())["evidence_offset"]
        for f in (first, tmp_path / "second")
    ]
    assert offsets[0] == offsets[1] != 0


def test_an_adapter_keeps_its_shape_but_may_change_its_dropout(recipe, tmp_path, capsys):
    quick = ["--set", "train.num_train_epochs=1", "--set", "train.eval_strategy=no"]
    assert main(["train", str(recipe), *quick]) == 0
    start = [*quick, "--set", f"model.adapter={tmp_path / 'run'}", "--output-dir", str(tmp_path / "second")]
    assert main(["train", str(recipe), *start, "--set", "lora.r=8"]) == 2
    assert "lora.r is 8 (adapter: 4)" in capsys.readouterr().err
    changes = ["--set", "lora.lora_alpha=5", "--set", "lora.target_modules=[q_proj]"]
    assert main(["train", str(recipe), *start, *changes]) == 2
    error = capsys.readouterr().err
    assert "lora.lora_alpha is 5 (adapter: 8)" in error and "lora.target_modules is ['q_proj'] (adapter: {" in error
    assert "lora.r " not in error
    assert main(["train", str(recipe), *start, "--set", "lora.lora_dropout=0.3"]) == 0
    found = json.loads((tmp_path / "second" / "adapter_config.json").read_text())
    assert found["lora_dropout"] == 0.3 and found["r"] == 4


@pytest.mark.parametrize("modules", ["all-linear", r"'.*\.(q|v)_proj'", "[v_proj, q_proj]"])
def test_an_adapter_goes_on_with_its_own_lora_section(recipe, tmp_path, modules):
    """PEFT saves what it found for `all-linear`, and not that word."""
    quick = [
        "--set",
        "train.max_steps=1",
        "--set",
        "train.eval_strategy=no",
        "--set",
        f"lora.target_modules={modules}",
    ]
    assert main(["train", str(recipe), *quick]) == 0
    start = ["--set", f"model.adapter={tmp_path / 'run'}", "--output-dir", str(tmp_path / "second")]
    assert main(["train", str(recipe), *quick, *start]) == 0


def test_output_folder_rules(recipe, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", str(recipe)]) == 0
    adapter = (run / "adapter_model.safetensors").read_bytes()
    capsys.readouterr()
    assert main(["train", str(recipe), "--set", "train.learning_rate=1e-4"]) == 2
    assert "holds another run (its train.learning_rate is 0.01, now 0.0001)" in capsys.readouterr().err
    assert main(["train", str(recipe)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["train", str(recipe), "--resume"]) == 0
    assert "finished" in capsys.readouterr().out
    assert (run / "adapter_model.safetensors").read_bytes() == adapter
    # Interrupted after training, before the figures: resuming must not start over.
    before = json.loads((run / "results.json").read_text())["results"]
    (run / "results.json").unlink()
    assert main(["train", str(recipe), "--resume"]) == 0
    assert json.loads((run / "results.json").read_text())["results"] == pytest.approx(before, abs=1e-5)
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "thesis.tex").write_text("precious")
    assert main(["train", str(recipe), "--output-dir", str(busy), "--overwrite"]) == 2
    assert "not empty" in capsys.readouterr().err and (busy / "thesis.tex").read_text() == "precious"


def test_interrupt_saves_and_resume_goes_on(recipe, tmp_path):
    """Ctrl-C in the middle: exit code 130, a checkpoint of that step, and the same end as an undisturbed run."""
    run = tmp_path / "run"
    slow = ["--set", "train.num_train_epochs=40", "--set", "train.save_steps=1000", "--set", "train.eval_strategy=no"]
    command = [sys.executable, "-m", "dappr_llm", "train", str(recipe), *slow]
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [*command, "--set", "train.logging_steps=1"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
    )
    deadline = time.time() + 120
    while time.time() < deadline and "1/160 " not in (tmp_path / "log").read_text():
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, (tmp_path / "log").read_text()
    assert "Continue with --resume" in (tmp_path / "log").read_text()
    saved = [int(path.name.split("-")[1]) for path in run.glob("checkpoint-*")]
    assert len(saved) == 1 and 1 <= saved[0] < 160 and not (run / "results.json").exists()
    assert main(["train", str(recipe), *slow, "--resume"]) == 0
    whole = tmp_path / "whole"
    assert main(["train", str(recipe), *slow, "--output-dir", str(whole)]) == 0
    one, two = (PredictionTable.load(folder / "predictions" / "mine-test.npz") for folder in (run, whole))
    assert np.allclose(one.alpha, two.alpha, rtol=1e-4)


def bad_rows(tmp_path, text):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    return f"data.train={{path: {path}}}"


GOOD = '{"question": "Which one is a fruit ?", "choices": ["plum", "saw"], "answer": "A"}\n'
MISTAKES = [
    (lambda t: ["--set", "data.train=nowhere.jsonl"], "nowhere.jsonl: no such file"),
    (lambda t: ["--set", bad_rows(t, GOOD + '{"question"')], "bad.jsonl, line 2: not valid JSON"),
    (lambda t: ["--set", bad_rows(t, '{"question": "q", "choices": ["a", "b"]}')], "line 1: the row has no answer"),
    (lambda t: ["--set", bad_rows(t, '{"question": "q", "choices": ["a", "b"], "answer": "z"}')], "'z' is not among"),
    (lambda t: ["--set", bad_rows(t, '{"question": "q", "choices": ["a"], "answer": "A"}')], "at least 2"),
    (lambda t: ["--set", bad_rows(t, json.dumps({"question": "q", "choices": ["x"] * 27}))], "only 26 letters"),
    (lambda t: ["--set", bad_rows(t, '{"id": 7, ' + GOOD[1:] + '{"id": 7, ' + GOOD[1:])], "the id '7' was used before"),
    (lambda t: ["--set", bad_rows(t, "")], "has no rows"),
    (lambda t: ["--set", "data.train=obqaa"], "did you mean 'obqa'"),
    (lambda t: ["--set", "method={name: dapr}"], "did you mean 'dappr'"),
    (lambda t: ["--set", "method.reg_wieght=1"], "'reg_weight'"),
    (lambda t: ["--set", "train.learning_rte=1"], "'learning_rate'"),
    (lambda t: ["--set", "tarin.seed=1"], "'train'"),
    (lambda t: ["--set", "lora.target_modules=[nothing]"], "lora section does not fit"),
    (lambda t: ["--set", "model.name=./nowhere"], "Could not load the tokenizer of './nowhere'"),
    (lambda t: ["--set", "model.adapter=runs/not/there"], "no such folder 'runs/not/there'"),
    (lambda t: ["--set", "train.num_choices=12"], "no single distinct token"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, words", MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes_in_training(recipe, tmp_path, capsys, arguments, words):
    assert main(["train", str(recipe), *arguments(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert words in error[-1] and error[-1].startswith("dappr: ")
    assert sum(line.startswith("dappr: ") for line in error) == 1 and "Traceback" not in str(error)
    assert not (tmp_path / "run").exists()


def test_mistakes_in_prediction_and_evaluation(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "run").mkdir()
    sidecar = {"format_version": 1, "modality": "text", "method": {"name": "ce", "options": {}}, "num_choices": 2}
    sidecar |= {"letters": ["A", "B"], "letter_token_ids": [1, 2], "max_length": 9, "evidence_offset": 0.0}
    sidecar["prompt"] = {"instruction": "", "template": "{question}{choices}", "choice": "{letter}{text}"}
    (tmp_path / "run" / "uncertainty_config.json").write_text(json.dumps(sidecar))
    (tmp_path / "t.npz").write_bytes(b"not a table")
    cases = [
        (["predict", "folder", "--task", "everyday", "--out", "x.npz"], "folder is not a checkpoint"),
        (["predict", "nowhere", "--task", "everyday", "--out", "x.npz"], "nowhere: no such folder"),
        (["predict", "run", "--task", "everyday", "--out", "x.txt"], ".jsonl, .csv, .parquet"),
        (["evaluate", "--id", "obqa"], "'obqa' is not a prediction table"),
        (["evaluate", "--id", "t.npz"], "t.npz"),
        (["evaluate", "--id", "missing.npz"], "missing.npz"),
        (["evaluate", "folder", "--id", "obqa"], "folder is not a checkpoint"),
        (["audit", "run"], "run has no recipe.yaml that says what it was trained on; name the rows"),
        (["audit", "missing.npz"], "missing.npz"),
        (["train", "nothing.yaml"], "nothing.yaml: no such recipe"),
    ]
    for command, words in cases:
        assert main(command) == 2, command
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run", "t.npz"]


def test_score_choices_are_the_evaluators():
    from dappr_llm.commands.main import build_parser
    from dappr_llm.evaluation.scores import _FUNCTIONS, SCORES

    assert list(SCORES) == list(_FUNCTIONS)
    for score in SCORES:
        assert build_parser().parse_args(["evaluate", "--id", "x.npz", "--score", score]).score == score
    with pytest.raises(SystemExit):
        build_parser().parse_args(["evaluate", "--id", "x.npz", "--score", "entrpy"])


def test_evaluate_names_broken_rows_and_refuses_them_unless_allowed(tmp_path, capsys):
    probs = np.array([[0.9, 0.1], [np.nan, np.nan], [0.3, 0.7]])
    meta = {"task": "toy", "split": "test", "num_choices": 2, "task_num_choices": 2}
    PredictionTable.from_arrays(list("abc"), [0, 0, 1], probs, meta=meta, allow_nan=True).save(tmp_path / "t.npz")
    command = ["evaluate", "--id", str(tmp_path / "t.npz"), "--out", str(tmp_path / "out"), "--resamples", "20"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "t.npz" in error and "1 of 3 rows hold NaN or Inf (first: b)" in error
    assert not (tmp_path / "out").exists()
    assert main([*command, "--allow-nan"]) == 0
    assert "toy: 1 rows hold NaN or Inf (first: b) and rank as most uncertain" in capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["results"]["id/n_nan"] == 1 and results["results"]["id/nll"] is None
    assert results["intervals"]["id/nll"] == [None, None]


def test_a_damaged_checkpoint_is_refused(recipe, tmp_path, capsys):
    assert main(["train", str(recipe)]) == 0
    adapter = tmp_path / "run" / "adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:200])
    command = [
        "predict",
        str(tmp_path / "run"),
        "--task",
        str(tmp_path / "test.jsonl"),
        "--out",
        str(tmp_path / "x.npz"),
    ]
    capsys.readouterr()
    assert main(command) == 2
    assert "adapter_model.safetensors is damaged" in capsys.readouterr().err
    (tmp_path / "run" / "uncertainty_config.json").write_text("{")
    assert main(command) == 2
    assert "uncertainty_config.json is not a valid JSON file" in capsys.readouterr().err
    assert not (tmp_path / "x.npz").exists()


def test_recipes_are_listed(capsys):
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    assert "obqa_mistral7b/dappr" in printed and "quickstart" in printed


@pytest.mark.parametrize("line", ["--help", "evaluate nowhere --id obqa", "audit nowhere --task obqa", "ask nowhere"])
def test_help_import_and_wrong_folders_import_nothing_heavy(line):
    code = (
        "import sys, dappr_llm; from dappr_llm.commands.main import main\n"
        f"try: assert main({line.split()!r}) == 2\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'peft', 'datasets', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))


def test_two_processes_equal_one(recipe, tmp_path):
    """accelerate launch on two CPU processes: the same tables as one process with the batch of both."""
    single, double = tmp_path / "single", tmp_path / "double"
    common = ["--set", "train.evidence_offset=0.0", "--set", "train.lr_scheduler_type=constant"]
    assert main(["train", str(recipe), "--output-dir", str(single), *common]) == 0
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / "recipes/accelerate/cpu_2.yaml"),
    ]
    launch += [
        "--main_process_port",
        "0",
        "-m",
        "dappr_llm",
        "train",
        str(recipe),
        "--output-dir",
        str(double),
        *common,
    ]
    done = subprocess.run(
        [*launch, "--set", "train.per_device_train_batch_size=4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Model, tables and results") == 1
    for name in ("mine-test.npz", "other-test.npz"):
        one, two = (PredictionTable.load(folder / "predictions" / name) for folder in (single, double))
        assert one.ids.tolist() == two.ids.tolist() and one.labels.tolist() == two.labels.tolist()
        assert np.allclose(one.alpha, two.alpha, rtol=1e-4)


def test_text_classification_from_a_csv_file(recipe, tmp_path, capsys):
    """The same options for every row, a share of the rows held out for validation, no test split."""
    kinds = ["fruit", "tool", "colour"]
    words = {"fruit": ["plum", "fig", "pear"], "tool": ["hammer", "saw", "drill"], "colour": ["red", "blue", "green"]}
    lines = [f"{words[kinds[i % 3]][i // 3 % 3]},{kinds[i % 3]}" for i in range(30)]
    path = tmp_path / "labels.csv"
    path.write_text("\n".join(["text,kind", *lines]) + "\n")
    data = f"data={{train: {{path: {path}, question: text, answer: kind, options: [fruit, tool, colour]}}, "
    data += "validation_fraction: 0.2, test_split: null}"
    assert main(["train", str(recipe), "--set", data]) == 0
    run = tmp_path / "run"
    assert json.loads((run / "uncertainty_config.json").read_text())["num_choices"] == 3
    assert not (run / "results.json").exists()
    command = ["predict", str(run), "--task", str(path), "--question", "text", "--options", *kinds]
    assert main([*command, "--answer", "kind", "--out", str(tmp_path / "labels.npz")]) == 0
    table = PredictionTable.load(tmp_path / "labels.npz")
    assert table.probs.shape == (30, 3) and table.labels.tolist() == [i % 3 for i in range(30)]


def test_a_wrong_argument_is_repeated_in_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["ask", "run", "what?", "--nonsense", "two\nlines"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("two\\nlines")
