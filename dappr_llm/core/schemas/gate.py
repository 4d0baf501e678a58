"""`gate.json`: the density beside a checkpoint's weights, whose tensors are in `gate.safetensors`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .types import Count, File, Name, Names, Natural, Number, Positive, Sha256

MOST_GROUPS = 64


class Standard(File):
    """Mean and standard deviation of each group's scores, on training rows that the density was not fitted on."""

    mean: Annotated[list[Number], Field(min_length=1, max_length=MOST_GROUPS)]
    std: Annotated[list[Positive], Field(min_length=1, max_length=MOST_GROUPS)]


class FittedRows(File):
    """Which rows a density was fitted on, and how many of them only standardise it."""

    task: Name | None = None
    split: Name | None = None
    n: Count
    n_standard: Count


class FamiliarityPart(File):
    """The calibration rows behind the p-values: bins of length, each up to its edge, and the rows of each."""

    task: Name | None = None
    split: Name | None = None
    n: Count
    edges: Annotated[list[Natural], Field(max_length=64)]
    counts: Annotated[list[Count], Field(min_length=1, max_length=65)]

    @model_validator(mode="after")
    def _one_more_bin_than_edges(self) -> FamiliarityPart:
        if len(self.counts) != len(self.edges) + 1 or sum(self.counts) != self.n:
            raise ValueError("edges, counts and n of the bins do not belong together")
        if sorted(set(self.edges)) != self.edges:
            raise ValueError("the edges of the bins do not rise")
        return self


class GateFile(File):
    """The whole file."""

    format_version: Literal[1]
    kind: Literal["gaussian", "class_gaussian", "knn"]
    groups: Annotated[Names, Field(min_length=1, max_length=MOST_GROUPS)]
    dimensions: Annotated[int, Field(ge=1, le=2**20)]
    standard: Standard
    fitted_on: FittedRows
    familiarity: FamiliarityPart | None = None
    weights_sha256: Sha256 | None = None
    base_sha256: Sha256 | None = None
    tensors_sha256: Sha256
    precision: Name | None = None
    checksum: Sha256

    @model_validator(mode="after")
    def _one_scale_per_group(self) -> GateFile:
        if not len(self.groups) == len(self.standard.mean) == len(self.standard.std):
            raise ValueError(f"{len(self.groups)} groups need as many means and standard deviations")
        return self
