"""Fine-tune uncertainty-aware adapters. Names are loaded on first use, so that `import dappr_llm` is quick."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .core.library_output import drop_useless_messages

drop_useless_messages()  # before any import of PEFT

__version__ = "0.1.0"

_LAZY = {
    "AdapterEnsemble": "inference.ensemble",
    "DAPPrConfig": "training.config",
    "DAPPrTrainer": "training.trainer",
    "ImageClassifier": "vision.model",
    "ImageClassifierConfig": "vision.model",
    "METHODS": "methods",
    "PredictionTable": "evaluation.prediction_table",
    "UncertaintyPipeline": "inference.pipeline",
    "UserError": "core.errors",
    "calibrate": "decisions.calibrate",
    "dappr_loss": "methods.dappr",
    "dappr_uncertainty": "methods.dappr",
    "evaluate_id": "evaluation.evaluators",
    "evaluate_ood": "evaluation.evaluators",
    "get_method": "methods",
    "load_checkpoint": "inference.loading",
    "load_task": "text.data.tasks",
    "push": "inference.hub",
    "register_pipeline": "inference.hf_pipeline",
}

__all__ = ["__version__", *sorted(_LAZY)]

if TYPE_CHECKING:
    from .core.errors import UserError
    from .decisions.calibrate import calibrate
    from .evaluation.evaluators import evaluate_id, evaluate_ood
    from .evaluation.prediction_table import PredictionTable
    from .inference.ensemble import AdapterEnsemble
    from .inference.hf_pipeline import register_pipeline
    from .inference.hub import push
    from .inference.loading import load_checkpoint
    from .inference.pipeline import UncertaintyPipeline
    from .methods import METHODS, get_method
    from .methods.dappr import dappr_loss, dappr_uncertainty
    from .text.data.tasks import load_task
    from .training.config import DAPPrConfig
    from .training.trainer import DAPPrTrainer
    from .vision.model import ImageClassifier, ImageClassifierConfig


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
