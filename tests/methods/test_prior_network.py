"""KL-PN and RKL-PN: golden values, and auxiliary rows."""

import pytest
import torch
from golden import PRECISIONS, close, logits

from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import Progress, get_method
from dappr_llm.methods.dirichlet import entropy, kl_divergence, kl_to_symmetric

EARLY = Progress(0, 10)


def terms(name, z, label, **options):
    return get_method(name, **options).loss(Outputs(logits=z), torch.tensor([label]), EARLY)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize(
    "precision, label, forward, reverse",
    [(100, 0, 5.580900, 27.555454), (100, 2, 42.002394, 501.948530), (10, 0, 0.966514, 1.337630),
     (10, 2, 21.531318, 48.776938)],
)  # fmt: skip
def test_golden_values(precision, label, forward, reverse, dtype, tolerance):
    z = logits(dtype)
    for name, wanted in (("kl_pn", forward), ("rkl_pn", reverse)):
        found = terms(name, z, label, precision=precision)
        assert close(precision * found["fit"], wanted, tolerance) and found["ood"] == 0


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("name, wanted", [("kl_pn", 7.908379), ("rkl_pn", 3.366412)])
def test_golden_values_of_auxiliary_rows(name, wanted, dtype, tolerance):
    found = terms(name, logits(dtype), -1, ood_weight=0.5)
    assert close(100 * found["ood"] / 0.5, wanted, tolerance) and found["fit"] == 0


def test_golden_scores():
    out = get_method("kl_pn").predict(Outputs(logits=logits()))
    assert close(out.alpha.sum(), 10.40565681) and close(out.epistemic, 0.384406)
    assert torch.allclose(out.probs, logits().softmax(-1))


def test_shared_dirichlet_quantities():
    alpha = torch.nn.functional.softplus(logits()) + 1
    assert close(entropy(alpha), -2.36452942)
    assert close(kl_divergence(alpha, torch.ones_like(alpha)), kl_to_symmetric(alpha).item())


def test_labelled_and_auxiliary_rows_share_a_batch():
    z = torch.randn(5, 4, dtype=torch.float64)
    labels = torch.tensor([0, -1, 3, -1, 1])
    for name in ("kl_pn", "rkl_pn"):
        together = get_method(name).loss(Outputs(logits=z), labels, EARLY)
        for row, label in enumerate(labels.tolist()):
            alone = terms(name, z[row : row + 1], label)
            assert all(close(together[key][row], alone[key].item(), 1e-12) for key in ("fit", "ood"))


def test_a_logit_out_of_bounds_can_come_back():
    z = torch.tensor([[-40.0, 40.0, 0.0]], requires_grad=True)
    for name in ("kl_pn", "rkl_pn"):
        (grad,) = torch.autograd.grad(sum(terms(name, z, 0).values()).sum(), z)
        assert grad.isfinite().all() and grad[0, 0] < 0 < grad[0, 1]


def test_the_two_directions_are_one_method():
    assert get_method("rkl_pn") == get_method("kl_pn", reverse=True)
