"""
The decision rule of a checkpoint, fitted on held-out predictions and saved in its folder as `decision.json`.

It has three parts: a temperature that calibrates probabilities, thresholds for conformal prediction sets, and a
threshold on an uncertainty above which the model abstains. This file applies it to arrays; `calibrate.py` fits it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.checkpoint import versions
from ..core.errors import UserError, nearest
from ..core.files import write_text
from ..core.schemas import files
from ..core.schemas.decision import DecisionFile
from . import conformal

FILE = "decision.json"
FORMAT_VERSION = 1
ABSTAIN_ON = ("aleatoric", "epistemic")


@dataclass(frozen=True)
class Decision:
    """
    Calibrated probabilities, prediction sets and abstention from a model's outputs; the content of `decision.json`.

    Args:
        temperature (`float`):
            T: probabilities become `p^(1/T)`, normalised; Dirichlet parameters are rescaled with `alpha0` unchanged.
        conformal (`dict`):
            `alpha`, the default `score`, and `thresholds` by score and number of options (`"all"`: any number);
            `null` means infinity, every option is in the set.
        abstention (`dict`):
            `score`, `threshold` (`null`: always abstain), and its `risk`, `risk_bound`, `coverage`, … on the
            calibration rows.
        calibration_set (`dict`):
            `task`, `split`, `n`, `hash`.
        fit (`dict`):
            NLL and ECE before and after temperature scaling, on rows that the temperature was not fitted on.
        weights_sha256 (`str`, *optional*):
            SHA-256 of the weights that the rule was fitted for.
    """

    temperature: float
    conformal: dict[str, Any]
    abstention: dict[str, Any]
    calibration_set: dict[str, Any]
    fit: dict[str, float]
    weights_sha256: str | None = None

    def save(self, folder: str | Path) -> Path:
        """Write `decision.json` into a folder, with a checksum of its content; returns its path."""
        content: dict[str, Any] = {"format_version": FORMAT_VERSION, **asdict(self), "versions": versions()}
        content["checksum"] = _checksum(content)
        path = Path(folder) / FILE
        write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
        return path

    @classmethod
    def load(cls, path: str | Path, weights_sha256: str | None = None) -> Decision:
        """
        Read a `decision.json`.

        Args:
            path (`str` or `Path`):
                The file, or the folder it is in.
            weights_sha256 (`str`, *optional*):
                SHA-256 of the weights it is used with; a rule that was fitted for other weights is refused.
        """
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        content = files.load(DecisionFile, path, "run `dappr calibrate` again", FORMAT_VERSION)
        if content.pop("checksum") != _checksum(content):
            raise UserError(
                f"{path} was changed after it was written (its checksum differs); run `dappr calibrate` again"
            )
        fitted_for = content.get("weights_sha256")
        if weights_sha256 and fitted_for and fitted_for != weights_sha256:
            raise UserError(
                f"{path} was fitted for other weights than those beside it (their hashes differ): the adapter was "
                "trained again or damaged; run `dappr calibrate` again, or load without a decision"
            )
        return cls(**{name: content[name] for name in cls.__dataclass_fields__ if name in content})

    def scale(
        self, probs: np.ndarray, alpha: np.ndarray | None, num_options: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Calibrated probabilities `[N, W]` and rescaled Dirichlet parameters; see [`scale`]."""
        return scale(probs, alpha, num_options, self.temperature)

    def sets(
        self,
        probs: np.ndarray,
        alpha: np.ndarray | None,
        num_options: np.ndarray,
        keys: Sequence[str],
        score: str | None = None,
        allow_empty: bool = False,
    ) -> np.ndarray:
        """
        Conformal prediction sets as a mask `[N, W]`.

        Args:
            probs, alpha (`np.ndarray` of shape `[N, W]`):
                Calibrated values from `scale`.
            num_options (`np.ndarray` of shape `[N]`):
                Options of each row.
            keys (`Sequence[str]`):
                A string per row that seeds the random fraction of the `"aps"` score.
            score (`str`, *optional*):
                One of the calibrated scores; by default `conformal["score"]`.
            allow_empty (`bool`, *optional*, defaults to `False`):
                Conformal sets may be empty if the accuracy exceeds `1 - alpha`. Unless allowed, the most probable
                option is added, which can only raise the coverage.
        """
        score = score or self.conformal["score"]
        known = self.conformal["thresholds"]
        if score not in known:
            raise UserError(f"This decision holds no thresholds for the score {score!r}; {nearest(score, known)}")
        limits = [known[score].get(str(count), known[score]["all"]) for count in num_options]
        values = np.array([math.inf if limit is None else limit for limit in limits])[:, None]
        scores = conformal.option_scores(score, probs, alpha, num_options, conformal.uniform_numbers(keys))
        chosen = (scores <= values) & np.isfinite(scores)
        if not allow_empty:
            chosen[np.arange(len(probs)), probs.argmax(axis=1)] = True
        return chosen

    def abstain(self, probs: np.ndarray, epistemic: np.ndarray) -> np.ndarray:
        """Mask `[N]` of the rows to abstain on: uncertainty above the threshold, or NaN."""
        score = abstention_score(self.abstention["score"], probs, epistemic)
        limit = self.abstention["threshold"]
        return np.ones(len(score), dtype=bool) if limit is None else ~(score <= limit)


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps({k: v for k, v in content.items() if k != "checksum"}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def scale(
    probs: np.ndarray, alpha: np.ndarray | None, num_options: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray | None]:
    """
    Apply a temperature to predicted probabilities.

    For cross-entropy this equals dividing the logits by `temperature`. Of a Dirichlet it changes the mean only:
    labels say whether probabilities are calibrated, but not how much evidence there should be, so `alpha0` (and with
    it `K/alpha0`) is kept.

    Args:
        probs (`np.ndarray` of shape `[N, W]`):
            Probabilities, padded to the largest number of options W.
        alpha (`np.ndarray` of shape `[N, W]`, *optional*):
            Dirichlet parameters, for methods that have them.
        num_options (`np.ndarray` of shape `[N]`):
            Options of each row: its first `num_options` columns.
        temperature (`float`):
            T. Above 1 it flattens the distribution, below 1 it sharpens it.

    Returns:
        `p^(1/T)` normalised over each row's options, and `alpha0` times these probabilities (`None` without `alpha`);
        both 0 in the padding columns.
    """
    own = np.arange(probs.shape[1]) < np.asarray(num_options)[:, None]
    logs = np.where(own, np.log(np.maximum(np.asarray(probs, dtype=np.float64), 1e-300)) / temperature, -np.inf)
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    scaled = weights / weights.sum(axis=1, keepdims=True)
    if alpha is None:
        return scaled, None
    alpha0 = np.where(own, np.asarray(alpha, dtype=np.float64), 0.0).sum(axis=1, keepdims=True)
    # alpha must stay positive for the row's options, even where the power underflows.
    return scaled, np.where(own, np.maximum(alpha0 * scaled, 1e-12), 0.0)


def abstention_score(name: str, probs: np.ndarray, epistemic: np.ndarray) -> np.ndarray:
    """The uncertainty `[N]` to compare with the threshold: `"aleatoric"` (1 - max p, calibrated) or `"epistemic"`."""
    if name == "epistemic":
        return np.asarray(epistemic, dtype=np.float64)
    if name == "aleatoric":
        return probs.sum(axis=1) - probs.max(axis=1)
    raise UserError(f"Unknown abstention score {name!r}; {nearest(name, ABSTAIN_ON)}")
