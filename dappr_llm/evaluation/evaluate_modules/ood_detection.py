"""Out-of-distribution detection by an uncertainty, as an `evaluate.Metric`."""

# `evaluate.load` copies this file elsewhere before it imports it: no relative imports.
import evaluate

from dappr_llm.evaluation import ranking_metrics
from dappr_llm.evaluation.evaluate_modules import as_ranking, uncertainty_info

_DESCRIPTION = """Out-of-distribution detection from one uncertainty per row: AUROC, AUPR with in-distribution rows as
positives, AUPR with the others as positives, and the false-positive rate at 95 % true positives."""

_INPUTS = """
Args:
    predictions: the uncertainty of each row, larger for less certain; NaN ranks as most uncertain.
    references: 1 for in-distribution rows, 0 for the others.
Returns:
    auroc, aupr, aupr_ood, fpr95; NaN unless there are rows of both kinds.
Examples:
    >>> OODDetection().compute(predictions=[0.1, 0.2, 0.9], references=[1, 1, 0])["auroc"]
    1.0
"""


class OODDetection(evaluate.Metric):
    """See `OODDetection().description` and `OODDetection().inputs_description`."""

    def _info(self):
        return uncertainty_info(_DESCRIPTION, _INPUTS)

    def _compute(self, predictions, references):
        uncertainty, is_id = as_ranking(predictions, references, one="in distribution", zero="not")
        return ranking_metrics.ood_scores(uncertainty[is_id], uncertainty[~is_id])
