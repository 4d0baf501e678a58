"""DAPPr: golden values, gradients, and the properties that a wrong loss would break."""

import math

import pytest
import torch

from dappr_llm import dappr_loss, dappr_uncertainty
from dappr_llm.core.errors import UserError
from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import Progress, get_method
from dappr_llm.methods.dappr import DAPPr, divergence, log_possibility
from dappr_llm.methods.dirichlet import spurious_evidence

S = [2.0, 0.5, -1.0, 0.0]
START = Progress(0, 10)


def t(rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


def row(values, label, dtype=torch.float64):
    return t([values], dtype), torch.tensor([label])


def close(found, wanted, tolerance=1e-6):
    """Absolute below 1, relative above, as the golden values are meant."""
    return abs(float(found) - wanted) <= tolerance * max(1.0, abs(wanted))


GOLDEN = [  # logits, label, log g, D, R, alpha0
    (S, 0, -0.137768, 1.068692, 8.488384, 8.10741386),
    (S, 2, -0.814942, 2.306912, 16.541406, 8.10741386),
    ([20.0, -20, -20, -20], 0, -0.0031627015, 0.13659924, 3.00000001, 24.00000001),
    ([-20.0, 20, 0, 0], 0, -18.979771, 4.2142499, 446.733495, 25.38629437),
    ([-40.0, 5, 5, 5], 0, -38.972753, 3.9187376, 108.241888, 19.02014605),
    ([-6.0, 12, 12, 12], 0, -5.0058625, 4.6590012, 507.000479, 40.00249412),
    ([1e3] * 4, 0, -3.749375e-4, 1.3866691, 3006003, 4004),
    ([1e4, -5, 3, 0], 0, -3.3717e-8, 6.7458367e-4, 20.271283, 10007.748450),
    ([1e5] * 4, 2, -3.74999e-6, 1.3862981, 3.00006e10, 400004),
    ([14.25, 9.5, 8.0, 7.75], 0, -0.022621318, 1.0701456, 267.827646, 43.50084155),
    ([14.25, 9.5, 8.0, 7.75], 1, -0.039202652, 1.4590215, 390.138594, 43.50084155),
    ([math.sin(k) for k in range(200)], 7, -0.36327268, 5.42318562, 637.66689264, 351.18246607),
]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("logits, label, log_g, d, r, alpha0", GOLDEN)
def test_golden_values(logits, label, log_g, d, r, alpha0, dtype, tolerance):
    z, y = row(logits, label, dtype)
    assert close(log_possibility(z, y), log_g, tolerance)
    assert close(divergence(z, y), d, tolerance)
    assert close(spurious_evidence(z, y), r, tolerance)
    assert close(dappr_uncertainty(z).alpha.sum(), alpha0, tolerance)


def test_small_values_keep_their_digits():
    """The h form resolves values that the published expression gets wrong by four orders of magnitude."""
    z, y = row([1e4, -5, 3, 0], 0)
    assert log_possibility(z, y).item() == pytest.approx(-3.3717e-8, rel=1e-4)
    z32, _ = row([1e3] * 4, 0, torch.float32)
    assert log_possibility(z32, y).item() == pytest.approx(-3.749375e-4, rel=1e-3)


@pytest.mark.parametrize(
    "label, weight, value", [(0, 2e-4, -0.136070), (0, 2e-3, -0.120791), (0, 5e-3, -0.095326), (2, 5e-3, -0.732235)]
)
def test_paper_value_is_logged(label, weight, value):
    z, y = row(S, label)
    method = DAPPr(reg_weight=weight, schedule="constant")
    assert close(method.monitor(Outputs(logits=z), y, START)["paper_value"], value)


def test_paper_value_of_two_hundred_classes_and_of_a_batch():
    z, y = row([math.sin(k) for k in range(200)], 7)
    method = DAPPr(reg_weight=5e-3, schedule="constant")
    assert close(method.monitor(Outputs(logits=z), y, START)["paper_value"], 2.82506178)
    both = DAPPr(reg_weight=2e-4, schedule="constant").monitor(Outputs(logits=t([S, S])), torch.tensor([0, 2]), START)
    assert close(both["paper_value"].mean(), -0.473852)


def test_functional_form_is_the_batch_mean():
    z, y = t([S, S]), torch.tensor([0, 2])
    wanted = (1.068692 + 2.306912) / 2 + 2e-4 * (8.488384 + 16.541406) / 2
    assert close(dappr_loss(z, y, 2e-4), wanted)
    assert close(dappr_loss(z, y, reg_weight=0.0), (1.068692 + 2.306912) / 2)


def test_uncertainty_of_the_shared_example():
    out = dappr_uncertainty(t([S]))
    assert torch.allclose(out.probs, t([[0.38568748, 0.24349034, 0.16198281, 0.20883937]]), atol=1e-7)
    assert torch.allclose(out.alpha, t([[3.12692801, 1.97407698, 1.31326169, 1.69314718]]), atol=1e-7)
    assert close(out.aleatoric, 0.614313) and close(out.epistemic, 0.493376)
    assert list(out.keys()) == ["probs", "alpha", "aleatoric", "epistemic"]
    assert out["epistemic"] is out.epistemic


GRADIENTS = {
    0: [-0.22348630, 0.08194085, 0.03540358, 0.06582024],
    2: [0.11594856, 0.08194085, -0.35005140, 0.06582024],
}


@pytest.mark.parametrize("label", [0, 2])
def test_gradient_is_the_papers(label):
    """Also the regression test for the stop-gradient: without it the label's gradient would be +0.066704."""
    z = t([S]).requires_grad_()
    divergence(z, torch.tensor([label])).sum().backward()
    assert torch.allclose(z.grad, t([GRADIENTS[label]]), atol=1e-7)
    assert z.grad[0, label] < 0


def test_gradient_of_the_regulariser():
    for label, wanted in ((0, [0, 2.45756528, 0.70638093, 1.69314718]), (2, [5.50837811, 2.45756528, 0, 1.69314718])):
        z = t([S]).requires_grad_()
        spurious_evidence(z, torch.tensor([label])).sum().backward()
        assert torch.allclose(z.grad, t([wanted]), atol=1e-7)


def test_gradient_of_two_hundred_classes():
    z = t([[math.sin(k) for k in range(200)]]).requires_grad_()
    divergence(z, torch.tensor([7])).sum().backward()
    assert close(z.grad[0, 7], -0.43133597) and close(z.grad[0, 0], 0.00142579)


@pytest.mark.parametrize("soft", [False, True])
def test_gradient_against_central_differences(soft):
    torch.manual_seed(0)
    z = (3 * torch.randn(6, 5, dtype=torch.float64)).requires_grad_()
    y = torch.randn(6, 5, dtype=torch.float64).softmax(-1) if soft else torch.randint(5, (6,))
    assert torch.autograd.gradcheck(lambda x: dappr_loss(x, y, 5e-3), (z,), eps=1e-6, atol=1e-7)


def test_more_regularisation_moves_only_wrong_classes():
    grads = []
    for weight in (0.0, 0.3):
        z = t([S]).requires_grad_()
        dappr_loss(z, torch.tensor([1]), weight).backward()
        grads.append(z.grad[0])
    difference = grads[1] - grads[0]
    assert difference[1] == 0 and (difference[[0, 2, 3]] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 100.0, 1e4])
