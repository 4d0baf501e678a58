"""`decision.json`: the decision rule beside a checkpoint's weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .types import File, Inside, Name, Natural, Number, Sha256, Share

# A temperature below 0 turns the order of the options around, and one near 0 makes every answer certain.
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 100.0
Temperature = Annotated[float, Field(ge=LEAST_TEMPERATURE, le=MOST_TEMPERATURE)]
Score = Literal["lac", "aps", "possibility"]
Options = Annotated[str, Field(pattern=r"^(all|[1-9][0-9]{0,6})$")]  # a number of options, or any number
Limit = Annotated[float, Field(ge=-1e-6, le=1e30)]  # scores begin at 0; rounding may put a quantile just below


class ConformalPart(File):
    """Thresholds of the prediction sets, by score and number of options; `null`: every option is in the set."""

    alpha: Inside
    score: Score
    thresholds: Annotated[
        dict[Score, Annotated[dict[Options, Limit | None], Field(min_length=1)]], Field(min_length=1)
    ]

    @model_validator(mode="after")
    def _complete(self) -> ConformalPart:
        if self.score not in self.thresholds:
            raise ValueError(f"it holds no thresholds for its own score {self.score}")
        for name, by_options in self.thresholds.items():
            if "all" not in by_options:
                raise ValueError(f"thresholds.{name} lacks the entry `all`")
        return self


class AbstentionPart(File):
    """The uncertainty above which the model abstains (`null`: always), and its risk on the calibration rows."""

    score: Literal["aleatoric", "epistemic"]
    threshold: Number | None
    risk: Share | None = None
    risk_bound: Share | None = None
    coverage: Share | None = None
    n_answered: Natural | None = None
    n_errors: Natural | None = None
    max_risk: Share | None = None
    min_coverage: Share | None = None
    confidence: Share | None = None


class CalibrationRows(File):
    """Which rows the rule was fitted on."""

    task: Name | None = None
    split: Name | None = None
    n: Natural | None = None
    n_fit: Natural | None = None
    hash: str | None = None


class DecisionFile(File):
    """The whole file."""

    format_version: Literal[1]
    temperature: Temperature
    conformal: ConformalPart
    abstention: AbstentionPart
    calibration_set: CalibrationRows
    fit: dict[Name, float | None]
    weights_sha256: Sha256 | None = None
    checksum: Sha256
