"""Reading files that anybody may have written: regular files only, stated limits, one sentence."""

import json
import os

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.core.files import read_bytes, read_json


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"{", "line 1"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' appears twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b"1" * 10_000, "digits"),
        (b'{"a": "\\ud800"}', "surrogates"),
    ],
)
def test_a_damaged_json_file_is_one_sentence_that_names_it(tmp_path, content, says):
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="some.json") as error:
        read_json(path)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_json_files_are_read_as_they_were_written(tmp_path):
    content = {"a": [1, 2.5, None, True, "ä", "\U0001f600"], "b": {}}
    (tmp_path / "some.json").write_text(json.dumps(content))
    assert read_json(tmp_path / "some.json") == content
    (tmp_path / "other.json").write_text('{"a": NaN}')
    assert read_json(tmp_path / "other.json", allow_nan=True)["a"] != 0


def test_a_file_is_not_larger_than_its_limit(tmp_path):
    (tmp_path / "some.json").write_text("[" + "1," * 100 + "1]")
    assert len(read_json(tmp_path / "some.json", 203)) == 101
    with pytest.raises(UserError, match="some.json holds 203 bytes, and such a file may hold 202 at most"):
        read_json(tmp_path / "some.json", 202)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo.json")  # opening it would wait for a writer
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to("/dev/zero")
    kinds = {"fifo.json": "a FIFO", "folder.json": "a folder", "link.json": "a device", "none.json": "No such file"}
    for name, kind in kinds.items():
        with pytest.raises(UserError, match=f"{name}: .*{kind}"):
            read_json(tmp_path / name)
    with pytest.raises(UserError, match="null"):
        read_bytes("a\0b", 10)
