"""`dappr train RECIPE --launch NAME`: accelerate's launcher with one of the shipped settings. No torch here."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import UserError, nearest
from ..core.recipe import read_yaml, recipes_dir

_PORT = "--main_process_port"


def presets() -> dict[str, Path]:
    """Name and file of every shipped launch preset."""
    root = recipes_dir()
    return {path.stem: path for path in sorted((root / "accelerate").glob("*.yaml"))} if root else {}


def find_preset(name: str) -> Path:
    """A preset by its name, or the path of a file that `accelerate config` wrote."""
    if Path(name).is_file():
        return Path(name)
    found = presets()
    if name not in found:
        raise UserError(f"No launch preset {name!r}; {nearest(name, found)} (or give an accelerate config file)")
    return found[name]


def command(preset: str, arguments: Sequence[str], extra: str = "") -> list[str]:
    """
    The command that starts every process of a launch.

    Args:
        preset (`str`):
            Name of a preset, or an accelerate config file.
        arguments (`Sequence[str]`):
            What `dappr` is called with in each process.
        extra (`str`, *optional*):
            Arguments for `accelerate launch` itself, as one text.
    """
    path = find_preset(preset)
    settings = read_yaml(path)
    given = shlex.split(extra)
    if settings.get("distributed_type") == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise UserError(f"The launch preset {preset!r} needs DeepSpeed: pip install deepspeed")
    # Two runs on one machine must not meet at the default port; 0 lets the system choose.
    if settings.get("num_machines", 1) == 1 and not any(part.startswith(_PORT) for part in given):
        given += [_PORT, "0"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path), *given]
    return [*launcher, "-m", "dappr_llm", *arguments]


def launch(preset: str, arguments: Sequence[str], extra: str = "") -> int:
    """
    Hand over to accelerate's launcher; on POSIX this process becomes it, so that signals reach it as they are.

    Returns:
        `int`: The launcher's exit code, where the process lives on.
    """
    full = command(preset, arguments, extra)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execv(full[0], full)
    return subprocess.run(full, check=False).returncode
