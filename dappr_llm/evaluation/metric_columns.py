"""
The declaration of every metric: key, column header, direction, where it is computed, and by which function.

To add a metric of the answers, write one function in `classification_metrics.py`, `calibration_metrics.py` or
`ranking_metrics.py`, and add one `Metric` that names it to `METRICS`. Results files, bootstrap intervals, reports,
model cards and the choice of the best checkpoint read everything else from this list. This module imports nothing
slow, so that training arguments can look up a metric's direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Uncertainty scores by name → text in headers. `scores.py` computes them, and says which tables have them.
SCORES = {
    "epistemic": "epistemic",
    "aleatoric": "aleatoric",
    "entropy": "entropy",
    "max_prob": "max prob",
    "mutual_information": "mutual information",
    "evidence": "evidence",
    "max_evidence": "max evidence",
    "energy": "energy",
    "max_logit": "max logit",
    "density": "density",
}
# Detectors that see no model, by name → text in headers; see `ood_baselines.py`.
TRIVIAL = {
    "length": "question length",
    "option_length": "option length",
    "options": "number of options",
    "question_mark": "question mark",
    "tfidf": "TF-IDF neighbour",
}
# Readings of an OOD detection metric, that is, which answer letters, which score ranked the items, and whether lengths
# were matched: suffix of the key → text in the column header. Results files hold every detection metric in the matched
# and the published reading (see `evaluators.evaluate_ood`), and AUROC alone in the others.
MATCHED, PUBLISHED, LENGTH_MATCHED = "", "_published", "_length_matched"
TRIVIAL_READINGS = {f"_trivial_{name}": f"trivial: {header}" for name, header in TRIVIAL.items()}
MINUS_TRIVIAL = {f"_minus{suffix}": f"minus {header}" for suffix, header in TRIVIAL_READINGS.items()}
READINGS = {
    MATCHED: "matched",
    PUBLISHED: "published",
    LENGTH_MATCHED: "length-matched",
    **{f"_{name}": header for name, header in SCORES.items()},
    **{f"_{name}{LENGTH_MATCHED}": f"{header}, length-matched" for name, header in SCORES.items()},
    **TRIVIAL_READINGS,
    **MINUS_TRIVIAL,
}


@dataclass(frozen=True)
class Metric:
    """
    The declaration of one metric.

    Args:
        key (`str`): Last part of its key in a results file.
        header (`str`): Header of its column.
        description (`str`): Full name, shown in model cards.
        kind (`str`): How values are formatted: `"percent"`, `"plain"` or `"count"`.
        larger_is_better (`bool`, *optional*): Direction; `None` for quantities that have none, such as counts.
        function (`str`): `"module.function"` inside `dappr_llm.evaluation`. Empty for detection metrics, which
            `ranking_metrics.ood_scores` computes together, and for counts.
        inputs (`tuple[str, ...]`): Positional arguments of that function: keys of `evaluators.answer_rows`.
        weighted (`bool`): Whether the function also accepts `weights` `[R, N]`, how often each of N rows was drawn in
            each of R resamples, and then returns `[R]`. Otherwise the bootstrap calls it once per resample, on rows
            repeated as often as they were drawn.
        hub (`str`, *optional*): The metric's name on the Hub; model cards list only metrics that have one.
        headline (`bool`): Whether it is shown in the report's first tables or in the later ones.
        binned (`bool`): Whether it is a binned calibration error, which resampling biases upwards; see
            `bootstrap.bootstrap`.
        estimate (`bool`): Whether it gets a bootstrap interval.
        id, shifted, detection, mixture, matching (`bool`): Whether it is computed for answers in distribution, for
            answers to out-of-distribution tasks, for OOD detection, for ID and OOD questions asked together, and says
            how far lengths could be matched.
    """

    key: str
    header: str
    description: str
    kind: str = "percent"
    larger_is_better: bool | None = True
    function: str = ""
    inputs: tuple[str, ...] = ()
    weighted: bool = False
    hub: str | None = None
    headline: bool = True
    binned: bool = False
    estimate: bool = True
    id: bool = True
    shifted: bool = False
    detection: bool = False
    mixture: bool = False
    matching: bool = False


@dataclass(frozen=True)
class Column:
    """A metric in one reading, as a column of a table; `reading` is empty where the header need not state it."""

    key: str
    metric: Metric
    reading: str = ""

    @property
    def kind(self) -> str:
        """How its values are formatted."""
        return self.metric.kind

    @property
    def header(self) -> str:
        """Header of the column: the metric, followed by the reading if there is one."""
        if not self.reading:
            return self.metric.header
        return f"{self.metric.header}{', ' if ',' in self.metric.header else ' '}{self.reading}"


_ANSWERS = ("probs", "labels")
_BINS = ("confidence", "correct")
_RANKED = ("correct", "aleatoric")

# In the order of the report's columns.
METRICS = (
    Metric(
        "accuracy", "accuracy", "Accuracy", function="classification_metrics.accuracy", inputs=_ANSWERS,
        hub="accuracy", shifted=True,
    ),
    Metric(
        "chance", "chance", "Accuracy of a uniform guess among each item's options", larger_is_better=None,
        function="classification_metrics.chance", inputs=("num_options",), estimate=False,
    ),
    Metric(
        "balanced_accuracy", "balanced accuracy", "Recall, unweighted mean over classes",
        function="classification_metrics.balanced_accuracy", inputs=_ANSWERS, weighted=True,
    ),
    Metric(
        "macro_f1", "macro F1", "F1 score, unweighted mean over classes", function="classification_metrics.macro_f1",
        inputs=_ANSWERS, weighted=True, hub="f1",
    ),
    Metric(
        "nll", "NLL", "Negative log-likelihood", "plain", False, function="classification_metrics.nll",
        inputs=_ANSWERS, hub="nll", shifted=True,
    ),
    Metric(
        "brier", "Brier", "Brier score", "plain", False, function="classification_metrics.brier", inputs=_ANSWERS,
        hub="brier_score", shifted=True,
    ),
    Metric(
        "ece", "ECE", "Expected calibration error, 15 bins", larger_is_better=False,
        function="calibration_metrics.ece", inputs=_BINS, binned=True, hub="expected_calibration_error", shifted=True,
    ),
    Metric(
        "ece_floor", "ECE floor", "Expected calibration error of a calibrated model of this size",
        larger_is_better=None, function="calibration_metrics.ece_floor", inputs=("confidence",), estimate=False,
        shifted=True,
    ),
    Metric(
        "ece_equal_mass", "ECE equal mass", "Calibration error over 15 bins of equally many items",
        larger_is_better=False, function="calibration_metrics.equal_mass_ece", inputs=_BINS, binned=True,
        headline=False,
    ),
    Metric(
        "ece_classwise", "ECE classwise", "Calibration error of each option's probability, mean over options",
        larger_is_better=False, function="calibration_metrics.classwise_ece", inputs=(*_ANSWERS, "num_options"),
        binned=True, headline=False,
    ),
    Metric(
        "mce", "MCE", "Largest calibration gap of a bin", larger_is_better=False, function="calibration_metrics.mce",
        inputs=_BINS, binned=True, headline=False,
    ),
    Metric(
        "conf_auroc", "conf. AUROC", "AUROC of right against wrong answers by aleatoric uncertainty",
        function="ranking_metrics.confidence_auroc", inputs=_RANKED,
    ),
    Metric(
        "conf_aupr", "conf. AUPR", "AUPR of right against wrong answers by aleatoric uncertainty",
        function="ranking_metrics.confidence_aupr", inputs=_RANKED, hub="average_precision",
    ),
    Metric(
        "aurc", "AURC", "Area under the risk-coverage curve", "plain", False, function="ranking_metrics.aurc",
        inputs=_RANKED,
    ),
    Metric(
        "excess_aurc", "excess AURC", "Area under the risk-coverage curve above that of a perfect ranking",
        "plain", False, function="ranking_metrics.excess_aurc", inputs=_RANKED, headline=False,
    ),
    Metric(
        "risk_at_coverage_80", "risk at 80 % coverage", "Share of wrong answers among the least uncertain 80 %",
        larger_is_better=False, function="ranking_metrics.risk_at_coverage", inputs=_RANKED, headline=False,
    ),
    Metric(
        "coverage_at_risk_5", "coverage at 5 % risk", "Largest share answered with at most 5 % wrong",
        function="ranking_metrics.coverage_at_risk", inputs=_RANKED, headline=False,
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
    Metric(
        "mixture_risk", "wrong answers", "Share of wrong answers among in- and out-of-distribution items together",
        larger_is_better=False, id=False, function="ranking_metrics.risk", mixture=True,
    ),
    Metric(
        "mixture_failure_auroc", "failure AUROC", "AUROC of right against wrong answers among ID and OOD items",
        id=False, function="ranking_metrics.failure_auroc", mixture=True,
    ),
    Metric(
        "mixture_aurc", "AURC", "Area under the risk-coverage curve of ID and OOD items together", "plain", False,
        id=False, function="ranking_metrics.aurc", mixture=True,
    ),
    Metric(
        "mixture_risk_at_coverage_80", "risk at 80 % coverage",
        "Share of wrong answers among the least uncertain 80 % of ID and OOD items", larger_is_better=False,
        headline=False, id=False, function="ranking_metrics.risk_at_coverage", mixture=True,
    ),
    Metric(
        "mixture_coverage_at_risk_5", "coverage at 5 % risk",
        "Largest share of ID and OOD items answered with at most 5 % wrong", headline=False,
        id=False, function="ranking_metrics.coverage_at_risk", mixture=True,
    ),
    Metric(
        "matched_n_id", "ID rows", "Effective ID rows of the length-matched readings", "count", None, estimate=False,
        id=False, matching=True,
    ),
    Metric(
        "matched_n_ood", "OOD rows", "Effective OOD rows of the length-matched readings", "count", None,
        estimate=False, id=False, matching=True,
    ),
    Metric(
        "matched_length_auroc", "length itself", "AUROC of length itself under the weights that match lengths",
        larger_is_better=None, estimate=False, id=False, matching=True,
    ),
    Metric("n", "n", "Items", "count", None, estimate=False, shifted=True),
)  # fmt: skip

BY_KEY = {metric.key: metric for metric in METRICS}
ANSWERS = tuple(metric for metric in METRICS if metric.function and not metric.mixture)
SHIFTED = tuple(metric for metric in ANSWERS if metric.shifted)
DETECTION = tuple(metric for metric in METRICS if metric.detection)
MIXTURE = tuple(metric for metric in METRICS if metric.mixture)
LOWER_IS_BETTER = frozenset(metric.key for metric in METRICS if metric.larger_is_better is False)


def find(key: str) -> tuple[Metric, str] | None:
    """
    The metric and the reading's suffix behind a key of a results file.

    Args:
        key (`str`): Such as `"id/accuracy"` or `"ood/csqa/auroc_published"`.

    Returns:
        `tuple[Metric, str]`, or `None` for keys that are no declared metric, such as `"id/options/4"`.
    """
    name = key.rpartition("/")[2]
    if name in BY_KEY:
        return BY_KEY[name], MATCHED
    for suffix in READINGS:
        if suffix and name.removesuffix(suffix) in BY_KEY and name.endswith(suffix):
            return BY_KEY[name.removesuffix(suffix)], suffix
    return None


def is_binned(key: str) -> bool:
    """Whether a key of a results file belongs to a binned calibration error."""
    found = find(key)
    return found is not None and found[0].binned


def columns(keys: Sequence[str], one_reading: bool = False) -> list[Column]:
    """
    Columns for the given metrics, in the given order.

    Args:
        keys (`Sequence[str]`): Last parts of result keys, including the suffix of a reading.
        one_reading (`bool`, *optional*, defaults to `False`): The matched and the published reading coincide: leave
            out the columns of the published one, and the word "matched" in the headers of the other.
    """
    made = []
    for key in keys:
        found = find(key)
        if found is None:
            raise KeyError(key)
        metric, suffix = found
        if one_reading and suffix == PUBLISHED:
            continue
        # In tables below the headline, a header without a reading means the matched one.
        unsaid = suffix == MATCHED and (one_reading or not metric.headline)
        made.append(Column(key, metric, READINGS[suffix] if metric.detection and not unsaid else ""))
    return made


def answer_columns(headline: bool) -> list[Column]:
    """Columns for answers in distribution: the headline metrics, or all others."""
    return columns([metric.key for metric in METRICS if metric.id and metric.headline is headline])


def shift_columns() -> list[Column]:
    """Columns for answers to out-of-distribution tasks."""
    return columns([metric.key for metric in SHIFTED])


def detection_columns(headline: bool, one_reading: bool = False) -> list[Column]:
    """Columns for OOD detection: the headline metrics in both readings, or the others."""
    keys = [m.key + suffix for m in DETECTION if m.headline is headline for suffix in (MATCHED, PUBLISHED)]
    return columns(keys, one_reading)


def detection_keys(suffix: str) -> tuple[str, ...]:
    """The detection metrics that a results file holds in the reading with this suffix."""
    return tuple(metric.key for metric in DETECTION) if suffix in (MATCHED, PUBLISHED) else ("auroc",)


def mixture_metrics(suffix: str) -> tuple[Metric, ...]:
    """The metrics of the mixture that a results file holds in the reading with this suffix."""
    return MIXTURE if suffix == MATCHED else tuple(BY_KEY[key] for key in ("mixture_failure_auroc", "mixture_aurc"))


def length_matched(suffix: str) -> str:
    """The suffix of the length-matched reading of a score."""
    return f"{suffix}{LENGTH_MATCHED}"
