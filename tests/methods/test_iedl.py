"""I-EDL: golden values, and the determinant where float32 fails."""

import pytest
import torch
from golden import PRECISIONS, close, logits

from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import Progress, get_method
from dappr_llm.methods.iedl import log_det_fisher


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize(
    "label, fit, start, late",
    [(0, 0.244997 + 0.054187, 0.463784, 0.760476), (2, 0.915160 + 0.054187, 1.133946, 1.810556)],
)
def test_golden_values(label, fit, start, late, dtype, tolerance):
    method, out, labels = get_method("iedl"), Outputs(logits=logits(dtype)), torch.tensor([label])
    terms = method.loss(out, labels, Progress(0, 20))
    assert close(terms["fit"], fit, max(tolerance, 2e-6))
    assert close(terms["fisher"], 0.05 * 3.291998, tolerance)
    assert close(sum(terms.values()), start, tolerance)
    assert close(sum(method.loss(out, labels, Progress(10, 20)).values()), late, tolerance)


def test_the_determinant_of_large_evidence():
    """1 - sum psi1(a0)/psi1(a_k) tends to (K-1)/(2 a0), below float32's resolution."""
    alpha = torch.full((1, 4), 1e6, dtype=torch.float64)
    wanted = 4 * torch.polygamma(1, alpha[:, :1]).log() + torch.tensor(3 / (2 * 4e6), dtype=torch.float64).log()
    assert torch.allclose(log_det_fisher(alpha), wanted.squeeze(), rtol=1e-5)
