"""R-EDL: golden values for two priors."""

import pytest
import torch
from golden import PRECISIONS, close, logits

from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import Progress, get_method

GOLDEN = [  # prior, label, fit, KL, total, aleatoric, epistemic
    (0.1, 0, 0.352129, 2.106468, 2.458597, 0.505941, 0.088743),
    (0.1, 2, 1.156877, 2.861530, 4.018407, 0.505941, 0.088743),
    (0.8, 0, 0.483252, 0.371213, 0.854465, 0.599458, 0.437911),
    (0.8, 2, 0.979643, 0.789390, 1.769033, 0.599458, 0.437911),
]


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("prior, label, fit, kl, total, aleatoric, epistemic", GOLDEN)
def test_golden_values(prior, label, fit, kl, total, aleatoric, epistemic, dtype, tolerance):
    method, out = get_method("redl", prior=prior), Outputs(logits=logits(dtype))
    terms = method.loss(out, torch.tensor([label]), Progress(10, 20))
    assert close(terms["fit"], fit, tolerance)
    assert close(terms["reg"], kl, tolerance)
    assert close(sum(terms.values()), total, tolerance)
    prediction = method.predict(out)
    assert close(prediction.aleatoric, aleatoric, tolerance)
    assert close(prediction.epistemic, epistemic, tolerance)


def test_cross_weight_discounts_the_other_classes():
    evidence = torch.nn.functional.softplus(logits())
    wanted = (evidence[0, 0] + 0.1) / (evidence[0, 0] + 2 * (evidence[0, 1:].sum()) + 0.4)
    terms = get_method("redl", cross_weight=2.0, reg_weight=0.0).loss(
        Outputs(logits=logits()), torch.tensor([0]), Progress(0, 1)
    )
    others = [
        (evidence[0, k] + 0.1) / (evidence[0, k] + 2 * (evidence.sum() - evidence[0, k]) + 0.4) for k in (1, 2, 3)
    ]
    assert close(terms["fit"], float((1 - wanted) ** 2 + sum(p**2 for p in others)))
