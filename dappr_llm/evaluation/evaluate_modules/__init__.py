"""
Our metrics as modules of 🤗 Evaluate, for use with any Trainer. Nothing is downloaded.

Instantiate them (`from dappr_llm.evaluation.evaluate_modules.calibration import Calibration`), or load them by path:
`evaluate.load(module_path("calibration"))`.
"""

from __future__ import annotations

from pathlib import Path

from ...core.errors import UserError, nearest

MODULES = ("calibration", "ood_detection", "selective_prediction")


def module_path(name: str) -> str:
    """
    The path of a module, for `evaluate.load`.

    Args:
        name (`str`): `"calibration"`, `"ood_detection"` or `"selective_prediction"`.
    """
    if name not in MODULES:
        raise UserError(f"Unknown evaluate module {name!r}; {nearest(name, MODULES)}")
    return str(Path(__file__).parent / f"{name}.py")
