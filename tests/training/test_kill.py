"""The short form of scripts/kill_test.py: SIGKILL at random moments and in the middle of saves, resumed each time."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_killed_runs_end_with_the_weights_of_an_uninterrupted_one():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "scripts" / "kill_test.py"), "--kills", "4", "--seed", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.strip().splitlines()[-1].startswith("4 kills") and "equal the uninterrupted run's" in done.stdout
    )
