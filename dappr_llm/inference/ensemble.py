"""
Ensembles: M adapters over one base model, so that memory grows by adapters and not by models.

Tables of separate runs are combined by `ensemble_tables.combine`; here all members of an ensemble predict while the
base model is loaded once. Both read members alike: mean alpha for Dirichlet methods, otherwise mean
probabilities and mutual information.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..core import checkpoint
from ..core.errors import UserError
from ..core.outputs import Outputs, Prediction, from_alpha, from_log_probs
from ..evaluation.ensemble_tables import combine
from ..evaluation.prediction_table import PredictionTable
from ..methods import Method, get_method
from .batching import RowSet
from .finite_predictions import finite_prediction
from .loading import Run, load_checkpoint
from .modality import load_another
from .table_predictor import PredictionSettings, TablePredictor

# Members that differ in one of these read other questions, or other letters.
_SHARED = (
    *("modality", "base_model", "base_revision", "num_choices", "prompt", "max_length"),
    *("readout", "labels", "truncation", "letter_token_ids", "answer_token_ids", "extra_token_ids"),
)


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
        self._lock = threading.RLock()  # PEFT's active adapter belongs to the model

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
        loaded = [checkpoint.load_sidecar(name, kwargs.get("revision")) for name in checkpoints]
        for name, (folder, config) in zip(checkpoints, loaded, strict=True):
            checkpoint.check_files(folder)
            _refuse_difference(str(checkpoints[0]), loaded[0][1], str(name), config)
            if not (Path(folder) / "adapter_model.safetensors").is_file():
                raise UserError(f"{name} holds no adapter_model.safetensors: only adapters can share a base model")
        # A gate belongs to one member's states.
        run = load_checkpoint(checkpoints[0], base_model, **{**kwargs, "gate": False})
        names = ["default", *(f"member{i}" for i in range(1, len(loaded)))]
        for adapter, (folder, _) in list(zip(names, loaded, strict=True))[1:]:
            load_another(run.model, folder, adapter)
        run.model.eval()
        return cls(run, [_member(adapter, config) for adapter, (_, config) in zip(names, loaded, strict=True)])

    def predict(self, question: str | list[str], choices: list[Any] | None = None) -> Prediction:
        """Probabilities and uncertainties of the ensemble; the arguments are those of `Run.predict`."""
        rows, width = self.run.encoded(question, choices)
        found = self.predict_together(rows, width) or self.predict_in_turn(rows, width)
        alphas = [out.alpha for out in found if out.alpha is not None]
        if len(alphas) == len(found):
            return from_alpha(torch.stack(alphas, dim=1), self.members[0].method.epistemic_scale)
        probs = torch.cat([out.probs[None] if out.members is None else out.members for out in found])
        return from_log_probs(probs.log().movedim(0, 1))  # [B, M, K]

    def predict_in_turn(self, rows: list[dict[str, Any]], width: int) -> list[Prediction]:
        """What each member says, one after the other."""
        found = []
        for member in self.members:
            with self.active(member) as predictor:
                found.append(predictor.predict_batch(rows, width))
        return found

    def predict_together(self, rows: list[dict[str, Any]], width: int) -> list[Prediction] | None:
        """What each member says, from one batch; `None` where that is not possible, or would be too large."""
        adapters = [member.adapter for member in self.members]
        methods = [member.method for member in self.members]
        if not all(m.passes == 1 and m.num_outputs(width) == methods[0].num_outputs(width) for m in methods):
            return None
        backend = self.run.backend.with_method(methods[0], 0.0)
        logits = backend.read_adapters(self.run.model, rows, adapters, width)
        if logits is None:
            return None
        for part, member in zip(logits, self.members, strict=True):
            part[:, :width] += member.evidence_offset
        ids = [row.get("id", number) for number, row in enumerate(rows)]
        return [finite_prediction(m, Outputs(logits=part), ids) for m, part in zip(methods, logits, strict=True)]

    @contextmanager
    def active(self, member: Member, settings: PredictionSettings | None = None) -> Iterator[TablePredictor]:
        """Switch the model to one member's adapter and hand out its predictor; one thread at a time."""
        backend = self.run.backend.with_method(member.method, member.evidence_offset)
        with self._lock:
            self.run.model.set_adapter(member.adapter)  # type: ignore[operator]
            try:
                yield TablePredictor(
                    self.run.model, member.method, backend, settings=settings, method_name=member.method_name
                )
            finally:
                self.run.model.set_adapter(self.members[0].adapter)  # type: ignore[operator]


class EnsemblePredictor:
    """
    Predicts whole datasets with an ensemble, as [`TablePredictor`] does with one model.

    Args:
        ensemble (`AdapterEnsemble`):
            The members.
        settings (`PredictionSettings`, *optional*):
            Batch sizes and seed.
    """

    def __init__(self, ensemble: AdapterEnsemble, settings: PredictionSettings | None = None):
        self.ensemble, self.settings = ensemble, settings
        self.backend = ensemble.run.backend

    def predict_table(self, dataset: Any, task: str = "", split: str = "", **meta: Any) -> PredictionTable:
        """As [`TablePredictor.predict_table`]."""
        return self.predict_tables([RowSet(dataset, task, split, meta)])[0]

    def predict_tables(self, sets: Sequence[RowSet]) -> list[PredictionTable]:
        """As [`TablePredictor.predict_tables`]; rows are tokenised once for all members."""
        prepare = self.backend.prepare
        sets = [replace(each, rows=prepare(each.rows, labelled=False, name=each.task or "dataset")) for each in sets]
        found = []
        for member in self.ensemble.members:
            with self.ensemble.active(member, self.settings) as predictor:
                found.append(predictor.predict_tables(sets))
        return [combine(list(tables)) for tables in zip(*found, strict=True)]


def _member(adapter: str, config: dict[str, Any]) -> Member:
    method = config["method"]
    return Member(adapter, get_method(method["name"], **method["options"]), method["name"], config["evidence_offset"])


def _refuse_difference(first_name: str, first: dict[str, Any], name: str, config: dict[str, Any]) -> None:
    for key in _SHARED:
        if key == "base_revision" and None in (first.get(key), config.get(key)):
            continue  # written by a version that did not know it
        if first.get(key) != config.get(key):
            raise UserError(
                f"{name} cannot join an ensemble with {first_name}: its {key} is {config.get(key)!r}, not "
                f"{first.get(key)!r}"
            )
