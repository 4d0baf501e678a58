"""Selective prediction (abstaining on uncertain rows), as an `evaluate.Metric`."""

# `evaluate.load` copies this file elsewhere before it imports it: no relative imports.
import evaluate

from dappr_llm.evaluation import ranking_metrics
from dappr_llm.evaluation.evaluate_modules import as_ranking, uncertainty_info

_DESCRIPTION = """Selective prediction from one uncertainty per row: area under the risk-coverage curve, its excess
over a perfect ranking, risk at a coverage, coverage at a risk, and AUROC and AUPR of right against wrong answers."""

_INPUTS = """
Args:
    predictions: the uncertainty of each row, larger for less certain; NaN ranks as most uncertain.
    references: 1 where the answer is right, 0 where it is wrong.
    coverage: share of rows to answer (default: 0.8).
    risk: share of wrong answers to accept (default: 0.05).
Returns:
    aurc, excess_aurc, risk_at_coverage, coverage_at_risk, auroc, aupr.
Examples:
    >>> SelectivePrediction().compute(predictions=[0.1, 0.2, 0.9], references=[1, 1, 0])["excess_aurc"]
    0.0
"""


class SelectivePrediction(evaluate.Metric):
    """See `SelectivePrediction().description` and `SelectivePrediction().inputs_description`."""

    def _info(self):
        return uncertainty_info(_DESCRIPTION, _INPUTS)

    def _compute(self, predictions, references, coverage=ranking_metrics.COVERAGE, risk=ranking_metrics.RISK):
        uncertainty, correct = as_ranking(predictions, references, one="right", zero="wrong")
        return {
            "aurc": ranking_metrics.aurc(correct, uncertainty),
            "excess_aurc": ranking_metrics.excess_aurc(correct, uncertainty),
            "risk_at_coverage": ranking_metrics.risk_at_coverage(correct, uncertainty, coverage),
            "coverage_at_risk": ranking_metrics.coverage_at_risk(correct, uncertainty, risk),
            "auroc": ranking_metrics.confidence_auroc(correct, uncertainty),
            "aupr": ranking_metrics.confidence_aupr(correct, uncertainty),
        }
