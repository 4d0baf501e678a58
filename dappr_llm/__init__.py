"""Fine-tune uncertainty-aware adapters. Names are loaded on first use, so that `import dappr_llm` is quick."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "AdapterEnsemble": "ensemble",
    "DAPPrConfig": "config",
    "DAPPrTrainer": "trainer",
    "ImageClassifier": "vision.model",
    "ImageClassifierConfig": "vision.model",
    "METHODS": "methods",
    "PredictionTable": "predictions",
    "UncertaintyPipeline": "pipeline",
    "UserError": "errors",
    "calibrate": "calibration",
    "dappr_loss": "methods.dappr",
    "dappr_uncertainty": "methods.dappr",
    "evaluate_id": "evaluators",
    "evaluate_ood": "evaluators",
    "get_method": "methods",
    "load_checkpoint": "run",
    "push": "hub",
    "register_pipeline": "hf_task",
}

__all__ = ["__version__", *sorted(_LAZY)]

if TYPE_CHECKING:
    from .calibration import calibrate as calibrate
    from .config import DAPPrConfig as DAPPrConfig
    from .ensemble import AdapterEnsemble as AdapterEnsemble
    from .errors import UserError as UserError
    from .evaluators import evaluate_id as evaluate_id
    from .evaluators import evaluate_ood as evaluate_ood
    from .hf_task import register_pipeline as register_pipeline
    from .hub import push as push
    from .methods import METHODS as METHODS
    from .methods import get_method as get_method
    from .methods.dappr import dappr_loss as dappr_loss
    from .methods.dappr import dappr_uncertainty as dappr_uncertainty
    from .pipeline import UncertaintyPipeline as UncertaintyPipeline
    from .predictions import PredictionTable as PredictionTable
    from .run import load_checkpoint as load_checkpoint
    from .trainer import DAPPrTrainer as DAPPrTrainer
    from .vision.model import ImageClassifier as ImageClassifier
    from .vision.model import ImageClassifierConfig as ImageClassifierConfig


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
