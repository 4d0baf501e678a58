"""Jobs over devices, with a stand-in for training: who runs where, after whom, and what a failure costs."""

import sys
from pathlib import Path

import pytest

from dappr_llm.scale.local_pool import Job, run_jobs, visible_devices

SCRIPT = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
start = time.time()
time.sleep(0.4)
if sys.argv[2] == "fail":
    print("something broke")
    sys.exit(3)
folder.joinpath("device").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
folder.joinpath("times").write_text(f"{start} {time.time()}")
folder.joinpath("results.json").write_text(json.dumps({"meta": {}, "results": {"id/accuracy": 0.5}}))
"""


class FakeJob(Job):
    def command(self):
        return [sys.executable, "-c", SCRIPT, str(self.folder), *self.overrides]


def job(tmp_path, name, after=None, what="work"):
    return FakeJob(name, tmp_path / name, Path("none.yaml"), (what,), after and str(tmp_path / after))


def times(tmp_path, name):
    return [float(value) for value in (tmp_path / name / "times").read_text().split()]


def test_devices_are_shared_out_and_never_doubly_used(tmp_path):
    jobs = [job(tmp_path, f"j{i}") for i in range(4)]
    done = set()
    assert run_jobs(jobs, ["5", "7"], done) == ({}, False)
    assert len(done) == 4
    devices = {i: (tmp_path / f"j{i}" / "device").read_text() for i in range(4)}
    assert sorted(devices.values()) == ["5", "5", "7", "7"]
    for one in range(4):
        for two in range(one):
            if devices[one] == devices[two]:
                first, second = sorted([times(tmp_path, f"j{one}"), times(tmp_path, f"j{two}")])
                assert first[1] <= second[0]


def test_a_job_waits_for_what_it_builds_on(tmp_path):
    jobs = [job(tmp_path, "late", after="early"), job(tmp_path, "early")]
    assert run_jobs(jobs, [None, None], set()) == ({}, False)
    assert times(tmp_path, "early")[1] <= times(tmp_path, "late")[0]


def test_a_failure_takes_along_only_what_needs_it(tmp_path, capsys):
    jobs = [job(tmp_path, "bad", what="fail"), job(tmp_path, "needs", after="bad"), job(tmp_path, "free")]
    done = set()
    failed, interrupted = run_jobs(jobs, [None], done)
    assert not interrupted and done == {str(tmp_path / "free")}
    assert "exit code 3: something broke" in failed[str(tmp_path / "bad")]
    assert "which failed" in failed[str(tmp_path / "needs")]
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, wanted", [("0,3", ["0", "3"]), ("", []), ("-1", []), ("GPU-ab,GPU-cd", ["GPU-ab", "GPU-cd"])]
)
def test_visible_devices_are_those_the_user_allows(monkeypatch, given, wanted):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_devices() == wanted