def test_finite_at_extreme_logits(size, dtype):
    signs = torch.tensor([[s0, s1, s2, 1.0] for s0 in (-1, 1) for s1 in (-1, 1) for s2 in (-1, 1)])
    z = (size * signs).to(dtype).requires_grad_()
    for label in range(4):
        labels = torch.full((len(signs),), label)
        loss = dappr_loss(z, labels, 5e-3)
        assert loss.isfinite() and loss.dtype == torch.float32
        (grad,) = torch.autograd.grad(loss, z)
        assert grad.isfinite().all()
        assert log_possibility(z.detach().float(), labels).isfinite().all()
    out = dappr_uncertainty(z)
    assert all(out[key].isfinite().all() for key in ("probs", "alpha", "aleatoric", "epistemic"))


def test_half_precision_is_upcast():
    """In bfloat16 itself log g of these logits comes out as +1.0."""
    z = torch.tensor([[50.0, -2.0, -4.0, -5.0]])
    y = torch.tensor([0])
    assert dappr_loss(z.bfloat16(), y) == dappr_loss(z, y)
    assert dappr_uncertainty(z.bfloat16()).epistemic.dtype == torch.float32


def test_float32_agrees_with_float64():
    torch.manual_seed(1)
    z = 40 * torch.rand(500, 6, dtype=torch.float64) - 20
    y = torch.randint(6, (500,))
    for function in (divergence, log_possibility, spurious_evidence):
        exact, single = function(z, y), function(z.float(), y).double()
        assert ((exact - single).abs() <= 1e-5 * exact.abs().clamp_min(1)).all()


def random_batch(rows=200, classes=5, seed=2):
    generator = torch.Generator().manual_seed(seed)
    z = 6 * torch.randn(rows, classes, dtype=torch.float64, generator=generator)
    return z, torch.randint(classes, (rows,), generator=generator)


