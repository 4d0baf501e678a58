"""Several passes: averaged probabilities and mutual information, averaged alpha for Dirichlet methods."""

import pytest
import torch
from golden import MEMBERS, close

from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import get_method


@pytest.mark.parametrize("name", ["mc_dropout", "ce"])
def test_golden_values(name):
    members = torch.tensor([MEMBERS], dtype=torch.float64)  # [B, M, K]
    out = get_method(name, passes=3).predict(Outputs(logits=members))
    wanted = torch.tensor([[0.62391049, 0.23257149, 0.05772490, 0.08579313]], dtype=torch.float64)
    assert torch.allclose(out.probs, wanted, atol=1e-7)
    assert close(out.aleatoric, 0.376090)
    assert close(out.epistemic, 0.146984)
    assert close(-out.probs[0, 0].log(), 0.471748)
    assert out.members.shape == (3, 1, 4)


def test_golden_values_of_averaged_alpha():
    out = get_method("dappr", passes=3).predict(Outputs(logits=torch.tensor([MEMBERS], dtype=torch.float64)))
    wanted = torch.tensor([[3.00635981, 2.04985575, 1.49349528, 1.60151591]], dtype=torch.float64)
    assert torch.allclose(out.alpha, wanted, atol=1e-7)
    assert close(out.aleatoric, 0.631177) and close(out.epistemic, 0.490724)


def test_equal_passes_carry_no_information():
    out = get_method("mc_dropout").predict(Outputs(logits=torch.randn(5, 1, 4).expand(5, 10, 4)))
    assert out.epistemic.abs().max() < 1e-6
