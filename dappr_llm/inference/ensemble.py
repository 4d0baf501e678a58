"""
Ensembles: M adapters over one base model, so that memory grows by adapters and not by models.

Tables of separate runs are combined by `predictions.combine`; this module predicts with all members of an ensemble
while the base model is loaded once. Both read members alike: mean alpha for Dirichlet methods, otherwise mean
probabilities and mutual information.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..core import checkpoint, manifest
from ..core.errors import UserError
from ..core.outputs import Outputs, Prediction, from_alpha, from_log_probs
from ..evaluation.prediction_table import PredictionTable, combine
from ..methods import Method, get_method
from ..text.packing.mixed_adapters import can_mix, fits, read_members
from .batching import RowSet
from .loading import Run, load_checkpoint
from .passes import predict_batch

# Members that differ in one of these read other questions, or other letters.
_SHARED = ("modality", "base_model", "num_choices", "prompt", "max_length", "letter_token_ids", "extra_token_ids")


@dataclass(frozen=True)
class Member:
    """One adapter of an ensemble, under the name by which PEFT knows it."""

    adapter: str
    method: Method
    method_name: str
    evidence_offset: float


class AdapterEnsemble:
    """
    Adapters trained on the same base model, task layout and letters, switched over one copy of the base.

    Args:
        run (`Run`):
            The first member's checkpoint, loaded.
        members (`list[Member]`):
            All members; their adapters are loaded in `run.model`.

    Example:

    ```python
    >>> ensemble = AdapterEnsemble.from_pretrained(["runs/seed0", "runs/seed1", "runs/seed2"])
    >>> ensemble.predict("Which of these is a fruit?", ["hammer", "plum", "violin", "sock"]).epistemic
    ```
    """

    def __init__(self, run: Run, members: list[Member]):
        self.run = run
        self.members = members

    @classmethod
    def from_pretrained(
        cls, checkpoints: Sequence[str | Path], base_model: str | None = None, **kwargs: Any
    ) -> AdapterEnsemble:
        """
        Load the base model once and every adapter over it.

        Args:
            checkpoints (`Sequence[str]`):
                Folders that training wrote, or Hub ids.
            base_model (`str`, *optional*):
                Another place of the base model than the one written in the checkpoints.
            kwargs:
                Passed on to `load_checkpoint` (`dtype`, `quantization`, `device`).
        """
        if not checkpoints:
            raise UserError("An ensemble needs at least one checkpoint")
        loaded = [checkpoint.load_sidecar(name) for name in checkpoints]
        for name, (folder, config) in zip(checkpoints, loaded, strict=True):
            manifest.check(folder)
            _refuse_difference(str(checkpoints[0]), loaded[0][1], str(name), config)
            if not (Path(folder) / "adapter_model.safetensors").is_file():
                raise UserError(f"{name} holds no adapter_model.safetensors: only adapters can share a base model")
        run = load_checkpoint(checkpoints[0], base_model, **kwargs)
        names = ["default", *(f"member{i}" for i in range(1, len(loaded)))]
        for adapter, (folder, _) in list(zip(names, loaded, strict=True))[1:]:
            run.model.load_adapter(folder, adapter, is_trainable=False, use_safetensors=True)
        run.model.eval()
        return cls(run, [_member(adapter, config) for adapter, (_, config) in zip(names, loaded, strict=True)])

    @contextmanager
    def member(self, member: Member, *users: Any) -> Iterator[None]:
        """Switch to one member; `users` (a trainer) are told its method too."""
        parts = (self.run, self.run.backend, *users)
        before = [(part, part.method, getattr(part, "method_name", None)) for part in parts]
        offset = self.run.backend.evidence_offset
        self.run.model.set_adapter(member.adapter)
        self.run.backend.evidence_offset = member.evidence_offset
        for part in parts:
            part.method = member.method
            if hasattr(part, "method_name"):
                part.method_name = member.method_name
        try:
            yield
        finally:
            self.run.model.set_adapter(self.members[0].adapter)
            self.run.backend.evidence_offset = offset
            for part, method, name in before:
                part.method = method
                if name is not None:
                    part.method_name = name

    def predict(self, question: str | list[str], choices: list[Any]) -> Prediction:
        """Probabilities and uncertainties of the ensemble; the arguments are those of `Run.predict`."""
        rows, width = self.run.encoded(question, choices)
        found = self._together(rows, width) or self._in_turn(rows, width)
        alphas = [out.alpha for out in found if out.alpha is not None]
        if len(alphas) == len(found):
            return from_alpha(torch.stack(alphas, dim=1), self.members[0].method.epistemic_scale)
        probs = torch.cat([out.probs[None] if out.members is None else out.members for out in found])
        return from_log_probs(probs.log().movedim(0, 1))  # [B, M, K]

    def _in_turn(self, rows: list[dict[str, Any]], width: int) -> list[Prediction]:
        found = []
        for member in self.members:
            with self.member(member):
                found.append(predict_batch(self.run, rows, width))
        return found

    def _together(self, rows: list[dict[str, Any]], width: int) -> list[Prediction] | None:
        """All members in one batch; `None` where that is not possible, or would be too large."""
        adapters = [member.adapter for member in self.members]
        methods = [member.method for member in self.members]
        same = all(m.passes == 1 and m.num_outputs(width) == methods[0].num_outputs(width) for m in methods)
        text = self.run.backend.modality == "text"
        if not (text and same and fits(rows, len(adapters)) and can_mix(self.run.model, adapters)):
            return None
        logits = read_members(self.run.backend, self.run.model, rows, adapters, width)
        for part, member in zip(logits, self.members, strict=True):
            part[:, :width] += member.evidence_offset
        return [m.predict(Outputs(logits=part)) for m, part in zip(methods, logits, strict=True)]

    def predictor(self, trainer: Any) -> EnsemblePredictor:
        """Predicts whole datasets; `trainer` is a `DAPPrTrainer` around this ensemble's model and backend."""
        return EnsemblePredictor(self, trainer)


class EnsemblePredictor:
    """The part of a `DAPPrTrainer` that prediction uses, for an ensemble."""

    def __init__(self, ensemble: AdapterEnsemble, trainer: Any):
        self.ensemble = ensemble
        self.trainer = trainer
        self.args = trainer.args
        self.backend = trainer.backend

    def predict_table(self, dataset: Any, task: str = "", split: str = "", **meta: Any) -> PredictionTable:
        """As `DAPPrTrainer.predict_table`."""
        return self.predict_tables([RowSet(dataset, task, split, meta)])[0]

    def predict_tables(self, sets: Sequence[RowSet]) -> list[PredictionTable]:
        """As `DAPPrTrainer.predict_tables`; rows are tokenised once."""
        prepare = self.ensemble.run.backend.prepare
        sets = [replace(each, rows=prepare(each.rows, labelled=False, name=each.task or "dataset")) for each in sets]
        found = []
        for member in self.ensemble.members:
            with self.ensemble.member(member, self.trainer):
                found.append(self.trainer.predict_tables(sets))
        return [combine(list(tables)) for tables in zip(*found, strict=True)]


def _member(adapter: str, config: dict[str, Any]) -> Member:
    method = config["method"]
    return Member(adapter, get_method(method["name"], **method["options"]), method["name"], config["evidence_offset"])


def _refuse_difference(first_name: str, first: dict[str, Any], name: str, config: dict[str, Any]) -> None:
    for key in _SHARED:
        if first.get(key) != config.get(key):
            raise UserError(
                f"{name} cannot join an ensemble with {first_name}: its {key} is {config.get(key)!r}, not "
                f"{first.get(key)!r}"
            )
