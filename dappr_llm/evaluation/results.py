"""The results file: one versioned JSON file that reports, model cards and sweeps read. See docs/results_schema.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.files import PathLike, write_text
from ..core.schemas import files
from ..core.schemas.results import ResultsContent
from .per_class import ClassMetrics

SCHEMA_VERSION = 2

Intervals = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class ResultsFile:
    """
    Content of a results file.

    Args:
        results (`dict`): Metrics by key, as fractions, never percent; NaN where undefined.
        meta (`dict`): Meta data: tasks, method, seed, versions, ...
        intervals (`dict`, *optional*): Lower and upper bounds by key; empty for files written without intervals.
        classes ([`ClassMetrics`], *optional*): Metrics of each class, for tasks with fixed classes.
    """

    results: dict[str, Any]
    meta: dict[str, Any]
    intervals: Intervals = field(default_factory=dict)
    classes: ClassMetrics | None = None


def save_results(
    results: Mapping[str, Any],
    meta: Mapping[str, Any],
    path: PathLike,
    intervals: Mapping[str, tuple[float, float]] | None = None,
    classes: ClassMetrics | None = None,
) -> None:
    """
    Writes a results file atomically.

    Args:
        results (`Mapping`): From [`evaluate_tables`]. NaN and Inf, which JSON lacks, become `null`.
        meta (`Mapping`): JSON-serialisable meta data of the run.
        path (`str` or `os.PathLike`): The file to write.
        intervals (`Mapping`, *optional*): From [`bootstrap`].
        classes ([`ClassMetrics`], *optional*): From [`class_metrics`].
    """
    content = {
        "schema_version": SCHEMA_VERSION,
        "meta": to_json(dict(meta)),
        "results": to_json(dict(results)),
        "intervals": to_json(dict(intervals or {})),
    }
    if classes is not None:
        content["classes"] = to_json(classes.to_list())
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def load_results(path: PathLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Reads metrics and meta data of a results file; see [`load_results_file`] for the intervals.

    Args:
        path (`str` or `os.PathLike`): The JSON file.

    Returns:
        `tuple`: `(results, meta)`; `null` among the results becomes NaN.
    """
    content = load_results_file(path)
    return content.results, content.meta


def load_results_file(path: PathLike) -> ResultsFile:
    """Reads a whole results file. Files without a version count as version 1; newer ones are refused."""
    content = files.load(ResultsContent, path, "run `dappr evaluate` again", SCHEMA_VERSION, "schema_version")
    results, meta, intervals = content["results"], content["meta"], content.get("intervals", {})
    return ResultsFile(
        {key: _number(value) for key, value in results.items()},
        meta,
        {key: (_number(low), _number(high)) for key, (low, high) in intervals.items()},
        ClassMetrics.from_list(content["classes"]) if content.get("classes") else None,
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def to_json(value: Any) -> Any:
    """Plain JSON values: numpy scalars as numbers, and `None` for NaN and Inf, which JSON lacks."""
    if isinstance(value, dict):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
