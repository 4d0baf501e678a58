"""Prediction tables: a model's outputs for every item of a task, as numpy arrays; evaluation needs no torch.

An item offers `num_options` options, which stand behind the first answer letters A, B, C, …; for images the classes
take the place of letters. The model's outputs are stored once over `width` W letters: the larger of the K letters it
was trained on and the most options of any item of the task. A *reading* restricts them to fewer letters ("slots"):
columns of `alpha` for Dirichlet methods, renormalised columns of the probabilities (of each member) for the others.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..core.archives import id_array, load_npz
from ..core.errors import UserError
from ..core.files import PathLike, atomic_write, parse_json

_META_LIMIT = 2**22  # characters of the meta data
_REQUIRED = ("ids", "labels", "num_options", "probs", "aleatoric", "epistemic", "meta")
_PER_ROW = ("density", "familiarity", "lengths", "option_lengths", "text_distance")  # optional, [N]
_ARRAYS = (*_REQUIRED, "alpha", "members", "logits", *_PER_ROW)
_INTEGERS = ("labels", "num_options", "lengths", "option_lengths")


def entropy(probs: np.ndarray) -> np.ndarray:
    """Shannon entropy in nats over the last axis, with 0 log 0 = 0."""
    probs = np.asarray(probs, dtype=np.float64)
    return -(probs * np.log(probs, out=np.zeros_like(probs), where=probs > 0)).sum(axis=-1)


@dataclass(frozen=True)
class Reading:
    """A table restricted to some of its W answer letters; all others have probability (and alpha) 0."""

    probs: np.ndarray  # [N, W]
    alpha: np.ndarray | None  # [N, W]
    aleatoric: np.ndarray  # [N]
    epistemic: np.ndarray  # [N]
    num_options: np.ndarray  # [N], the number of letters read
    logits: np.ndarray | None = None  # [N, W], -inf for letters that are not read


@dataclass(eq=False)
class PredictionTable:
    """
    The predictions of one model (or ensemble) for N items over W answer letters or classes.

    Args:
        ids (`np.ndarray` of shape `[N]`): Unique item names.
        labels (`np.ndarray` of shape `[N]`): Correct options; -1 means unknown.
        num_options (`np.ndarray` of shape `[N]`): How many options each item itself offers, between 2 and W.
        probs (`np.ndarray` of shape `[N, W]`): Probabilities over all W letters; rows sum to 1.
        aleatoric (`np.ndarray` of shape `[N]`): Aleatoric uncertainty over each item's own options.
        epistemic (`np.ndarray` of shape `[N]`): Epistemic uncertainty over each item's own options.
        alpha (`np.ndarray` of shape `[N, W]`, *optional*): Dirichlet parameters, for methods that have them.
        members (`np.ndarray` of shape `[M, N, W]`, *optional*): Probabilities of M stochastic passes or members.
        logits (`np.ndarray` of shape `[N, W]`, *optional*):
            What the model returned before the method turned it into probabilities or alpha; -inf is allowed.
        density (`np.ndarray` of shape `[N]`, *optional*):
            How typical each input is of the training rows, on any scale such as a log-density; larger is more typical.
        familiarity (`np.ndarray` of shape `[N]`, *optional*):
            The density as a p-value in (0, 1]: the share of rows like the training rows that are at most as typical.
        lengths (`np.ndarray` of shape `[N]`, *optional*): Tokens of each question or text, as it was written.
        option_lengths (`np.ndarray` of shape `[N]`, *optional*): Tokens of all options together; 0 without options.
        text_distance (`np.ndarray` of shape `[N]`, *optional*):
            Cosine distance, 0 to 1, between the TF-IDF vectors of the item and of the nearest training row.
        meta (`dict`, *optional*):
            JSON-serialisable meta data: `task`, `split`, `method`, `checkpoint`, `seed`, `num_choices` (K, the letters
            the model was trained on), `task_num_choices` (the most options of an item of the task), `letters`,
            `versions`, ... `epistemic_scale` (default 1.0) multiplies K/alpha0.
        allow_nan (`bool`, *optional*, defaults to `False`):
            Accept rows with NaN or Inf, which evaluation ranks as most uncertain. Not stored in the file.
    """

    ids: np.ndarray
    labels: np.ndarray
    num_options: np.ndarray
    probs: np.ndarray
    aleatoric: np.ndarray
    epistemic: np.ndarray
    alpha: np.ndarray | None = None
    members: np.ndarray | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    allow_nan: bool = field(default=False, repr=False)
    logits: np.ndarray | None = None
    density: np.ndarray | None = None
    familiarity: np.ndarray | None = None
    lengths: np.ndarray | None = None
    option_lengths: np.ndarray | None = None
    text_distance: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.ids = id_array(self.ids)
        for name in set(_ARRAYS) - {"ids", "meta"}:
            if getattr(self, name) is not None:
                setattr(self, name, _as_numbers(name, getattr(self, name)))
        if not isinstance(self.meta, dict):
            raise UserError(f"meta must be a JSON object, not {type(self.meta).__name__}.")
        # A JSON round trip, so that a table in memory equals the same table loaded from disk.
        try:
            self.meta = json.loads(json.dumps(self.meta, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"meta must be plain JSON: {error}.") from None
        self.validate()

    @classmethod
    def from_arrays(
        cls,
        ids: Sequence[str] | np.ndarray,
        labels: Sequence[int] | np.ndarray | None = None,
        probs: np.ndarray | None = None,
        *,
        num_options: Sequence[int] | np.ndarray | None = None,
        aleatoric: np.ndarray | None = None,
        epistemic: np.ndarray | None = None,
        alpha: np.ndarray | None = None,
        members: np.ndarray | None = None,
        meta: dict[str, Any] | None = None,
        allow_nan: bool = False,
        **optional: Any,
    ) -> PredictionTable:
        """
        Builds a table and derives the arrays that are not given.

        The arguments are those of [`PredictionTable`], the optional arrays included. `probs` defaults to alpha/alpha0
        or to the mean of the members, `labels` to -1 (unknown), `num_options` to W, and the uncertainties to those of
        [`~PredictionTable.reading`].
        """
        if probs is None and alpha is not None:
            probs = np.asarray(alpha, dtype=np.float64)
            with np.errstate(invalid="ignore"):
                probs = probs / probs.sum(axis=-1, keepdims=True)
        elif probs is None and members is not None:
            probs = np.asarray(members, dtype=np.float64).mean(axis=0)
        elif probs is None:
            raise UserError("A prediction table needs probs, alpha or members.")
        probs, rows = np.asarray(probs), len(ids)
        table = cls(
            ids=id_array(ids),
            labels=np.full(rows, -1) if labels is None else np.asarray(labels),
            num_options=np.full(rows, probs.shape[-1]) if num_options is None else np.asarray(num_options),
            probs=probs,
            aleatoric=np.zeros(rows) if aleatoric is None else aleatoric,
            epistemic=np.zeros(rows) if epistemic is None else epistemic,
            alpha=alpha,
            members=members,
            meta=meta or {},
            allow_nan=allow_nan,
            **optional,
        )
        derived = table._derive(table.num_options)
        table.aleatoric = derived.aleatoric if aleatoric is None else table.aleatoric
        table.epistemic = derived.epistemic if epistemic is None else table.epistemic
        return table

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def width(self) -> int:
        """W, the number of answer letters or classes stored."""
        return self.probs.shape[1]

    @property
    def nan_rows(self) -> np.ndarray:
        """Mask `[N]` of the rows that hold NaN or Inf in any array."""
        bad = ~(np.isfinite(self.aleatoric) & np.isfinite(self.epistemic) & np.isfinite(self.probs).all(axis=1))
        if self.alpha is not None:
            bad |= ~np.isfinite(self.alpha).all(axis=1)
        if self.members is not None:
            bad |= ~np.isfinite(self.members).all(axis=(0, 2))
        if self.logits is not None:  # -inf is a probability of 0, and can be meant
            bad |= ~(self.logits < np.inf).all(axis=1)
        for values in (self.density, self.familiarity, self.text_distance):
            if values is not None:
                bad |= ~np.isfinite(values)
        return bad

    def validate(self) -> None:
        """Checks shapes and values of all arrays; a `UserError` names the first defect."""
        self._validate_shapes()
        unique, first = np.unique(self.ids, return_index=True)
        if len(unique) < len(self):
            raise UserError(f"ids must be unique, but {np.delete(self.ids, first)[0]} appears more than once.")
        bad = self.nan_rows
        if bad.any() and not self.allow_nan:
            named = ", ".join(self.ids[bad][:3])
            raise UserError(f"{bad.sum()} of {len(self)} rows hold NaN or Inf (first: {named}); see `allow_nan`.")
        wrong = {
            f"num_options is not between 2 and {self.width}": (self.num_options < 2) | (self.num_options > self.width),
            "the label is not one of the item's own options": (self.labels < -1) | (self.labels >= self.num_options),
            "probs are negative or do not sum to 1": ~bad & _not_probabilities(self.probs),
        }
        if self.alpha is not None:
            wrong["alpha is not positive"] = (self.alpha <= 0).any(axis=1)
        if self.members is not None:
            wrong["members are negative or do not sum to 1"] = ~bad & _not_probabilities(self.members).any(axis=0)
        if self.familiarity is not None:
            wrong["the familiarity is not above 0 and at most 1"] = (self.familiarity <= 0) | (self.familiarity > 1)
        for name in ("lengths", "option_lengths"):
            if getattr(self, name) is not None:
                wrong[f"{name} is negative"] = getattr(self, name) < 0
        for reason, rows in wrong.items():
            if rows.any():
                raise UserError(f"In {rows.sum()} of {len(self)} rows {reason} (first: {self.ids[rows][0]}).")

    def _validate_shapes(self) -> None:
        if self.ids.ndim != 1 or self.probs.ndim != 2:
            raise UserError(f"ids must be [N] and probs [N, W], not {self.ids.shape} and {self.probs.shape}.")
        rows, width = len(self.ids), self.width
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(("probs", "alpha", "logits"), (rows, width))
        expected |= dict.fromkeys(("labels", "num_options", "aleatoric", "epistemic", *_PER_ROW), (rows,))
        if self.members is not None:
            expected["members"] = (max((1, *self.members.shape[:1])), rows, width)
        for name, shape in expected.items():
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise UserError(f"{name} has shape {array.shape}, but the other arrays call for {shape}.")

    def reading(self, slots: str | int = "own") -> Reading:
        """
        Restricts the table to some of its answer letters.

        Args:
            slots (`str` or `int`, *optional*, defaults to `"own"`):
                `"own"`: the `num_options` letters of each item. An integer k: the first k letters for every item,
                whether it offers more or fewer options.

        Returns:
            [`Reading`]: With alpha: p = alpha/alpha0, aleatoric 1 - max p, epistemic `epistemic_scale` * k/alpha0.
            With members: their mean p, aleatoric 1 - max p, epistemic the mutual information. Otherwise: aleatoric
            1 - max p, epistemic the entropy. Where the letters read are each item's own, the stored uncertainties are
            returned, so that a method's own definition is kept.
        """
        counts = self.num_options
        if slots != "own":
            if not isinstance(slots, int | np.integer) or not 2 <= slots <= self.width:
                raise UserError(f"slots must be 'own' or a number of letters from 2 to {self.width}, not {slots!r}.")
            counts = np.full(len(self), slots, dtype=np.int64)
        derived = self._derive(counts)
        same = np.array_equal(counts, self.num_options)
        # Adding NaN marks every value of an invalid row; an infinite alpha0 would count as perfectly certain.
        invalid = np.where(self.nan_rows, np.float32("nan"), np.float32(0))
        return Reading(
            probs=(self.probs if (counts == self.width).all() else derived.probs) + invalid[:, None],
            alpha=derived.alpha,
            aleatoric=(self.aleatoric if same else derived.aleatoric) + invalid,
            epistemic=(self.epistemic if same else derived.epistemic) + invalid,
            num_options=counts,
            logits=derived.logits,
        )

    @np.errstate(invalid="ignore")
    def _derive(self, counts: np.ndarray) -> Reading:
        """The reading of each row on its first `counts` `[N]` letters, computed from alpha, members or probs."""
        # float64 throughout: 1 - max p keeps its resolution where a float32 max p rounds to 1.
        keep = np.arange(self.width) < counts[:, None]  # [N, W]
        alpha = None
        if self.alpha is not None:
            alpha = np.where(keep, self.alpha.astype(np.float64), 0.0)
            alpha0 = alpha.sum(axis=-1)
            probs = alpha / alpha0[:, None]
            epistemic = float(self.meta.get("epistemic_scale", 1.0)) * counts / alpha0
        elif self.members is not None:
            members = renormalise(self.members, keep)  # [M, N, W]
            probs = members.mean(axis=0)
            epistemic = np.maximum(entropy(probs) - entropy(members).mean(axis=0), 0.0)
        else:
            probs = renormalise(self.probs, keep)
            epistemic = entropy(probs)
        return Reading(
            probs=probs.astype(np.float32),
            alpha=None if alpha is None else alpha.astype(np.float32),
            aleatoric=(1.0 - probs.max(axis=-1)).astype(np.float32),
            epistemic=epistemic.astype(np.float32),
            num_options=counts,
            logits=None if self.logits is None else np.where(keep, self.logits, -np.inf),
        )

    def select(self, indices: Sequence[int] | np.ndarray) -> PredictionTable:
        """Returns the table of the given rows, by integer indices or by a boolean mask."""
        indices = np.asarray(indices, dtype=None if len(indices) else np.int64)
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        for name in set(_ARRAYS) - {"meta", "members"}:
            arrays[name] = None if arrays[name] is None else arrays[name][indices]
        arrays["members"] = None if self.members is None else self.members[:, indices]
        return PredictionTable(**arrays, allow_nan=self.allow_nan)

    def save(self, path: PathLike) -> None:
        """Writes the table to one `.npz` file, which numpy can read without pickle."""
        arrays = {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}
        arrays["meta"] = np.array(json.dumps(self.meta, allow_nan=False))
        with atomic_write(path) as handle:
            np.savez_compressed(handle, **arrays)

    @classmethod
    def load(cls, path: PathLike, allow_nan: bool = False) -> PredictionTable:
        """Reads a table that [`~PredictionTable.save`] wrote; a `UserError` names the file and its defect."""
        if not Path(path).is_file():
            raise UserError(f"There is no prediction table at {path}.")
        try:
            # Checked first: numpy would treat any other file as a pickle and suggest to load it unsafely.
            if not zipfile.is_zipfile(path):
                raise UserError("it is not a complete .npz archive")
            arrays: dict[str, Any] = load_npz(path, _ARRAYS)
            missing = [name for name in _REQUIRED if name not in arrays]
            if missing:
                raise UserError(f"it holds no array named {', '.join(missing)}")
            if arrays["meta"].nbytes > 4 * _META_LIMIT:  # UTF-32
                raise UserError(f"its meta data have more than {_META_LIMIT:,} characters")
            arrays["meta"] = parse_json(str(arrays["meta"]), allow_nan=True)
            return cls(**arrays, allow_nan=allow_nan)
        # A damaged archive can raise different exceptions from zipfile, zlib, numpy's header parser and json.
        except Exception as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise UserError(f"{path} is not a readable prediction table: {reason}.") from error

    def to_parquet(self, path: PathLike) -> None:
        """Exports the table to Parquet, one row per item, with `meta` as JSON in the schema's metadata."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise UserError("Exporting to Parquet needs pyarrow: pip install pyarrow.") from error
        columns = {}
        for name in set(_ARRAYS) - {"meta"}:
            if (array := getattr(self, name)) is not None:
                array = array.transpose(1, 0, 2) if name == "members" else array
                columns[name] = pa.array(array.reshape(-1))
                for size in array.shape[:0:-1]:
                    columns[name] = pa.FixedSizeListArray.from_arrays(columns[name], size)
        table = pa.table({name: columns[name] for name in _ARRAYS if name in columns})
        with atomic_write(path) as handle:
            pq.write_table(table.replace_schema_metadata({"meta": json.dumps(self.meta, allow_nan=False)}), handle)


