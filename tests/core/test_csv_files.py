import ast
import io
import json
import random
from types import SimpleNamespace

import pytest
from source_imports import PACKAGE

from dappr_llm.core.csv_files import escape_cell, read_csv, unescape_cell, write_csv
from dappr_llm.evaluation import comparison
from dappr_llm.evaluation.reporting.tables import to_csv
from dappr_llm.inference.answer_files import _finish

FORMULAS = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "=cmd|' /C calc'!A0", "\uff1d1+1", "-", "--x"]
STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d")


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_become_text_and_come_back(text):
    assert not escape_cell(text).startswith(STARTS)
    for original in (text, "'" + text, "''" + text):
        assert unescape_cell(escape_cell(original)) == original


@pytest.mark.parametrize(
    "value", [-1, -0.5, 1e-9, "-1", "+2.5e-3", "-.5", None, True, "it's = x", "'tis", "plain", "[-1]"]
)
def test_numbers_and_other_texts_stay(value):
    assert escape_cell(value) == value


def test_any_text_survives_a_file():
    draw = random.Random(0)
    texts = ["".join(draw.choices("'=+-@\t\r\n,\";a1é", k=draw.randrange(1, 6))) for _ in range(3000)]
    out = io.StringIO(newline="")
    write_csv(out, ["=id", "n"], ([text, number] for number, text in enumerate(texts)))
    rows = list(read_csv(io.StringIO(out.getvalue(), newline="")))
    assert [row["=id"] for row in rows] == texts and [int(row["n"]) for row in rows] == list(range(3000))


def test_every_csv_file_of_ours_is_escaped(tmp_path):
    run = SimpleNamespace(name="=run", results={"@key": -0.5}, intervals={})
    texts = {"report": to_csv([run])}
    summary = SimpleNamespace(n=3, mean=-0.5, std=0.1, low=-1.0, high=0.0)
    entry = SimpleNamespace(label="+method", summary={"-key": summary}, against_first={})
    texts["comparison"] = comparison.render_csv(SimpleNamespace(entries=[entry]))
    record = {
        "id": "=1+1",
        "answer": "@x",
        "letter": "A",
        "choices": ["=1", "-2"],
        "probs": [0.5, 0.5],
        "epistemic": -0.5,
    }
    (tmp_path / "journal").write_text("{}\n" + json.dumps(record) + "\n")
    _finish(tmp_path / "journal", tmp_path / "out.csv")
    texts["answers"] = (tmp_path / "out.csv").read_bytes().decode()
    for name, text in texts.items():
        (row,) = read_csv(io.StringIO(text, newline=""))
        first = next(iter(row.values()))
        assert "'" + first in text and first.startswith(STARTS), name
        assert ",-0.5" in text, name  # a number, without an apostrophe
    (row,) = read_csv(io.StringIO(texts["answers"], newline=""))
    assert (row["id"], row["answer"], json.loads(row["choices"])) == ("=1+1", "@x", ["=1", "-2"])


def test_nobody_writes_csv_in_another_way():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "csv_files.py":
            called = [
                ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
            ]
            assert not [
                name for name in called if name in ("csv.writer", "csv.DictWriter") or name.endswith(".to_csv")
            ], path