def test_batch_loss_is_the_mean_over_rows():
    z, y = random_batch(7)
    rows = torch.stack([dappr_loss(z[i : i + 1], y[i : i + 1], 1e-3) for i in range(7)])
    assert torch.allclose(dappr_loss(z, y, 1e-3), rows.mean())
    assert torch.allclose(dappr_loss(z.repeat(2, 1), y.repeat(2), 1e-3), dappr_loss(z, y, 1e-3))


def test_permuting_classes_changes_nothing():
    z, y = random_batch()
    order = torch.tensor([3, 0, 4, 1, 2])
    position = torch.argsort(order)
    assert torch.allclose(dappr_loss(z[:, order], position[y], 1e-3), dappr_loss(z, y, 1e-3))


def test_signs_and_monotonicity():
    z, y = random_batch()
    d = divergence(z, y)
    assert (log_possibility(z, y) <= 0).all() and (d > 0).all()
    up = torch.nn.functional.one_hot(y, 5).double()
    assert (divergence(z + 0.1 * up, y) < d).all()
    other = torch.nn.functional.one_hot((y + 1) % 5, 5).double()
    assert (divergence(z - 0.1 * other, y) < d).all()
    eu = dappr_uncertainty(z).epistemic
    assert ((eu > 0) & (eu < 1)).all()
    for k in range(5):
        assert (dappr_uncertainty(z + 0.1 * torch.eye(5, dtype=torch.float64)[k]).epistemic < eu).all()


def test_p_star_is_the_maximiser():
    """log g(p) - ln p_y is largest at p* = (alpha - y)/(alpha0 - 1), where it equals D."""
    z, y = random_batch(20)
    alpha = dappr_uncertainty(z).alpha
    alpha0 = alpha.sum(-1, keepdim=True)
    one_hot = torch.nn.functional.one_hot(y, 5)
    p_star = (alpha - one_hot) / (alpha0 - 1)
    assert torch.allclose(p_star.sum(-1), torch.ones(20, dtype=torch.float64))

    def objective(p):
        log_g = (alpha0 * alpha0.log()).squeeze(-1) + (alpha * (p / alpha).log()).sum(-1)
        return log_g - p.gather(-1, y[:, None]).squeeze(-1).log()

    best = objective(p_star)
    assert torch.allclose(best, divergence(z, y), atol=1e-9)
    torch.manual_seed(3)
    for _ in range(50):
        p = torch.distributions.Dirichlet(alpha).sample()
        assert (objective(p) <= best + 1e-9).all()


def test_soft_labels():
    y = t([[0.7, 0.3, 0.0, 0.0]])
    assert close(divergence(t([S]), y), 1.135339)
    assert close(log_possibility(t([S]), y), -0.050582)
    z, hard = random_batch()
    one_hot = torch.nn.functional.one_hot(hard, 5).double()
    assert torch.allclose(dappr_loss(z, one_hot, 1e-3), dappr_loss(z, hard, 1e-3))
    assert torch.allclose(log_possibility(z, one_hot), log_possibility(z, hard), atol=1e-9)


def test_terms_are_weighted_and_named():
    z, y = row(S, 0)
    terms = DAPPr(reg_weight=2e-4).loss(Outputs(logits=z), y, Progress(5, 20))
    assert set(terms) == {"fit", "reg"}
    assert close(terms["fit"], 1.068692) and close(terms["reg"], 1e-4 * 8.488384)
    assert DAPPr(reg_weight=2e-4).loss(Outputs(logits=z), y, START)["reg"].item() == 0


def test_ablations():
    z, y = t([S, S]), torch.tensor([0, 2])
    none = DAPPr(regulariser="none")
    assert set(none.loss(Outputs(logits=z), y, START)) == {"fit"}
    assert torch.allclose(
        none.monitor(Outputs(logits=z), y, START)["paper_value"], t([-0.137768, -0.814942]), atol=1e-6
    )
    kl = DAPPr(regulariser="kl", reg_weight=1.0, schedule="constant")
    assert torch.allclose(kl.monitor(Outputs(logits=z), y, START)["paper_value"], t([0.158924, -0.138332]), atol=1e-6)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"schedule": "warm"}, "warmup"),
        ({"regulariser": "spurius"}, "spurious"),
        ({"reg_weight": -1.0}, "at least 0"),
        ({"lambda": 1.0}, "reg_weight"),
    ],
)
def test_bad_options_name_the_valid_ones(options, words):
    with pytest.raises(UserError, match=words):
        get_method("dappr", **options)
