"""A light form of scripts/fuzz.py: damaged recipes, command lines, checkpoint and data files end in one sentence."""

import random
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import fuzz  # noqa: E402
import fuzz_mutations  # noqa: E402


def test_damaged_inputs_end_in_one_sentence():
    command = [sys.executable, SCRIPTS / "fuzz.py", "--cases", "45", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    lines = done.stdout.strip().splitlines()
    assert lines[-1].startswith("45 cases from seed 7, 0 failed")
    assert [line.split(":")[0] for line in lines[-5:-1]] == ["recipes", "arguments", "checkpoints", "files"]
    assert all("refused" in line for line in lines[-5:-1])  # the damage was noticed


def test_an_interrupted_run_still_sums_up(monkeypatch, capsys):
    outcomes = iter([("refused", ""), ("traceback", "bad"), KeyboardInterrupt()])

    def one_case(*args):
        found = next(outcomes)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(fuzz, "_warm_up", lambda: None)
    monkeypatch.setattr(fuzz, "prepare", lambda folder: folder)
    monkeypatch.setattr(fuzz, "one_case", one_case)
    assert len(fuzz.run(100, 7)) == 1
    lines = capsys.readouterr().out.strip().splitlines()
    assert "Interrupted; --seed 9 goes on from here." in lines
    assert lines[-1].startswith("2 cases from seed 7, 1 failed") and "recipes: 1 cases, 1 refused" in lines


def test_a_case_is_made_from_its_seed_alone():
    value = {"a": [1, 2, {"b": "c"}], "d": 0.5}
    for make, given in (
        (fuzz_mutations.mutate_value, value),
        (fuzz_mutations.mutate_text, "name: x\nmodel: {}\n" * 10),
        (fuzz_mutations.mutate_bytes, bytes(range(256))),
    ):
        twice = [[repr(make(random.Random(seed), given)) for seed in range(50)] for _ in range(2)]
        assert twice[0] == twice[1] and len(set(twice[0])) > 25 and value == {"a": [1, 2, {"b": "c"}], "d": 0.5}
