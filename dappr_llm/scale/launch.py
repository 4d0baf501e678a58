"""`dappr train RECIPE --launch PRESET`: runs accelerate's launcher with a shipped config file. No torch here."""

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
    """Files of the shipped launch presets, by name."""
    root = recipes_dir()
    return {path.stem: path for path in sorted((root / "accelerate").glob("*.yaml"))} if root else {}


def find_preset(name: str) -> Path:
    """The config file of a preset; a path of a file that `accelerate config` wrote is returned as it is."""
    if Path(name).is_file():
        return Path(name)
    found = presets()
    if name not in found:
        raise UserError(f"No launch preset {name!r}; {nearest(name, found)} (or give an accelerate config file)")
    return found[name]


def command(preset: str, arguments: Sequence[str], extra: str = "") -> list[str]:
    """
    The command line of the launcher.

    Args:
        preset (`str`):
            Name of a preset, or an accelerate config file.
        arguments (`Sequence[str]`):
            Arguments of `dappr` in each process.
        extra (`str`, *optional*):
            Further arguments of `accelerate launch` itself, as one string.
    """
    path = find_preset(preset)
    settings = read_yaml(path)
    given = shlex.split(extra)
    if settings.get("distributed_type") == "DEEPSPEED" and importlib.util.find_spec("deepspeed") is None:
        raise UserError(f"The launch preset {preset!r} needs DeepSpeed: pip install deepspeed")
    # Two runs on one machine must not use the same default port; 0 lets the system choose.
    if settings.get("num_machines", 1) == 1 and not any(part.startswith(_PORT) for part in given):
        given += [_PORT, "0"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path), *given]
    return [*launcher, "-m", "dappr_llm", *arguments]


def launch(preset: str, arguments: Sequence[str], extra: str = "") -> int:
    """
    Run accelerate's launcher; on POSIX it replaces this process (`exec`), so that it receives signals directly.

    Returns:
        `int`: The launcher's exit code, where the launcher is a child process.
    """
    full = command(preset, arguments, extra)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execv(full[0], full)
    return subprocess.run(full, check=False).returncode
