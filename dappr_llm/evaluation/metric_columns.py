"""
Every metric once: its key, how tables head and show it, its direction, where it applies and what computes it.

A new metric of the answers is one `Metric` in `METRICS` and one function in `metrics.py`; results files, intervals,
reports and model cards follow. Imports nothing, so that configurations can ask for a direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Which letters or score ranked the items of a detection metric: suffix of the key → words of the header. The matched
# and the published reading keep every detection metric, the others AUROC alone.
MATCHED, PUBLISHED = "", "_published"
READINGS = {
    MATCHED: "matched",
    PUBLISHED: "published",
    "_max_prob": "max prob",
    "_entropy": "entropy",
    "_mutual_information": "mutual information",
}


@dataclass(frozen=True)
class Metric:
    """
    What is known about one metric.

    Args:
        key (`str`): Last part of its key in a results file.
        header (`str`): Head of its column.
        description (`str`): Its name in full, as model cards say it.
        kind (`str`): How values are shown: `"percent"`, `"plain"` or `"count"`.
        larger_is_better (`bool`, *optional*): `None` where there is no better.
        inputs (`tuple[str, ...]`): What its function takes, in order: keys of `evaluators.answer_rows`. Empty for
            detection metrics, which `metrics.ood_scores` computes together, and for counts.
        function (`str`): Its function in `metrics.py`, if not called like the key.
        weighted (`bool`): The function also takes `weights` `[R, N]`, how often each row counts in each of R
            resamples, and then returns `[R]`. Otherwise the bootstrap calls it once per resample, on repeated rows.
        hub (`str`, *optional*): The Hub's name of the metric; without one, model cards leave it out.
        headline (`bool`): Stands in the report's first tables, not in those further down.
        binned (`bool`): A binned error, which grows in a resample: see `bootstrap.bootstrap`.
        estimate (`bool`): Whether it has an interval.
        id, shifted, detection (`bool`): Whether it is computed for answers in distribution, for answers under shift,
            and for telling out-of-distribution items apart.
    """

    key: str
    header: str
    description: str
    kind: str = "percent"
    larger_is_better: bool | None = True
    inputs: tuple[str, ...] = ()
    function: str = ""
    weighted: bool = False
    hub: str | None = None
    headline: bool = True
    binned: bool = False
    estimate: bool = True
    id: bool = True
    shifted: bool = False
    detection: bool = False


@dataclass(frozen=True)
class Column:
    """A metric in one reading, as a column of a table."""

    key: str
    metric: Metric
    reading: str = ""

    @property
    def kind(self) -> str:
        """How its values are shown."""
        return self.metric.kind

    @property
    def header(self) -> str:
        """Metric and reading in one line."""
        if not self.reading:
            return self.metric.header
        return f"{self.metric.header}{', ' if ',' in self.metric.header else ' '}{self.reading}"


_ANSWERS = ("probs", "labels")
_BINS = ("confidence", "correct")
_RANKED = ("correct", "aleatoric")

# In the order of the report's columns.
METRICS = (
    Metric("accuracy", "accuracy", "Accuracy", inputs=_ANSWERS, hub="accuracy", shifted=True),
    Metric("macro_f1", "macro F1", "F1 score, unweighted mean over classes", inputs=_ANSWERS, weighted=True, hub="f1"),
    Metric(
        "nll", "NLL", "Negative log-likelihood", "plain", False, inputs=_ANSWERS, hub="nll", shifted=True
    ),
    Metric("brier", "Brier", "Brier score", "plain", False, inputs=_ANSWERS, hub="brier_score", shifted=True),
    Metric(
        "ece", "ECE", "Expected calibration error, 15 bins", larger_is_better=False, inputs=_BINS, binned=True,
        hub="expected_calibration_error", shifted=True,
    ),
    Metric(
        "ece_floor", "ECE floor", "Expected calibration error of a calibrated model of this size",
        larger_is_better=None, inputs=("confidence",), estimate=False, shifted=True,
    ),
    Metric(
        "ece_equal_mass", "ECE equal mass", "Calibration error over 15 bins of equally many items",
        larger_is_better=False, inputs=_BINS, function="equal_mass_ece", binned=True, headline=False,
    ),
    Metric(
        "ece_classwise", "ECE classwise", "Calibration error of each option's probability, mean over options",
        larger_is_better=False, inputs=(*_ANSWERS, "num_options"), function="classwise_ece", binned=True,
        headline=False,
    ),
    Metric(
        "mce", "MCE", "Largest calibration gap of a bin", larger_is_better=False, inputs=_BINS, binned=True,
        headline=False,
    ),
    Metric(
        "conf_auroc", "conf. AUROC", "AUROC of right against wrong answers by aleatoric uncertainty",
        inputs=_RANKED, function="confidence_auroc",
    ),
    Metric(
        "conf_aupr", "conf. AUPR", "AUPR of right against wrong answers by aleatoric uncertainty",
        inputs=_RANKED, function="confidence_aupr", hub="average_precision",
    ),
    Metric("aurc", "AURC", "Area under the risk-coverage curve", "plain", False, inputs=_RANKED),
    Metric(
        "excess_aurc", "excess AURC", "Area under the risk-coverage curve above that of a perfect ranking",
        "plain", False, inputs=_RANKED, headline=False,
    ),
    Metric(
        "risk_at_coverage_80", "risk at 80 % coverage", "Share of wrong answers among the surest 80 %",
        larger_is_better=False, inputs=_RANKED, function="risk_at_coverage", headline=False,
    ),
    Metric(
        "coverage_at_risk_5", "coverage at 5 % risk", "Largest share answered with at most 5 % wrong",
        inputs=_RANKED, function="coverage_at_risk", headline=False,
    ),
    Metric(
        "auroc", "AUROC", "AUROC of in- against out-of-distribution items by epistemic uncertainty",
        hub="roc_auc", id=False, detection=True,
    ),
    Metric(
        "aupr", "AUPR", "AUPR of in- against out-of-distribution items by epistemic uncertainty",
        hub="average_precision", id=False, detection=True,
    ),
    Metric(
        "fpr95", "FPR95", "Share of out-of-distribution items accepted when 95 % of the others are",
        larger_is_better=False, id=False, detection=True,
    ),
    Metric(
        "aupr_ood", "AUPR, OOD positive", "AUPR of out- against in-distribution items by epistemic uncertainty",
        headline=False, id=False, detection=True,
    ),
    Metric("n", "n", "Items", "count", None, estimate=False, shifted=True),
)  # fmt: skip

BY_KEY = {metric.key: metric for metric in METRICS}
ANSWERS = tuple(metric for metric in METRICS if metric.inputs)
SHIFTED = tuple(metric for metric in ANSWERS if metric.shifted)
DETECTION = tuple(metric for metric in METRICS if metric.detection)
LOWER_IS_BETTER = frozenset(metric.key for metric in METRICS if metric.larger_is_better is False)


def find(key: str) -> tuple[Metric, str] | None:
    """The metric of a results file's key and the suffix of its reading; `None` for counts by number of options."""
    name = key.rpartition("/")[2]
    if name in BY_KEY:
        return BY_KEY[name], MATCHED
    for suffix in READINGS:
        if suffix and name.removesuffix(suffix) in BY_KEY and name.endswith(suffix):
            return BY_KEY[name.removesuffix(suffix)], suffix
    return None


