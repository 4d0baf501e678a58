"""Names that come from data: one part of a path each, never another folder, never the same for two names."""

import os
import string

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.core.names import ID_LIMIT, check_id, inside, safe_name, safe_path, table_name

ATTACKS = [
    "", ".", "..", "...", "/", "//", "/etc/passwd", "../x", "a/../../b", "/../../victim", "a\\..\\b", "C:\\x", "C:",
    "\0", "a\0b", "a\nb", "\x1b[2J", "\u202etxt", "con", "NUL", "nul.txt", "COM1", "lpt9.x", "aux ", "x.", "x ", ".x",
    "~", "~root", "a~b", "e\u0301", "\ud800", "x" * 300, "ä" * 60, "?*", "a:b", "$(x)", "-" * 101,
]  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS, ids=ascii)
def test_a_name_is_one_part_of_a_path(tmp_path, name):
    found = safe_name(name)
    assert found not in ("", ".", "..") and not set(found) & set('/\\:*?"<>|\0\n') and found.isprintable()
    assert not found.startswith(".") and not found.endswith((".", " ")) and len(found.encode()) <= 100
    assert (tmp_path / found).resolve().parent == tmp_path.resolve()
    (tmp_path / f"{found}-{found}.items.jsonl").touch()
    assert found != name


@pytest.mark.parametrize(
    "name", ["obqa", "my questions", "mmlu-law+x", "ÄÖ_1.2", "cifar10_c_fog_3", "題目", "-x", "a" * 100]
)
def test_plain_names_stay_as_they_are(name):
    assert safe_name(name) == name


def test_no_two_names_become_one():
    letters = [a + b for a in string.printable for b in string.printable]
    names = {*ATTACKS, *letters, "x" * 301, *(safe_name(name) for name in ATTACKS)}
    assert len({safe_name(name) for name in names}) == len(names)
    pairs = [("a-b", "c"), ("a", "b-c"), ("a", "b_c"), ("a/b", "c"), ("a_b", "c")]
    assert len({table_name(*pair) for pair in pairs}) == len(pairs)
    assert table_name("mine", "test") == "mine-test.npz"


def test_folders_in_a_name_stay_below_the_first(tmp_path):
    assert safe_path("group/run").as_posix() == "group/run"
    for name in ("/abs", "../x", "a//b", "a/../../b", ""):
        assert ".." not in safe_path(name).parts and not safe_path(name).is_absolute() and safe_path(name).parts


@pytest.mark.parametrize("name", [None, ["a"], {"a": 1}, True, 1.5])
def test_what_is_no_name_is_one_sentence(name):
    with pytest.raises(UserError, match="is a text"):
        safe_name(name)


def test_files_that_another_file_names_are_regular_and_inside(tmp_path):
    folder = tmp_path / "run"
    (folder / "sub").mkdir(parents=True)
    for path in (folder / "sub" / "a.bin", tmp_path / "secret"):
        path.write_text("x")
    os.mkfifo(folder / "fifo")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "folder").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "own").symlink_to("sub/a.bin")
    for name in ("sub/a.bin", "own", "not there yet"):
        assert inside(folder, name) == folder / name
    names = [
        "",
        "..",
        "../secret",
        "sub/../../secret",
        str(tmp_path / "secret"),
        "C:/x",
        "a\\b",
        "a\0b",
        "fifo",
        "sub",
    ]
    for name in [*names, "out", "folder/secret", "loop", "device", "x" * 5000, 5, None]:
        with pytest.raises(ValueError):
            inside(folder, name)


def test_the_hubs_cache_links_to_its_blobs(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    (tmp_path / "blobs" / "1").write_text("x")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "snapshots" / "abc" / "a.json").symlink_to("../../blobs/1")
    (tmp_path / "snapshots" / "abc" / "b.json").symlink_to("../../secret")
    assert inside(tmp_path / "snapshots" / "abc", "a.json").read_text() == "x"
    with pytest.raises(ValueError, match="out of the folder"):
        inside(tmp_path / "snapshots" / "abc", "b.json")


def test_ids_have_a_stated_limit():
    assert check_id("x" * ID_LIMIT, "row 1") == "x" * ID_LIMIT
    with pytest.raises(UserError, match="row 7: the id 'xxxxxxxxxxxxxxxxxxxx'… has 100,000 characters; at most 1,000"):
        check_id("x" * 100_000, "row 7")
