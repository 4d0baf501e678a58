"""Fitting a gate: one pass over training rows, from which moments are kept and no features of a row but a few."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.backend import without_wrapper
from ..core.errors import UserError, nearest
from ..decisions.density import KINDS, LEAST_ROWS, MOST_CLASSES, Gaussian, KeptRows, Moments, normalised, standard
from ..decisions.familiarity import Familiarity
from ..decisions.gate import Gate
from .batching import JoinedRows
from .gate import GateScorer, base_fingerprint
from .gathering import gather

if TYPE_CHECKING:
    from .table_predictor import TablePredictor

MOST_ROWS = 4000  # training rows that are read by default
_HELD_OUT, _MOST_HELD_OUT = 0.2, 1000  # of them, to standardise scores on


@dataclass(frozen=True)
class GateRows:
    """
    Rows for a gate.

    Args:
        rows:
            Rows in any layout that training accepts.
        task, split (`str`, *optional*):
            What they are called.
    """

    rows: Any
    task: str | None = None
    split: str | None = None

    @property
    def named(self) -> dict[str, str]:
        """Task and split, where they are known."""
        return {key: value for key, value in (("task", self.task), ("split", self.split)) if value}


def fit_gate(
    predictor: TablePredictor,
    train: GateRows,
    calibration: GateRows | None = None,
    kind: str = "auto",
    most: int = MOST_ROWS,
) -> Gate:
    """
    A gate for a model; the same however its rows are ordered, batched or shared out over processes.

    Args:
        predictor ([`TablePredictor`]):
            Model, backend and processes.
        train ([`GateRows`]):
            Training rows, without augmentation.
        calibration ([`GateRows`], *optional*):
            Held-out rows of the same distribution, for p-values.
        kind (`str`, *optional*, defaults to `"auto"`):
            `"gaussian"`, `"class_gaussian"`, `"knn"`, or `"auto"`: one Gaussian, with a mean per class where labels
            are fixed.
        most (`int`, *optional*, defaults to 4,000):
            Rows to read at most, chosen by a hash of their content.
    """
    backend, model = predictor.backend, without_wrapper(predictor.model)
    groups = backend.gate_groups(model)
    if not groups:
        raise UserError(f"{type(model).__name__} gives no hidden states for a gate")
    kind = _kind(kind, backend.class_names)
    prepared = backend.prepare(train.rows, labelled=False, name=train.task or "train")
    chosen = _choose(prepared, backend.row_keys(prepared), most)
    held_out = frozenset(chosen[: min(int(len(chosen) * _HELD_OUT), _MOST_HELD_OUT)])
    if len(chosen) - len(held_out) < LEAST_ROWS:
        raise UserError(
            f"A gate needs at least {_least()} training rows, and there are {len(chosen)}; give more rows, or set "
            "gate: false"
        )
    found = _collect(predictor, prepared, chosen, held_out, kind)
    gate = Gate(
        kind,
        groups,
        found.tensors(groups),
        np.zeros(len(groups)),
        np.ones(len(groups)),
        {**train.named, "n": len(chosen), "n_standard": len(held_out)},
        base_sha256=base_fingerprint(model),
        precision=backend.config().get("precision"),
    )
    scores = GateScorer(gate).scores(torch.from_numpy(found.held_out)).double().numpy()
    centre, spread = standard(scores, groups)
    gate = replace(gate, centre=centre, spread=spread)
    return gate if calibration is None else calibrated(predictor, gate, calibration)


def calibrated(predictor: TablePredictor, gate: Gate, calibration: GateRows) -> Gate:
    """The gate with p-values from calibration rows, which nothing else may have been fitted or chosen on."""
    prepared = predictor.backend.prepare(calibration.rows, labelled=False, name=calibration.task or "calibration")
    densities = predictor.with_gate(GateScorer(gate)).densities(prepared, calibration.task or "calibration")
    known = Familiarity.fit(densities, predictor.backend.content_lengths(prepared))
    return replace(gate, familiarity=known, calibrated_on=calibration.named)


def _least() -> int:
    return int(np.ceil(LEAST_ROWS / (1 - _HELD_OUT)))


def _kind(kind: str, labels: Sequence[str] | None) -> str:
    if kind == "auto":
        return "class_gaussian" if labels is not None and len(labels) <= MOST_CLASSES else "gaussian"
    if kind not in KINDS:
        raise UserError(f"Unknown density {kind!r}; {nearest(kind, KINDS)}")
    if kind == "class_gaussian" and labels is None:
        raise UserError("class_gaussian needs fixed labels, and these rows bring options of their own: use gaussian")
    if kind == "class_gaussian" and len(labels or ()) > MOST_CLASSES:
        raise UserError(f"class_gaussian is for at most {MOST_CLASSES:,} labels, found {len(labels or ()):,}")
    return kind


def _choose(prepared: Any, keys: Sequence[bytes] | None, most: int) -> list[int]:
    """Row numbers in an order of their own, by a hash of their content: neither order nor processes matter."""
    names = [str(name).encode() for name in prepared["id"]] if keys is None else keys
    marks = [hashlib.blake2b(name, digest_size=16).digest() for name in names]
    return sorted(range(len(marks)), key=marks.__getitem__)[:most]


# --- one pass -------------------------------------------------------------------------------------------------------


class _ChosenRows:
    """Some of the prepared rows, by their number among these."""

    def __init__(self, rows: Any, numbers: Sequence[int]):
        self.rows, self.numbers = rows, list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.rows[self.numbers[index]]


class _Statistics:
    """What one pass keeps: moments, or rows for neighbours, and the features of the rows that standardise."""

    def __init__(self, kind: str, classes: int):
        self.kind, self.classes = kind, classes
        self.moments: Moments | None = None
        self.rows = KeptRows()
        self.kept: dict[int, np.ndarray] = {}  # row number → features [G, D]
        self.held_out: np.ndarray = np.empty((0, 0, 0))

    def add(self, features: np.ndarray, labels: np.ndarray, keys: Sequence[bytes]) -> None:
        if self.kind == "knn":
            self.rows.add(keys, features)
            return
        if self.moments is None:
            self.moments = Moments.empty(features.shape[1], features.shape[2], self.classes)
        if self.kind == "gaussian":
            self.moments.add(features)
        else:  # a row without a label belongs to no class
            self.moments.add(features[labels >= 0], labels[labels >= 0])

    def merge(self, accelerator: Any) -> None:
        """Count in what the other processes read."""
        world = accelerator.num_processes if accelerator is not None else 1
        for kept in gather(self.kept, world):
            self.kept |= kept
        self.held_out = np.stack([self.kept[number] for number in sorted(self.kept)])
        if self.kind == "knn":
            for rows in gather(self.rows, world):
                self.rows.merge(rows)
        elif world > 1:
            _, groups, size = self.held_out.shape
            own = self.moments or Moments.empty(groups, size, self.classes)
            # Summed by the processes' own means: gathering would hold a copy of each process's moments.
            parts = [torch.from_numpy(part).to(accelerator.device) for part in (own.counts, own.sums, own.second)]
            summed = [accelerator.reduce(part, reduction="sum").cpu().numpy() for part in parts]
            self.moments = Moments(*summed)

    def tensors(self, groups: Sequence[str]) -> dict[str, np.ndarray]:
        """The tensors of the gate."""
        if self.kind == "knn":
            return {"rows": self.rows.stacked().astype(np.float16)}
        assert self.moments is not None
        fitted = [Gaussian.fit(self.moments, number, name=name) for number, name in enumerate(groups)]
        return {
            "means": np.stack([each.means for each in fitted]).astype(np.float32),
            "components": np.stack([each.components for each in fitted]).astype(np.float32),
            "variances": np.stack([each.variances for each in fitted]).astype(np.float32),
            "rest": np.array([each.rest for each in fitted], dtype=np.float32),
        }


def _collect(
    predictor: TablePredictor, prepared: Any, chosen: list[int], held_out: frozenset[int], kind: str
) -> _Statistics:
    """One forward pass over the chosen rows."""
    backend = predictor.backend
    rows = _ChosenRows(prepared, chosen)
    keys, lengths = backend.row_keys(prepared), None
    order: Sequence[int] = range(len(rows))
    source: Any = rows
    if keys is not None:
        sizes = list(prepared["length"])
        joined = JoinedRows(
            [rows],
            [[keys[number] for number in chosen]],
            [[sizes[number] for number in chosen]],
            join=False,
            longest_first=not backend.packs,
        )
        source, lengths, order = joined, joined.lengths, [place for _, place in joined.places]
    labels, names = np.asarray(prepared["labels"]), list(prepared["id"])
    found = _Statistics(kind, len(backend.class_names or ()) if kind == "class_gaussian" else 1)
    problem: UserError | None = None
    for batch, features in predictor.pooled_states(source, lengths, "for the gate"):
        numbers = np.array([chosen[order[place]] for place in batch])
        try:
            unit = normalised(features, [names[number] for number in numbers])
        except UserError as error:  # the other processes wait for this one at the next batch
            problem = problem or error
            continue
        held = np.array([number in held_out for number in numbers])
        found.kept |= {int(number): row for number, row in zip(numbers[held], features[held], strict=True)}
        if not held.all():
            own = numbers[~held]
            marks = [hashlib.blake2b(f"{names[n]}".encode() if keys is None else keys[n]).digest() for n in own]
            found.add(unit[~held], labels[own], marks)
    world = predictor.accelerator.num_processes if predictor.accelerator is not None else 1
    for other in gather(None if problem is None else str(problem), world):
        if other is not None:
            raise UserError(other)
    found.merge(predictor.accelerator)
    return found
