"""The scripts' shared arguments."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTS.glob("plot_*.py")))
def test_figure_scripts_print_their_docstring_and_default_file(name):
    done = subprocess.run([sys.executable, SCRIPTS / name, "--help"], capture_output=True, text=True, check=True)
    assert f"python scripts/{name}" in done.stdout and ".png)" in done.stdout
