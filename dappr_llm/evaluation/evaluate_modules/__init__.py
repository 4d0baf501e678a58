"""
Our metrics as modules of 🤗 Evaluate, for use with any Trainer. Nothing is downloaded.

Instantiate them (`from dappr_llm.evaluation.evaluate_modules.calibration import Calibration`), or load them by path:
`evaluate.load(module_path("calibration"))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import UserError, nearest

if TYPE_CHECKING:
    from evaluate import MetricInfo

MODULES = ("calibration", "ood_detection", "selective_prediction")


def uncertainty_info(description: str, inputs: str) -> MetricInfo:
    """
    `MetricInfo` of the modules that rank rows by an uncertainty: per row a float prediction and a reference 0 or 1.

    Args:
        description, inputs (`str`): Texts of the module.
    """
    import datasets
    import evaluate

    features = datasets.Features({"predictions": datasets.Value("float64"), "references": datasets.Value("int64")})
    return evaluate.MetricInfo(description=description, citation="", inputs_description=inputs, features=features)


def as_ranking(
    predictions: Sequence[float], references: Sequence[int], one: str, zero: str
) -> tuple[np.ndarray, np.ndarray]:
    """
    Uncertainties `[N]` as float64, and the references `[N]` as booleans.

    Args:
        predictions, references: As the modules get them.
        one, zero (`str`): What the references 1 and 0 mean, for the error message.
    """
    flags = np.asarray(references)
    if not np.isin(flags, (0, 1)).all():
        raise ValueError(f"references must be 1 ({one}) or 0 ({zero})")
    return np.asarray(predictions, dtype=np.float64), flags == 1


def module_path(name: str) -> str:
    """
    The path of a module, for `evaluate.load`.

    Args:
        name (`str`): `"calibration"`, `"ood_detection"` or `"selective_prediction"`.
    """
    if name not in MODULES:
        raise UserError(f"Unknown evaluate module {name!r}; {nearest(name, MODULES)}")
    return str(Path(__file__).parent / f"{name}.py")
