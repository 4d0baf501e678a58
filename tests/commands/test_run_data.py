"""A run remembers its data: every verb without flags, new files that inherit, flags that override, changed files."""

import csv
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from tiny import build_model

from dappr_llm import UncertaintyPipeline
from dappr_llm.commands.main import main
from dappr_llm.core.errors import UserError
from dappr_llm.core.recipe import load_recipe
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.text.data.tasks import load_items, task_of_run

LABELS = ["colour", "früit", "tool"]
THINGS = {"früit": ["plum", "fig", "pear"], "tool": ["hammer", "saw", "drill"], "colour": ["red", "blue", "green"]}
EASY = ["--max-risk", "0.9", "--alpha", "0.4"]


def tickets(count, start=0, labelled=True):
    rows = []
    for i in range(start, start + count):
        kind = LABELS[i % 3]
        digits = " ".join(str(i // 9 // 4**place % 4 + 1) for place in range(4))  # other words for every number
        words = f"{THINGS[kind][i // 3 % 3]} {digits}"
        rows.append({"nr": f"n{i}", "body": words} | ({"queue": kind} if labelled else {}))
    return rows


def write(path, rows, delimiter=";", encoding="latin-1"):
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer):
    """A folder with a run on one CSV file in Latin-1, whose rows were dealt out; do not modify it."""
    folder = tmp_path_factory.mktemp("own")
    build_model().save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    write(folder / "tickets.csv", tickets(400))
    write(folder / "other.csv", tickets(12, 1500, labelled=False))
    recipe = {
        "model": {"name": str(folder / "base"), "readout": "letters"},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        "method": {"name": "dappr", "reg_weight": 5e-3, "schedule": "constant"},
        "data": {
            "train": {
                "path": "tickets.csv",
                "text": "body",
                "label": "queue",
                "id": "nr",
                "encoding": "latin-1",
                "fractions": {"train": 0.5, "validation": 0.3, "test": 0.2},
            },
            "ood": ["other.csv"],
            "checks": "warn",
        },
        "train": {"max_steps": 2, "per_device_train_batch_size": 8, "max_length": 64, "output_dir": "runs/tickets"},
    }
    (folder / "tickets.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "tickets.yaml"]) == 0
    return folder


@pytest.fixture
def run(place, tmp_path, monkeypatch):
    """Name of a copy of the run, in a copy of its folder that is the working directory."""
    shutil.copytree(place, tmp_path / "copy", ignore=lambda *_: ["base"])
    monkeypatch.chdir(tmp_path / "copy")
    return "runs/tickets"


def ids(path):
    return PredictionTable.load(path).ids.tolist()


def test_the_split_is_made_once_and_remembered(run):
    own = task_of_run(load_recipe(f"{run}/recipe.yaml"))
    parts = {split: set(load_items(own, split)["id"]) for split in ("train", "validation", "test")}
    assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == 400
    trained = ids(f"{run}/predictions/tickets-test.npz")
    assert set(trained) == parts["test"]  # what training tested on, after a reload
    assert main(["evaluate", run, "--resamples", "0"]) == 0
    assert ids(f"{run}/evaluations/tickets-test+other/predictions/tickets-test.npz") == trained
    assert not parts["train"] & set(trained)


def test_no_verb_needs_flags_for_the_runs_own_rows(run, capsys):
    before = json.loads(Path(f"{run}/results.json").read_text())["results"]
    assert main(["evaluate", run, "--resamples", "0"]) == 0
    found = json.loads(Path(f"{run}/evaluations/tickets-test+other/results.json").read_text())["results"]
    assert found["id/accuracy"] == before["id/accuracy"] and found["id/n"] == 80
    assert [key for key in found if "auroc" in key.lower()]  # its OOD task, whose rows have no labels
    assert main(["calibrate", run, *EASY]) == 0
    assert len(ids(f"{run}/predictions/tickets-validation.npz")) == 120
    assert main(["audit", run, "--resamples", "0"]) == 0
    assert main(["predict", run]) == 0
    assert "80 answers written to runs/tickets/answers/tickets-test.csv" in capsys.readouterr().out
    assert main(["report", run, "--resamples", "0"]) == 0


def test_a_new_file_inherits_columns_labels_and_encoding(run):
    write(Path.cwd() / "new.csv", tickets(9, 1800))
    assert main(["evaluate", run, "--id", "new.csv", "--resamples", "0"]) == 0
    table = PredictionTable.load(f"{run}/evaluations/new-test/predictions/new-test.npz")
    assert table.labels.tolist() == [0, 1, 2] * 3 and table.ids.tolist() == [f"n{i}" for i in range(1800, 1809)]
    # A file with two of the labels, without labels at all, or in another encoding is read alike.
    write(Path.cwd() / "two.csv", [row for row in tickets(9, 1800) if row["queue"] != "colour"], ",", "utf-8")
    assert main(["predict", run, "--task", "two.csv", "--out", "two.npz"]) == 0
    assert PredictionTable.load("two.npz").labels.tolist() == [1, 2] * 3
    write(Path.cwd() / "none.csv", tickets(9, 1800, labelled=False))
    assert main(["predict", run, "--task", "none.csv", "--out", "none.npz"]) == 0
    assert PredictionTable.load("none.npz").labels.tolist() == [-1] * 9
    assert main(["evaluate", run, "--id", "new.csv", "--ood", "none.csv", "--resamples", "0"]) == 0


@pytest.mark.parametrize("verb", ["predict", "evaluate", "calibrate", "audit"])
def test_flags_override_what_a_run_remembers(run, verb):
    rows = [{"message": row["body"], "kind": row["queue"], "body": "a", "queue": "b"} for row in tickets(120, 900)]
    write(Path.cwd() / "new.csv", rows, ",", "utf-8")
    task = ["--id" if verb == "evaluate" else "--task", "new.csv"]
    more = {"predict": ["--out", "o.npz"], "calibrate": EASY}.get(verb, ["--resamples", "0"])
    words = ["--text", "message", "--label", "kind"]
    assert main([verb, run, *task, *more]) == 2  # the label `b` is unknown
    assert main([verb, run, *task, *more, *words]) == 0
    path = {
        "predict": "o.npz",
        "evaluate": f"{run}/evaluations/new-test/predictions/new-test.npz",
        "calibrate": f"{run}/predictions/new-validation.npz",
        "audit": f"{run}/audits/new-test/audit.npz",
    }[verb]
    assert set(PredictionTable.load(path).labels.tolist()) == {0, 1, 2}
    turned = ["--labels", "tool", "früit", "colour"]
    if verb == "predict":
        assert main([verb, run, *task, "--out", "turned.npz", *words, *turned]) == 0
        assert PredictionTable.load("turned.npz").labels[:3].tolist() == [2, 1, 0]


@pytest.mark.parametrize("verb", ["predict", "evaluate", "calibrate", "audit"])
def test_a_typo_in_a_column_names_the_nearest(run, verb, capsys):
    write(Path.cwd() / "new.csv", tickets(9, 1800))
    task = ["--id" if verb == "evaluate" else "--task", "new.csv"]
    more = ["--out", "o.csv"] if verb == "predict" else []
    for flag, typo, right in (("--label", "queu", "queue"), ("--text", "boddy", "body")):
        assert main([verb, run, *task, *more, flag, typo]) == 2
        complaint = capsys.readouterr().err
        assert f"no column {typo!r}" in complaint and f"did you mean {right!r}" in complaint
    assert main([verb, run, *task, *more]) in (0, 2)
    assert not list(Path.cwd().glob(".*part*"))


def test_labels_are_known_to_pipelines_and_ask(run, capsys):
    pipe = UncertaintyPipeline.from_pretrained(run)
    one = pipe("plum 1 very long story")
    assert one.choices == tuple(LABELS) and one.answer in LABELS
    several = pipe(["plum 1 very long story", "red"])
    assert several[0].probs == pytest.approx(one.probs, abs=1e-5) and several[1].choices == tuple(LABELS)
    rows = pipe([{"text": "plum 1 very long story"}, {"question": "red", "choices": ["blue", "green"]}])
    assert rows[0].probs == pytest.approx(one.probs, abs=1e-5) and rows[1].choices == ("blue", "green")
    assert main(["ask", run, "plum 1 very long story"]) == 0
    printed = capsys.readouterr().out
    assert all(label in printed for label in LABELS) and f"→ {one.letter}) {one.answer}" in printed
    assert main(["ask", run, "red", "blue", "green"]) == 0 and "früit" not in capsys.readouterr().out
    assert main(["ask", run, "red", "--labels", "blue", "green"]) == 0 and "früit" not in capsys.readouterr().out


def test_ask_reads_texts_alone(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("plum | fig\n\n"))
    assert main(["ask", run]) == 0
    printed = capsys.readouterr().out
    assert "the 3 labels are colour, früit, tool" in printed and "→" in printed


def test_a_run_without_labels_still_asks_for_choices(trained, capsys):
    assert main(["ask", str(trained / "run"), "Which one is plum ?"]) == 2
    assert "choices" in capsys.readouterr().err
    assert main(["ask", str(trained / "run"), "Which one is plum ?", "plum", "fig"]) == 0


def test_a_file_that_changed_since_is_noticed(run, capsys):
    write(Path.cwd() / "tickets.csv", tickets(401))
    for line in (["evaluate", run], ["evaluate", run, "--id", "tickets.csv"], ["calibrate", run], ["predict", run]):
        assert main(line) == 2
        complaint = capsys.readouterr().err
        assert "tickets.csv has changed since runs/tickets was trained" in complaint and "--task FILE" in complaint
    write(Path.cwd() / "new.csv", tickets(9, 1800))
    assert main(["evaluate", run, "--id", "new.csv", "--resamples", "0"]) == 0
    (Path.cwd() / "tickets.csv").unlink()
    assert main(["evaluate", run]) == 2 and "tickets.csv: no such file; runs/tickets" in capsys.readouterr().err
    assert main(["evaluate", run, "--id", "new.csv", "--resamples", "0"]) == 0


def test_a_changed_file_is_no_resumed_run(run, capsys):
    write(Path.cwd() / "tickets.csv", tickets(401))
    assert main(["train", "tickets.yaml", "--resume"]) == 2
    assert "sha256" in capsys.readouterr().err


def test_a_checkpoint_without_its_recipe_knows_its_labels(run, capsys):
    os.remove(f"{run}/recipe.yaml")
    assert main(["evaluate", run]) == 2 and "name the rows" in capsys.readouterr().err
    write(Path.cwd() / "new.csv", tickets(9, 1800), ",", "utf-8")
    assert main(["predict", run, "--task", "new.csv", "--text", "body", "--label", "queue", "--out", "o.npz"]) == 0
    assert PredictionTable.load("o.npz").labels.tolist() == [0, 1, 2] * 3
    assert UncertaintyPipeline.from_pretrained(run)("plum").choices == tuple(LABELS)


def test_rows_that_were_trained_on_are_noticed_in_a_new_file(run, capsys):
    own = task_of_run(load_recipe(f"{run}/recipe.yaml"))
    known = [{"nr": row["id"], "body": row["question"].upper(), "queue": "tool"} for row in load_items(own, "train")]
    write(Path.cwd() / "new.csv", [*tickets(5, 1800), *known[:4]])
    assert main(["evaluate", run, "--id", "new.csv", "--resamples", "0"]) == 0
    said = capsys.readouterr().err
    assert f"runs/tickets was trained on 4 of these 9 rows (first: '{known[0]['nr']}' = tickets.csv, line" in said
    assert main(["evaluate", run, "--resamples", "0"]) == 0
    assert "was trained on" not in capsys.readouterr().err


# --- files of answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_answers_keep_the_users_own_columns(run, kind):
    import pandas as pd

    rows = [row | {"answer": i, "price": i / 2, "=sum": "=1+1"} for i, row in enumerate(tickets(9, 1800))]
    if kind == "csv":
        write(Path.cwd() / "new.csv", rows)
    elif kind == "jsonl":
        (Path.cwd() / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pd.DataFrame(rows).to_parquet("new.parquet")
    assert main(["predict", run, "--task", f"new.{kind}", "--out", f"out.{kind}"]) == 0
    reader = {"csv": pd.read_csv, "jsonl": lambda p: pd.read_json(p, lines=True), "parquet": pd.read_parquet}[kind]
    found = reader(f"out.{kind}")
    ours = ["id", "answer", "letter", "choices", "probs"]
    own = ["nr", "body", "queue", "answer_given", "price", "'=sum" if kind == "csv" else "=sum"]
    assert list(found.columns)[: len(own) + 5] == [*own, *ours]
    assert found["body"].tolist() == [row["body"] for row in rows] and found["nr"].tolist() == found["id"].tolist()
    assert found["answer_given"].tolist() == list(range(9)) and found["price"].tolist() == [i / 2 for i in range(9)]
    assert set(found["answer"]) <= set(LABELS)


def test_a_refused_prediction_does_not_block_the_corrected_one(run, capsys):
    rows = tickets(40, 1800)
    write(Path.cwd() / "new.csv", [*rows, {"nr": "x", "body": "long " * 300, "queue": "tool"}])
    line = ["predict", run, "--task", "new.csv", "--out", "o.csv", "--batch-size", "1"]
    assert main(line) == 2 and "--truncate" in capsys.readouterr().err
    assert main([*line, "--truncate"]) == 0  # another job, in the same place
    write(Path.cwd() / "bad.csv", [*rows, {"nr": "x", "body": "", "queue": "tool"}])
    line = ["predict", run, "--task", "bad.csv", "--out", "p.csv", "--batch-size", "1"]
    assert main(line) == 2 and "text is empty" in capsys.readouterr().err
    write(Path.cwd() / "bad.csv", rows)
    assert main(line) == 0
    assert main(["calibrate", run, "--max-risk", "0.9", "--score", "nonsense"]) == 2
    assert main(["calibrate", run, "--out", "copy", "--task", "gone.csv"]) == 2
    assert main(["calibrate", run, "--out", "copy", *EASY]) == 0


def test_answers_of_another_task_are_not_overwritten(run, capsys):
    write(Path.cwd() / "one.csv", tickets(5, 1800))
    write(Path.cwd() / "two.csv", tickets(7, 1850))
    for kind in ("csv", "npz"):
        out = f"out.{kind}"
        assert main(["predict", run, "--task", "one.csv", "--out", out]) == 0
        content = (Path.cwd() / out).read_bytes()
        assert main(["predict", run, "--task", "two.csv", "--out", out]) == 2
        complaint = capsys.readouterr().err
        assert "out." in complaint and "--overwrite" in complaint and (Path.cwd() / out).read_bytes() == content
        assert main(["predict", run, "--task", "one.csv", "--out", out]) == 0  # the same again
        assert main(["predict", run, "--task", "two.csv", "--out", out, "--overwrite"]) == 0
        assert (Path.cwd() / out).read_bytes() != content
    (Path.cwd() / "mine.csv").write_text("my own file")
    assert main(["predict", run, "--task", "one.csv", "--out", "mine.csv"]) == 2
    assert (Path.cwd() / "mine.csv").read_text() == "my own file"


def test_a_field_of_200_000_characters_is_read(run):
    write(Path.cwd() / "new.csv", [{"nr": "long", "body": "plum " * 40_000, "queue": "tool"}, *tickets(3, 1800)])
    assert main(["predict", run, "--task", "new.csv", "--out", "o.csv", "--truncate"]) == 0


def test_a_file_in_another_encoding_says_how_to_read_it(run, capsys):
    write(Path.cwd() / "new.csv", tickets(3, 1800), encoding="utf-16")
    assert main(["predict", run, "--task", "new.csv", "--out", "o.csv"]) == 2
    assert "utf-16" in capsys.readouterr().err
    assert main(["predict", run, "--task", "new.csv", "--out", "o.csv", "--encoding", "utf-16"]) == 0


def test_images_have_no_columns():
    from dappr_llm.inference.modality import find_run_task

    with pytest.raises(UserError, match="Images have no columns"):
        find_run_task(None, "digits", {"modality": "vision"}, {"question": "text"})
