"""One module per verb, options built from the command line in one place, and verbs called from Python."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import make_rows, write_rows

from dappr_llm.commands import calibrate, evaluate, main, predict, shared, train
from dappr_llm.core import checkpoint
from dappr_llm.core.errors import UserError
from dappr_llm.evaluation.prediction_table import PredictionTable

COMMANDS = Path(main.__file__).parent


def parse(*line):
    return main.build_parser().parse_args(line)


def test_every_module_is_a_verb_or_shared():
    here = {path.stem for path in COMMANDS.glob("*.py")} - {"__init__", "main", "shared"}
    assert here == {verb.replace("-", "_") for verb in main.VERBS}


@pytest.mark.parametrize("verb", main.VERBS)
def test_every_verb_has_help_with_an_example(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main([verb, "--help"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0 and "examples:" in printed and f"dappr {verb}" in printed


def test_exit_codes(monkeypatch, capsys):
    def raising(error):
        def run(args):
            raise error

        return run

    for error, code in ((UserError("no"), 2), (KeyboardInterrupt(), 130)):
        monkeypatch.setattr(train, "run", raising(error))
        assert main.main(["train", "x.yaml"]) == code
    assert "dappr: no\n" in capsys.readouterr().err


def test_defaults_of_the_command_line_and_of_python_are_the_same():
    table = predict.TableOptions.from_args(parse("predict", "run", "--task", "t", "--out", "o.npz"))
    assert table == predict.TableOptions(["run"])
    answers = predict.AnswerOptions.from_args(parse("predict", "run", "--task", "t", "--out", "o.csv"))
    assert answers == predict.AnswerOptions(shared.PipelineOptions("run"), "o.csv")
    assert shared.PipelineOptions.from_args(parse("ask", "run"), "run") == shared.PipelineOptions("run")
    found = evaluate.EvaluateOptions.from_args(parse("evaluate", "run", "--id", "t"))
    assert found == evaluate.EvaluateOptions("t", prediction=predict.TableOptions(["run"]))
    found = calibrate.CalibrateOptions.from_args(parse("calibrate", "run"), "run", None)
    assert found == calibrate.CalibrateOptions("run")
    assert train.TrainOptions.from_args(parse("train", "r.yaml")) == train.TrainOptions("r.yaml")


def test_flags_reach_their_options():
    line = "--split dev --base b --data-root d --batch-size 3 --limit 4 --no-cache --revision v --load-in-4bit"
    line += " --no-decision --extra-letters --truncate --overwrite"
    args = parse("predict", "run", "--task", "t", "--out", "o.csv", *line.split())
    assert predict.TableOptions.from_args(args) == predict.TableOptions(
        ["run"], "dev", "b", "d", 3, 4, False, "v", True
    )
    pipeline = shared.PipelineOptions("run", "b", "v", True, False, True, True, 3)
    assert predict.AnswerOptions.from_args(args) == predict.AnswerOptions(pipeline, "o.csv", "dev", "d", 4, True)
    line = "--alpha .2 --max-risk .3 --min-coverage .4 --confidence .5 --score aps --abstain-on epistemic"
    found = calibrate.CalibrateOptions.from_args(parse("calibrate", "run", *line.split()), "run", "o")
    assert found.rule == calibrate.RuleOptions(0.2, 0.3, 0.4, 0.5, "aps", "epistemic") and found.out == "o"


def test_options_are_the_arguments_of_their_names():
    """An argument that the verb does not have is a mistake in the code, never silently the default."""
    args = parse("calibrate", "run", "--alpha", "0.2")
    assert shared.options_from(calibrate.RuleOptions, args, score="aps") == calibrate.RuleOptions(0.2, score="aps")
    with pytest.raises(AttributeError, match="abstain_on"):
        shared.options_from(
            calibrate.RuleOptions, parse("report", "run"), alpha=0.1, max_risk=None, min_coverage=None, confidence=0.9
        )


def test_launched_processes_get_the_same_command():
    line = (
        "train r.yaml --set a.b=1 --output-dir out --data-root d --resume --overwrite --launch cpu_2 --launch-args x"
    )
    options = train.TrainOptions.from_args(parse(*line.split()))
    again = train.TrainOptions.from_args(parse(*train.launched_arguments(options)))
    assert again == train.TrainOptions("r.yaml", options.overrides, "auto", True)
    assert set(options.overrides) == {"a.b=1", "data.root=d", "train.output_dir=out"}


@pytest.fixture
def reads(monkeypatch):
    """Checkpoints whose sidecar was read, in order."""
    seen, load = [], checkpoint.load_sidecar
    monkeypatch.setattr(checkpoint, "load_sidecar", lambda name, *args: seen.append(str(name)) or load(name, *args))
    return seen


def test_sidecars_are_read_once_and_those_on_the_hub_when_asked_for(run_folder, tmp_path, reads):
    name = str(run_folder)
    sidecars = shared.Sidecars([name, "user/elsewhere", "table.npz"])
    assert reads == [name]
    assert sidecars[name] == sidecars[name] and sidecars[name][0] == name and reads == [name]
    with pytest.raises(UserError, match="user/elsewhere"):
        sidecars["user/elsewhere"]
    with pytest.raises(UserError, match="is not a checkpoint"):
        shared.Sidecars([str(tmp_path)])


def test_evaluate_resolves_each_task_and_reads_each_sidecar_once(run_folder, tmp_path, monkeypatch, reads):
    from dappr_llm.inference import run_data

    monkeypatch.setenv("DAPPR_PREDICTION_CACHE", str(tmp_path / "cache"))
    specs = [write_rows(tmp_path / f"{name}.jsonl", make_rows(5, start)) for name, start in (("one", 0), ("two", 20))]
    prediction = predict.TableOptions([str(run_folder)])
    options = evaluate.EvaluateOptions(specs[0], specs[1:], str(tmp_path / "out"), prediction, resamples=0)
    first = evaluate.evaluate(options)
    asked, find = [], run_data.find_run_task
    monkeypatch.setattr(
        run_data,
        "find_run_task",
        lambda own, spec, *args, **more: asked.append(spec) or find(own, spec, *args, **more),
    )
    reads.clear()
    # From the cache: nothing but these files is read. Five rows are too few to match lengths, which is NaN.
    assert evaluate.evaluate(options) == pytest.approx(first, abs=0, rel=0, nan_ok=True)
    assert asked == specs
    assert reads == [str(run_folder)]


def save_table(path, task):
    probs = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
    meta = {"task": task, "split": "test", "num_choices": 2, "task_num_choices": 2, "seed": 7}
    PredictionTable.from_arrays(list("abc"), [0, 0, 1], probs, meta=meta).save(path)
    return str(path)


def test_evaluate_from_python_with_saved_tables(tmp_path):
    one, two = save_table(tmp_path / "one.npz", "one"), save_table(tmp_path / "two.npz", "two")
    out = tmp_path / "out"
    results = evaluate.evaluate(evaluate.EvaluateOptions(one, [two], str(out), resamples=20))
    saved = json.loads((out / "results.json").read_text())
    assert results["id/accuracy"] == saved["results"]["id/accuracy"] == pytest.approx(2 / 3)
    assert saved["meta"]["tables"] == {"one": "tables/one-test.npz", "two": "tables/two-test.npz"}
    assert (out / "tables" / "one-test.npz").is_file() and saved["meta"]["seed"] == 7
    with pytest.raises(UserError, match="given twice"):
        evaluate.evaluate(evaluate.EvaluateOptions(one, [save_table(tmp_path / "again.npz", "one")], str(out)))
