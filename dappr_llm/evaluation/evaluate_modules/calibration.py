"""Accuracy, proper scores and calibration errors of predicted probabilities, as an `evaluate.Metric`."""

# `evaluate.load` copies this file elsewhere before it imports it: no relative imports.
import datasets
import evaluate
import numpy as np

from dappr_llm.evaluation import calibration_metrics, classification_metrics

_DESCRIPTION = """Quality and calibration of class probabilities: accuracy, NLL, Brier score, expected calibration
error over 15 equal-width bins with its noise floor, over equally filled bins, per class, and the largest gap."""

_INPUTS = """
Args:
    predictions: one list of probabilities per row; rows may have different numbers of options.
    references: index of the correct option of each row.
    bins: number of bins of the calibration errors (default: 15).
Returns:
    accuracy, nll, brier, ece, ece_floor (expected ECE of a calibrated model on as many rows), ece_equal_mass,
    ece_classwise, mce.
Examples:
    >>> Calibration().compute(predictions=[[0.9, 0.1], [0.4, 0.6]], references=[0, 0])["accuracy"]
    0.5
"""


class Calibration(evaluate.Metric):
    """See `Calibration().description` and `Calibration().inputs_description`."""

    def _info(self):
        features = datasets.Features(
            {
                "predictions": datasets.Sequence(datasets.Value("float64")),
                "references": datasets.Value("int64"),
            }
        )
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features
        )

    def _compute(self, predictions, references, bins=calibration_metrics.NUM_BINS):
        counts = np.array([len(row) for row in predictions])
        probs = np.zeros((len(counts), counts.max(initial=1)))
        for row, values in enumerate(predictions):
            probs[row, : len(values)] = values
        if len(counts) and (np.abs(probs.sum(axis=1) - 1) > 1e-3).any():
            worst = int(np.argmax(np.abs(probs.sum(axis=1) - 1)))
            raise ValueError(f"predictions must be probabilities, but row {worst} sums to {probs[worst].sum():.4g}")
        labels = np.asarray(references)
        correct, confidence = classification_metrics.is_correct(probs, labels), probs.max(axis=1)
        return {
            "accuracy": classification_metrics.accuracy(probs, labels),
            "nll": classification_metrics.nll(probs, labels),
            "brier": classification_metrics.brier(probs, labels),
            "ece": calibration_metrics.ece(confidence, correct, bins),
            "ece_floor": calibration_metrics.ece_floor(confidence, bins),
            "ece_equal_mass": calibration_metrics.equal_mass_ece(confidence, correct, bins),
            "ece_classwise": calibration_metrics.classwise_ece(probs, labels, counts, bins),
            "mce": calibration_metrics.mce(confidence, correct, bins),
        }
