"""Tasks from folders, files and descriptions; bad files."""

import csv
import gzip
import json
import os
from pathlib import Path

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.text.data.tasks import TASKS, get_task, load_task

HUB_ROW = {"choices": {"text": ["a", "b", "c", "d"], "label": list("ABCD")}, "answerKey": "B"}


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["train.jsonl.gz", "train.jsonl", "train.parquet", "train-00000-of-00001.parquet"])
def test_local_root_with_the_hubs_row_layout(tmp_path, name):
    rows = [{"id": f"r{i}", "question_stem": f"stem {i}", **HUB_ROW} for i in range(3)]
    write = write_parquet if name.endswith("parquet") else write_jsonl
    write(tmp_path / "openbookqa" / name, rows)
    items = load_task("obqa", "train", root=tmp_path)
    assert items["id"] == ["r0", "r1", "r2"] and items["label"] == [1, 1, 1]
    assert items[2]["question"] == "stem 2" and items[2]["options"] == ["a", "b", "c", "d"]


def test_configurations_live_in_their_own_folder_and_labels_become_positions(tmp_path):
    row = {
        "id": "n",
        "question": "q",
        "choices": {"text": ["w", "x", "y"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    }
    write_jsonl(tmp_path / "ai2_arc" / "ARC-Easy" / "test.jsonl", [row])
    items = load_task("arc_e", "test", root=tmp_path)
    assert items["label"] == [2] and len(items[0]["options"]) == 3


def test_csqa_tests_on_validation(tmp_path):
    row = {"id": "v", "question": "q", "choices": {"label": list("ABCDE"), "text": list("vwxyz")}, "answerKey": "E"}
    write_jsonl(tmp_path / "commonsense_qa" / "validation.jsonl", [row])
    assert load_task("csqa", "test", root=tmp_path)["label"] == [4]


def test_the_environment_names_the_root(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "openbookqa" / "test.jsonl", [{"id": "1", "question_stem": "q", **HUB_ROW}])
    monkeypatch.setenv("DAPPR_DATA_ROOT", str(tmp_path))
    assert len(load_task("obqa", "test")) == 1


def test_own_csv_with_a_column_per_option(tmp_path):
    path = tmp_path / "mine.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["q", "a", "b", "gold"], ["first, really?", "x", "y", "y"], ["second", "x", "y", "A"]])
    task = {"path": str(path), "question": "q", "choices": ["a", "b"], "answer": "gold"}
    items = load_task(task, "train")
    assert items["label"] == [1, 0] and items["question"][0] == "first, really?"
    assert items["id"] == ["train-0", "train-1"]


def test_own_files_per_split(tmp_path):
    row = {"question": "q", "choices": ["x", "y"], "answer": 0}
    first, second = (write_jsonl(tmp_path / f"{name}.jsonl", [row]) for name in ("a", "b"))
    spec = {"name": "mine", "splits": {"train": str(first), "test": str(second)}}
    assert len(load_task(spec, "train")) == len(load_task(spec, "test")) == 1
    with pytest.raises(UserError, match="no split 'validation'; it has: train, test"):
        load_task(spec, "validation")


def test_a_bare_file_is_a_task(tmp_path):
    path = write_jsonl(tmp_path / "quiz.jsonl", [{"question": "q", "choices": ["x", "y"]}])
    assert get_task(str(path)).name == "quiz"
    assert load_task(str(path), "test", labelled=False)["label"] == [-1]
    with pytest.raises(UserError, match="quiz.jsonl, line 1: the row has no answer"):
        load_task(str(path), "test")


def test_a_hub_dataset_is_read_through_datasets(monkeypatch):
    import datasets

    calls = []

    def fake(path, config, split, revision):
        calls.append((path, config, split, revision))
        return datasets.Dataset.from_list([{"question": "q", "choices": ["x", "y"], "answer": "B"}])

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert load_task("someone/quiz", "train")["label"] == [1]
    assert load_task({"path": "someone/quiz", "config": "main", "revision": "v2"}, "test")["label"] == [1]
    assert list(dict.fromkeys(calls)) == [
        ("someone/quiz", None, "train", None),
        ("someone/quiz", "main", "test", "v2"),
    ]


def test_an_unreachable_hub_says_what_to_do(monkeypatch):
    import datasets

    def fail(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.delenv("DAPPR_DATA_ROOT", raising=False)
    with pytest.raises(UserError, match="allenai/openbookqa.*Couldn't reach the Hub.*--data-root"):
        load_task("obqa", "train")


BAD_FILES = [
    (
        "broken.jsonl",
        '{"question": "q", "choices": ["a", "b"], "answer": "A"}\n{"question": \n',
        "line 2: not valid JSON",
    ),
    ("list.jsonl", "[1, 2]\n", "line 1: expected a JSON object"),
    ("object.json", "{}", "expected a JSON list"),
    ("empty.jsonl", "\n", "has no rows"),
    ("cut.jsonl.gz", "not gzip", "gzip file is damaged"),
    ("bad.parquet", "PAR1 nothing", "not a readable Parquet"),
    ("wide.csv", "question,choices\nq,x,y\n", "line 2: more fields"),
    (
        "twice.jsonl",
        '{"id": 1, "question": "q", "choices": ["a", "b"], "answer": "A"}\n' * 2,
        "line 2: the id '1' was used before .*line 1",
    ),
]


@pytest.mark.parametrize("name, content, words", BAD_FILES)
def test_bad_files(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        load_task(str(path), "train")
    assert words.startswith("has no rows") or name in str(caught.value)


def test_not_utf8(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"question": "é"}'.encode("latin-1"))
    with pytest.raises(UserError, match="latin.jsonl: not UTF-8"):
        load_task(str(path), "train")


def test_missing_places():
    with pytest.raises(UserError, match="no such file"):
        load_task("nowhere/rows.jsonl", "train")
    with pytest.raises(UserError, match="not a folder"):
        load_task("obqa", "train", root="nowhere")
    with pytest.raises(UserError, match="did you mean 'everyday'"):
        get_task("everday")
    with pytest.raises(UserError, match="'choices'"):
        get_task({"path": "x.jsonl", "choises": "c"})
    with pytest.raises(UserError, match="no split|valid"):
        load_task("everyday", "dev")
    with pytest.raises(UserError, match="needs `path`"):
        get_task({"name": "x"})


def test_limit(tmp_path):
    rows = [{"question": "q", "choices": ["x", "y"], "answer": 0}] * 5 + [{"question": ""}]
    assert len(load_task(str(write_jsonl(tmp_path / "r.jsonl", rows)), "train", limit=5)) == 5


def test_naming_questions_ask_for_the_right_option():
    from dappr_llm.text.data.tasks import with_naming

    items = load_task("everyday", "test")
    assert with_naming(items, 0.0) is items
    mixed = with_naming(items, 0.5)
    assert mixed["id"] == items["id"] and mixed["options"] == items["options"] and mixed["label"] == items["label"]
    changed = [i for i in range(len(items)) if mixed[i]["question"] != items[i]["question"]]
    assert 0.4 < len(changed) / len(items) < 0.6
    assert all(mixed[i]["options"][mixed[i]["label"]] in mixed[i]["question"] for i in changed)
    assert with_naming(items, 0.5)["question"] == mixed["question"]
    with pytest.raises(UserError, match="naming_share"):
        with_naming(items, 1.5)


real_data = pytest.mark.skipif(
    not os.environ.get("DAPPR_TEST_DATA"), reason="set DAPPR_TEST_DATA to a folder with the real datasets"
)


@real_data
@pytest.mark.parametrize(
    "name, split, rows, options",
    [
        ("obqa", "train", 4957, {4}),
        ("obqa", "test", 500, {4}),
        ("arc_c", "test", 1172, {3, 4, 5}),
        ("arc_e", "test", 2376, {3, 4, 5}),
        ("csqa", "test", 1221, {5}),
    ],
)
def test_real_datasets(name, split, rows, options):
    items = load_task(name, split, root=Path(os.environ["DAPPR_TEST_DATA"]))
    assert len(items) == rows and {len(o) for o in items["options"]} == options
    assert TASKS[name].num_choices == max(options)
    assert min(items["label"]) >= 0