def is_binned(key: str) -> bool:
    """Whether a results file's key is a binned error."""
    found = find(key)
    return found is not None and found[0].binned


def columns(keys: Sequence[str], one_reading: bool = False) -> list[Column]:
    """
    The columns of some metrics, in the order given.

    Args:
        keys (`Sequence[str]`): Last parts of keys, with the suffix of a reading.
        one_reading (`bool`, *optional*, defaults to `False`): Where the matched and the published reading coincide:
            leave the published one out, and do not say of the other that it is matched.
    """
    made = []
    for key in keys:
        found = find(key)
        if found is None:
            raise KeyError(key)
        metric, suffix = found
        if one_reading and suffix == PUBLISHED:
            continue
        # Tables below the headline read matched letters unless a header says otherwise.
        unsaid = suffix == MATCHED and (one_reading or not metric.headline)
        made.append(Column(key, metric, READINGS[suffix] if metric.detection and not unsaid else ""))
    return made


def answer_columns(headline: bool) -> list[Column]:
    """Columns for answers in distribution: of the headline, or those further down."""
    return columns([metric.key for metric in METRICS if metric.id and metric.headline is headline])


def shift_columns() -> list[Column]:
    """Columns for answers under shift."""
    return columns([metric.key for metric in SHIFTED])


def detection_columns(headline: bool, one_reading: bool = False) -> list[Column]:
    """Columns for detection: headline metrics in both readings; the others, and AUROC by further scores."""
    keys = [m.key + suffix for m in DETECTION if m.headline is headline for suffix in (MATCHED, PUBLISHED)]
    if not headline:
        keys += [f"auroc{suffix}" for suffix in READINGS if suffix not in (MATCHED, PUBLISHED)]
    return columns(keys, one_reading)


def detection_keys(suffix: str) -> tuple[str, ...]:
    """The detection metrics that a results file keeps of a reading."""
    return tuple(metric.key for metric in DETECTION) if suffix in (MATCHED, PUBLISHED) else ("auroc",)
