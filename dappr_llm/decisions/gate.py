"""The gate of a checkpoint: a density of its hidden states and their familiarity, as two files in its folder."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.checkpoint import sha256, versions
from ..core.errors import UserError
from ..core.files import atomic_write, write_text
from ..core.schemas import files
from ..core.schemas.gate import GateFile
from .familiarity import Familiarity

FILE, TENSORS = "gate.json", "gate.safetensors"
FORMAT_VERSION = 1
CURE = "run `dappr gate` again, or load without it (gate=False, --no-gate)"
_LIMIT = 2**32  # bytes of the tensors
# Names and dimensions of the tensors by kind: groups, classes or rows, dimensions, rank.
_SHAPES = {
    "gaussian": {"means": "gcd", "components": "gdr", "variances": "gr", "rest": "g"},
    "class_gaussian": {"means": "gcd", "components": "gdr", "variances": "gr", "rest": "g"},
    "knn": {"rows": "gcd"},
}
_CALIBRATION = "calibration"


@dataclass(frozen=True)
class Gate:
    """
    A fitted density.

    Args:
        kind (`str`):
            `"gaussian"`, `"class_gaussian"` or `"knn"`.
        groups (`tuple[str, ...]`):
            Names of the hidden states that it reads, in their order.
        tensors (`dict`):
            `means` `[G, C, D]`, `components` `[G, D, R]`, `variances` `[G, R]` and `rest` `[G]`; of neighbours `rows`
            `[G, R, D]`.
        centre, spread (`np.ndarray` of shape `[G]`):
            What standardises the groups' scores.
        fitted_on (`dict`):
            `task`, `split`, `n`, `n_standard`.
        familiarity (`Familiarity`, *optional*):
            Calibration densities; without them there is a density, but no p-value.
        calibrated_on (`dict`, *optional*):
            `task` and `split` of the calibration rows.
        weights_sha256, base_sha256, precision (`str`, *optional*):
            The weights that it belongs to: hashes of their file and of small parameters of the base model, the dtype.
    """

    kind: str
    groups: tuple[str, ...]
    tensors: dict[str, np.ndarray]
    centre: np.ndarray
    spread: np.ndarray
    fitted_on: dict[str, Any]
    familiarity: Familiarity | None = None
    calibrated_on: dict[str, Any] | None = None
    weights_sha256: str | None = None
    base_sha256: str | None = None
    precision: str | None = None

    @property
    def dimensions(self) -> int:
        """D, the width of a hidden state."""
        return next(iter(self.tensors.values())).shape[2 if self.kind == "knn" else -1]

    def p_values(self, densities: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """The familiarity `[N]` of rows from their densities and lengths; `None` if there is no calibration."""
        return None if self.familiarity is None else self.familiarity.p_values(densities, lengths)

    def save(self, folder: str | Path) -> Path:
        """Write the two files into a folder; returns the path of `gate.json`."""
        from safetensors.numpy import save

        folder = Path(folder)
        tensors = {name: np.ascontiguousarray(values) for name, values in self.tensors.items()}
        known = self.familiarity
        part = None
        if known is not None:
            tensors[_CALIBRATION] = np.concatenate(known.densities)
            counts = [len(each) for each in known.densities]
            part = {**(self.calibrated_on or {}), "n": known.count, "edges": list(known.edges), "counts": counts}
        written = save(tensors)
        content: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "groups": list(self.groups),
            "dimensions": int(self.dimensions),
            "standard": {"mean": self.centre.tolist(), "std": self.spread.tolist()},
            "fitted_on": self.fitted_on,
            "familiarity": part,
            "weights_sha256": self.weights_sha256,
            "base_sha256": self.base_sha256,
            "precision": self.precision,
            "tensors_sha256": hashlib.sha256(written).hexdigest(),
            "versions": versions(),
        }
        content["checksum"] = _checksum(content)
        # A gate whose second file was not written is noticed by its hash.
        with atomic_write(folder / TENSORS) as handle:
            handle.write(written)
        write_text(folder / FILE, json.dumps(content, indent=2, allow_nan=False) + "\n")
        return folder / FILE

    @classmethod
    def load(cls, folder: str | Path, weights_sha256: str | None = None) -> Gate:
        """
        Read the gate of a checkpoint.

        Args:
            folder (`str` or `Path`):
                The checkpoint.
            weights_sha256 (`str`, *optional*):
                SHA-256 of its weights; a gate that was fitted for others is refused.
        """
        path, place = Path(folder) / FILE, Path(folder) / TENSORS
        content = files.load(GateFile, path, CURE, FORMAT_VERSION)
        if content.pop("checksum") != _checksum(content):
            raise UserError(f"{path} was changed after it was written (its checksum differs); {CURE}")
        fitted_for = content.get("weights_sha256")
        if weights_sha256 and fitted_for and fitted_for != weights_sha256:
            raise UserError(
                f"{path} was fitted for other weights than those beside it (their hashes differ): the adapter was "
                f"trained again or damaged; {CURE}"
            )
        if not place.is_file() or os.path.getsize(place) > _LIMIT or sha256(place) != content["tensors_sha256"]:
            raise UserError(f"{place} is missing or damaged (its hash is not the one in {FILE}); {CURE}")
        tensors, calibration = _read_tensors(place, content)
        part = content.get("familiarity")
        familiarity = None
        if part is not None:
            pieces = np.split(calibration, np.cumsum(part["counts"])[:-1])
            familiarity = Familiarity(tuple(part["edges"]), tuple(pieces))
        return cls(
            content["kind"],
            tuple(content["groups"]),
            tensors,
            np.array(content["standard"]["mean"]),
            np.array(content["standard"]["std"]),
            content["fitted_on"],
            familiarity,
            None if part is None else {key: part[key] for key in ("task", "split") if key in part},
            fitted_for,
            content.get("base_sha256"),
            content.get("precision"),
        )

    def bound(self, weights_sha256: str | None) -> Gate:
        """The same gate, bound to the weights of a checkpoint."""
        return replace(self, weights_sha256=weights_sha256)

    def difference(self, groups: tuple[str, ...], base_sha256: str | None, precision: str | None) -> str | None:
        """Why this gate does not fit a model that was loaded; `None` if it does."""
        if groups != self.groups:
            return "it reads other layers than this model has"
        if None not in (self.base_sha256, base_sha256) and self.base_sha256 != base_sha256:
            return "it was fitted with another base model"
        if None not in (self.precision, precision) and self.precision != precision:
            return f"it was fitted in {self.precision}, and the model is loaded in {precision}"
        return None


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps({k: v for k, v in content.items() if k != "checksum"}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_tensors(path: Path, content: dict[str, Any]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors by name, and the calibration densities, in the shapes that `gate.json` says."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(path)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}); {CURE}") from None
    calibration = found.pop(_CALIBRATION, np.empty(0))
    sizes: dict[str, int] = {"g": len(content["groups"]), "d": content["dimensions"]}
    for name, letters in _SHAPES[content["kind"]].items():
        values = found.get(name)
        good = values is not None and values.ndim == len(letters) and values.dtype.kind == "f" and values.size > 0
        if (
            values is None
            or not good
            or any(size != sizes.setdefault(letter, size) for letter, size in zip(letters, values.shape, strict=True))
        ):
            raise UserError(f"{path} is damaged (its {name} has not the shape that {FILE} says); {CURE}")
        if not np.isfinite(values).all() or (name in ("variances", "rest") and not (values > 0).all()):
            raise UserError(
                f"{path} is damaged (its {name} holds NaN, Inf or variances that are not positive); {CURE}"
            )
    part = content.get("familiarity")
    if part is not None and (calibration.shape != (part["n"],) or not np.isfinite(calibration).all()):
        raise UserError(f"{path} is damaged (its calibration densities are not {part['n']} numbers); {CURE}")
    return {name: found[name] for name in _SHAPES[content["kind"]]}, calibration
