import pytest

from dappr_llm.core import local_names
from dappr_llm.core.local_names import portable, portable_values


@pytest.fixture(autouse=True)
def names(monkeypatch):
    monkeypatch.setattr(local_names, "_own_names", lambda: ("workbench7", "janedoe"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/jane/run", "run"),
        ("/home/jane/my rows/rows of mine.jsonl", "rows of mine.jsonl"),
        ("/home/Jane Doe", "~"),
        ("/Users/jane", "~"),
        ("/home/jane/", "~"),
        ("~/x/y", "y"),
        ("~jane/x", "x"),
        ("~jane", "~"),
        ("../a/b", "b"),
        ("./b", "b"),
        ("file:///home/jane/x.jsonl", "x.jsonl"),
        ("file://server/share/x%20y.jsonl", "x y.jsonl"),
        (r"C:\Users\Jane Doe\models\base", "base"),
        (r"C:\Users\Jane", "~"),
        ("C:/Users/Jane/base", "base"),
        ("C:\\", "…"),
        (r"\\server\share\x.jsonl", "x.jsonl"),
        (r"\\server", "…"),
        (r"\\?\C:\Users\Jane\x", "x"),
        ("dappr train /home/me/my.yaml --set x=/data/y z", "dappr train my.yaml --set x=y z"),
        ("dappr train '/home/Jane Doe/my r.yaml' --set 'data.root=/mnt/my data/d'", "dappr train 'my r.yaml' --set 'data.root=d'"),
        ("dappr train /home/Jane Doe/my.yaml --resume", "dappr train my.yaml --resume"),
        (r"dappr train C:\Users\Jane Doe\my.yaml --resume", "dappr train my.yaml --resume"),
        ("see file:///home/jane/x and ~jane too", "see x and ~ too"),
        ("copied from jane@gpu01:/data/x.jsonl by jane@gpu01", "copied from x.jsonl by …"),
        ("runs/Jan01_12-00-00_workbench7", "runs/Jan01_12-00-00_…"),
        ("on workbench7, by janedoe", "on …, by …"),
        ('{"path": "/home/jane/x"}', '{"path": "x"}'),
    ],
)  # fmt: skip
def test_paths_and_names_of_this_machine_are_shortened(text, shown):
    assert portable(text) == shown


@pytest.mark.parametrize(
    "text",
    ["org/name", "janedoe/adapter", "https://huggingface.co/a/b", "data/train.jsonl", "and/or", "1/2", "s3://bucket/x/y",
     "</s>", "a </think> b", "jane.doe@example.org", "accuracy: 5", "ratio 3/4, 1 / 2", "A:B", "hf:a/b", "~5 %", ""],
)  # fmt: skip
def test_other_texts_stay(text):
    assert portable(text) == text


def test_nested_values_and_keys():
    assert portable_values({"/home/jane/x": [{"y": "/home/jane/z"}, 3, None, ("~/a/b",)]}) == {
        "x": [{"y": "z"}, 3, None, ["b"]]
    }
