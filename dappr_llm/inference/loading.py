"""A trained checkpoint → `Run`: method, model and backend, ready to predict."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import checkpoint
from ..core.errors import UserError, explained
from .modality import BACKENDS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..core.backend import Backend, Row
    from ..core.outputs import Prediction
    from ..methods import Method
    from .gate import GateScorer
    from .table_predictor import PredictionSettings, TablePredictor


@dataclass
class Run:
    """A loaded checkpoint."""

    method: Method
    model: nn.Module
    backend: Backend
    folder: str = ""
    method_name: str | None = None
    base: str | None = None  # the base model that was loaded, which need not be where the checkpoint says
    gate: GateScorer | None = None

    def predictor(self, settings: PredictionSettings | None = None) -> TablePredictor:
        """What predicts batches and whole datasets with this model."""
        from .table_predictor import TablePredictor

        return TablePredictor(
            self.model, self.method, self.backend, settings=settings, method_name=self.method_name, gate=self.gate
        )

    def predict(self, question: Any, choices: Sequence[Any] | None = None, extra_letters: bool = False) -> Prediction:
        """
        Probabilities and uncertainties for a question or an image, or for several.

        Args:
            question (`str` or `list[str]`):
                One question, or a list of them; for an image classifier images, as paths or Pillow's.
            choices (`list[str]` or `list[list[str]]`, *optional*):
                The question's options, or a list of options per question (equally many each).
            extra_letters (`bool`, *optional*, defaults to `False`):
                Read more options than letters were trained; otherwise such questions are refused.
        """
        return self.predictor().predict_batch(*self.encoded(question, choices, extra_letters))

    def encoded(
        self, question: Any, choices: Sequence[Any] | None = None, extra_letters: bool = False
    ) -> tuple[list[dict[str, Any]], int]:
        """What `predict` gives to the model, as rows for `collate`, and how many options each of them offers."""
        rows = self._rows(question, choices)
        encoded = self.backend.encode(self.backend.items(rows, name="question"))
        counts = {row["num_options"] for row in encoded}
        if len(counts) != 1:
            raise UserError("Questions given together need equally many choices; use predict_table for mixed ones")
        trained = self.backend.num_choices or max(counts)
        if max(counts) > trained and not extra_letters:
            raise UserError(
                f"{max(counts)} choices, but only {trained} letters are trained; offer fewer, or "
                "pass extra_letters=True to read letters that were never trained"
            )
        return encoded, counts.pop()

    def _rows(self, question: Any, choices: Sequence[Any] | None) -> list[Row]:
        row = self.backend.as_row(question, choices)
        if row is not None:
            return [row]
        each = [None] * len(question) if choices is None else choices
        found = [self.backend.as_row(*pair) for pair in zip(question, each, strict=True)]
        return [row for row in found if row is not None]


def load_checkpoint(
    checkpoint_name: str | Path,
    base_model: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    quantization: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    gate: bool = True,
) -> Run:
    """
    A trained checkpoint, ready to predict.

    Args:
        checkpoint_name (`str` or `Path`):
            The folder that training wrote, or a Hub id.
        base_model (`str`, *optional*):
            Another place of the base model than the one written in the checkpoint.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Dtype of the base model; by default the one that it was trained in.
        revision (`str`, *optional*):
            Commit, branch or tag of a checkpoint on the Hub.
        quantization (`Mapping`, *optional*):
            Load the base in 4 or 8 bits.
        device (`str` or `torch.device`, *optional*):
            Where to put the model; by default the GPU if there is one.
        gate (`bool`, *optional*, defaults to `True`):
            Load its gate too, if it has one: predictions then say how familiar a row is.
    """
    from ..methods.base import get_method
    from .gate import load_gate

    folder, config = checkpoint.load_sidecar(checkpoint_name, revision)
    checkpoint.check_files(folder)
    name = config["method"]["name"]
    method = get_method(name, **config["method"]["options"])
    if config["modality"] not in BACKENDS:
        raise UserError(f"{checkpoint_name}: unknown modality {config['modality']!r}")
    module, backend_name = BACKENDS[config["modality"]]
    backend_class = getattr(importlib.import_module(module), backend_name)
    # Whatever a damaged tokenizer or config makes a library raise, also long after it was read.
    cure = "a file of it or of its base model is damaged: fetch it again"
    with explained(f"{checkpoint_name} cannot be loaded", cure):
        model, backend = backend_class.from_pretrained(folder, config, method, base_model, dtype, quantization, device)
    backend.data_revisions = config.get("data_revisions") or {}
    model.eval()
    scorer = load_gate(folder, model, backend) if gate else None
    return Run(method, model, backend, folder, name, base_model or config.get("base_model"), scorer)
