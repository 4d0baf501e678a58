"""EDL and its ablation with DAPPr's regulariser: golden values."""

import pytest
import torch
from golden import PRECISIONS, close, logits

from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import Progress, get_method

LATE = Progress(10, 20)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize(
    "label, fit, kl, total, light",
    [(0, 0.506520 + 0.079288, 0.296692, 0.882499, 0.585810), (2, 0.953929 + 0.079288, 0.676610, 1.709827, 1.033223)],
)
def test_golden_values(label, fit, kl, total, light, dtype, tolerance):
    out, labels = Outputs(logits=logits(dtype)), torch.tensor([label])
    terms = get_method("edl").loss(out, labels, LATE)
    assert close(terms["fit"], fit, max(tolerance, 2e-6))  # the sum of two rounded numbers
    assert close(terms["reg"], kl, tolerance)
    assert close(sum(terms.values()), total, tolerance)
    assert close(sum(get_method("edl", reg_weight=1e-5).loss(out, labels, LATE).values()), light, tolerance)


@pytest.mark.parametrize("label, total", [(0, 0.587505), (2, 1.036525)])
def test_golden_values_with_spurious_evidence(label, total):
    method = get_method("edl_spurious")
    assert method.reg_weight == 2e-4
    terms = method.loss(Outputs(logits=logits()), torch.tensor([label]), LATE)
    assert close(sum(terms.values()), total)


def test_scores_and_the_ramp_of_the_llm_recipe():
    out = get_method("edl").predict(Outputs(logits=logits()))
    assert close(out.aleatoric, 0.614313) and close(out.epistemic, 0.493376)
    ramp = get_method("edl", warmup_epochs=3)
    weights = [ramp.weight(Progress(epoch, 8.13)) for epoch in (0, 1, 2, 3, 8)]
    assert weights == pytest.approx([0, 1 / 3, 2 / 3, 1, 1])
