"""`results.json`: metrics, their intervals and where they come from; and the tables of a sweep."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, with_config
from typing_extensions import Required, TypedDict

from .manifest import FileName
from .types import STRICT, File, Name, Natural, Options, Share, Text

SweepSeed = Annotated[int, Field(ge=0, lt=1000)]  # member i of an ensemble is trained with seed + 1000 i
Key = Annotated[str, Field(min_length=1, max_length=1000)]
Interval = Annotated[list[float | None], Field(min_length=2, max_length=2)]


class ResultsMeta(File):
    """Tasks, tables and origin of the metrics; anything else is kept as it is."""

    id: Name | None = None
    ood: list[Name] | None = None
    tables: dict[Name, FileName] | None = None
    method: Name | list[Name] | None = None
    command: Text | None = None
    baselines: dict[Name, dict[str, Any]] | None = None


class ClassEntry(File):
    """Metrics of one class; `predicted_as` is its row of the confusion matrix, by name of the predicted class."""

    name: Name
    support: Natural
    predicted: Natural
    precision: Share | None
    recall: Share | None
    f1: Share | None
    confidence: Share | None
    mean_prob: Share | None
    ece: Share | None
    intervals: dict[Literal["precision", "recall", "f1"], Interval]
    predicted_as: dict[Name, Natural]
    n_nan: Natural = 0


def _known_names(classes: list[ClassEntry]) -> list[ClassEntry]:
    names = {entry.name for entry in classes}
    for entry in classes:
        if unknown := set(entry.predicted_as) - names:
            raise ValueError(f"the class {entry.name!r} was predicted as {min(unknown)!r}, which is no class")
        if len(entry.intervals) != 3:
            raise ValueError(f"the class {entry.name!r} must have intervals of precision, recall and f1")
    return classes


class ResultsContent(File):
    """The whole file; metrics are fractions, `null` where undefined."""

    schema_version: Literal[1, 2] = 1
    meta: ResultsMeta
    results: dict[Key, float | None]
    intervals: dict[Key, Interval] = Field(default_factory=dict)
    classes: Annotated[list[ClassEntry], Field(max_length=100_000), AfterValidator(_known_names)] | None = None


@with_config(STRICT)
class SweepRow(TypedDict, total=False):
    """A row of a sweep's table file."""

    recipe: Required[Text]
    name: Name | None
    label: Text | None
    set: Options | None
    members: Annotated[int, Field(ge=1, le=1000)]
    weights_of: Name | None


@with_config(STRICT)
class SweepTable(TypedDict, total=False):
    """A table file of `dappr sweep`: methods x seeds."""

    name: Name | None
    description: Text
    seeds: Annotated[list[SweepSeed], Field(min_length=1, max_length=1000)] | None
    set: Options | None
    rows: Required[
        Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)] | SweepRow], Field(min_length=1)]
    ]
    output_dir: Text | None
