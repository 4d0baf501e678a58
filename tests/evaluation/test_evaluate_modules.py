"""Our metrics as `evaluate` modules: directly, by path and offline, and in a Trainer's `compute_metrics`."""

import sys

import numpy as np
import pytest
from sklearn import metrics as sk

from dappr_llm.core.errors import UserError
from dappr_llm.evaluation.evaluate_modules import MODULES, module_path

evaluate = pytest.importorskip("evaluate")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    """Nothing is written to the user's cache."""
    from evaluate import config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(config, "HF_METRICS_CACHE", str(tmp_path_factory.mktemp("metrics")))
        patch.setattr(sys, "path", list(sys.path))
        yield


def direct(name):
    from dappr_llm.evaluation.evaluate_modules.calibration import Calibration
    from dappr_llm.evaluation.evaluate_modules.ood_detection import OODDetection
    from dappr_llm.evaluation.evaluate_modules.selective_prediction import SelectivePrediction

    return {"calibration": Calibration, "ood_detection": OODDetection, "selective_prediction": SelectivePrediction}[
        name
    ]()


@pytest.fixture(params=["direct", "load"])
def module(request):
    return direct if request.param == "direct" else lambda name: evaluate.load(module_path(name))


def test_calibration_against_scikit_learn_and_torchmetrics(module):
    import torch
    from torchmetrics.functional.classification import multiclass_calibration_error

    rng = np.random.default_rng(0)
    probs, labels = rng.dirichlet(np.ones(4), 300), rng.integers(4, size=300)
    found = module("calibration").compute(predictions=probs.tolist(), references=labels.tolist())
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(labels, probs.argmax(1)), abs=1e-12)
    assert found["nll"] == pytest.approx(sk.log_loss(labels, probs), abs=1e-9)
    tensors = torch.from_numpy(probs), torch.from_numpy(labels)
    for name, norm in (("ece", "l1"), ("mce", "max")):
        expected = multiclass_calibration_error(*tensors, num_classes=4, n_bins=15, norm=norm).item()
        assert found[name] == pytest.approx(expected, abs=1e-6)  # torchmetrics turns confidences into float32 here
    fewer = module("calibration").compute(predictions=probs.tolist(), references=labels.tolist(), bins=5)
    assert fewer["mce"] != found["mce"]


def test_ood_detection(module):
    rng = np.random.default_rng(0)
    uncertainty, is_id = rng.random(200).round(2), rng.integers(2, size=200)
    found = module("ood_detection").compute(predictions=uncertainty.tolist(), references=is_id.tolist())
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(is_id, -uncertainty), abs=1e-12)
    assert found["aupr"] == pytest.approx(sk.average_precision_score(is_id, -uncertainty), abs=1e-12)
    assert found["aupr_ood"] == pytest.approx(sk.average_precision_score(1 - is_id, uncertainty), abs=1e-12)
    golden = module("ood_detection").compute(
        predictions=[0.10, 0.20, 0.35, 0.60, 0.30, 0.55, 0.70], references=[1, 1, 1, 1, 0, 0, 0]
    )
    assert golden["auroc"] == pytest.approx(0.75) and golden["aupr"] == pytest.approx(0.854167, abs=1e-6)


def test_selective_prediction(module):
    found = module("selective_prediction").compute(
        predictions=[0.1, 0.2, 0.3, 0.4], references=[1, 0, 1, 1], coverage=0.5, risk=0.25
    )
    assert found["aurc"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert (found["risk_at_coverage"], found["coverage_at_risk"]) == (0.5, 1)


def test_rows_in_batches_and_of_different_lengths():
    metric = direct("calibration")
    metric.add_batch(predictions=[[0.7, 0.3]], references=[0])
    metric.add_batch(predictions=[[0.2, 0.3, 0.5], [0.1, 0.9]], references=[2, 0])
    assert metric.compute()["accuracy"] == pytest.approx(2 / 3)


def test_inside_a_trainers_compute_metrics():
    from transformers.trainer_utils import EvalPrediction

    metric = direct("calibration")

    def compute_metrics(output):
        logits = output.predictions
        probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        return metric.compute(predictions=probs, references=output.label_ids)

    found = compute_metrics(EvalPrediction(np.array([[2.0, 0.0], [0.0, 1.0]]), np.array([0, 1])))
    assert found["accuracy"] == 1 and 0 < found["ece"] < 1


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="row 1 sums to 1.2"):
        direct("calibration").compute(predictions=[[0.5, 0.5], [0.6, 0.6]], references=[0, 0])
    with pytest.raises(ValueError, match="references must be 1"):
        direct("ood_detection").compute(predictions=[0.5], references=[2])
    with pytest.raises(UserError, match="did you mean 'calibration'"):
        module_path("calibraton")
    assert all(direct(name).description for name in MODULES)