def _as_numbers(name: str, values: ArrayLike) -> np.ndarray:
    array, integers = np.asarray(values), name in _INTEGERS
    # A silent cast would turn the label 0.9 into 0.
    if array.size and array.dtype.kind not in ("iu" if integers else "fiu"):
        raise UserError(f"{name} must be {'integers' if integers else 'real numbers'}, not {array.dtype}.")
    return array.astype(np.int64 if integers else np.float32)


def _not_probabilities(probs: np.ndarray) -> np.ndarray:
    return (np.abs(probs.sum(axis=-1) - 1) > 1e-3) | (probs < 0).any(axis=-1)


def renormalise(probs: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Probabilities `[..., N, W]`, renormalised over the letters in the mask `keep` `[N, W]`, in float64."""
    kept = np.where(keep, probs.astype(np.float64), 0.0)
    # A float32 softmax can underflow to 0 on all letters kept; they then get equal probabilities.
    kept = np.where(kept.sum(axis=-1, keepdims=True) == 0, keep, kept)
    return kept / kept.sum(axis=-1, keepdims=True)


def id_and_ood(tables: Mapping[str, PredictionTable]) -> tuple[PredictionTable, dict[str, PredictionTable]]:
    """Splits tables by task, of which the first is in distribution, into the ID table and the OOD tables by task."""
    (_, id_table), *ood = tables.items()
    return id_table, dict(ood)
