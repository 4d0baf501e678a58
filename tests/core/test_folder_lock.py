"""One process at a time writes a folder."""

import subprocess
import sys

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.core.files import folder_lock, is_empty

HOLDS = 400
# Whoever holds the lock makes the marker, which nobody else may find. Each hold makes the folder and removes it again.
WORKER = f"""
import os, sys
from dappr_llm.core.errors import UserError
from dappr_llm.core.files import folder_lock
folder, marker = sys.argv[1:]
held = overlaps = 0
while held < {HOLDS}:
    try:
        with folder_lock(folder):
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                overlaps += 1
            else:
                os.sched_yield()
                os.unlink(marker)
            held += 1
    except UserError as error:
        assert "being written by another process" in str(error), error
print(held, overlaps)
"""


def test_no_two_processes_hold_a_lock(tmp_path):
    command = [sys.executable, "-c", WORKER, str(tmp_path / "new" / "run"), str(tmp_path / "marker")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = [process.communicate(timeout=60)[0].split() for process in started]
    assert found == [[str(HOLDS), "0"]] * 3


def test_a_run_that_wrote_nothing_leaves_no_folders(tmp_path):
    with pytest.raises(ZeroDivisionError), folder_lock(tmp_path / "new" / "run"):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []


def test_a_held_folder_is_refused_at_once_and_free_afterwards(tmp_path):
    folder = tmp_path / "run"
    with folder_lock(folder):
        assert is_empty(folder)
        with pytest.raises(UserError, match="run is being written by another process"), folder_lock(folder):
            pass
        (folder / "results.json").write_text("{}")
    with folder_lock(folder):
        assert not is_empty(folder)


def test_a_folder_that_was_there_stays_and_is_empty(tmp_path):
    with folder_lock(tmp_path):
        pass
    assert tmp_path.is_dir() and is_empty(tmp_path)


def test_a_killed_process_leaves_no_lock(tmp_path):
    code = "import os, sys\nfrom dappr_llm.core.files import folder_lock\n"
    code += "with folder_lock(sys.argv[1]):\n    open(sys.argv[1] + '/x', 'w').close()\n    os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")]).returncode == 9
    with folder_lock(tmp_path / "run"):
        assert (tmp_path / "run" / "x").exists()


def test_a_lock_that_was_removed_by_its_holder_guards_nothing(tmp_path, monkeypatch):
    """Between opening the lock's file and locking it, a failed run may have removed both."""
    import fcntl

    folder, lock = tmp_path / "run", fcntl.flock
    folder.mkdir()

    def removed_meanwhile(handle, how):
        monkeypatch.setattr(fcntl, "flock", lock)
        (folder / ".lock").unlink()
        return lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    try:
        with folder_lock(folder):
            assert (folder / ".lock").exists()  # another process would find it
    except UserError:
        pass  # refused: as good


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="Cannot write into .*run"), folder_lock(tmp_path / "file" / "run"):
        pass


def test_file_systems_without_locks_get_a_marker_file(tmp_path, monkeypatch):
    import errno
    import fcntl

    def none(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with folder_lock(tmp_path / "run"):
        assert is_empty(tmp_path / "run")
        with pytest.raises(UserError, match="being written by another process"), folder_lock(tmp_path / "run"):
            pass
    assert not (tmp_path / "run").exists()
