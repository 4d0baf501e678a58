"""What every entry of METHODS must do, whatever it is."""

import pytest
import torch

from dappr_llm.methods import METHODS, Progress, get_method, name_of
from dappr_llm.methods.base import NEEDS
from dappr_llm.outputs import Outputs

LATE = Progress(3, 10)


def loss_of(method, logits, labels, progress=LATE):
    torch.manual_seed(0)  # some losses draw noise
    return sum(method.loss(Outputs(logits=logits), labels, progress).values())


def quiet(method, logits):
    """The logits with every scale output so low that noise plays no part."""
    classes = logits.shape[-1]
    rest = torch.full((len(logits), method.num_outputs(classes) - classes), -60.0, dtype=logits.dtype)
    return torch.cat([logits, rest], dim=-1)


@pytest.mark.parametrize("name", METHODS)
def test_it_is_built_again_from_its_name_and_options(name):
    method = get_method(name)
    assert method.needs <= NEEDS
    assert name_of(method) == name
    assert get_method(name, **method.options()) == method
    assert method.num_outputs(4) % 4 == 0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
def test_finite_loss_gradient_and_scores(name, scale):
    method = get_method(name)
    torch.manual_seed(0)
    logits = (scale * torch.randn(16, method.num_outputs(4))).requires_grad_()
    labels = torch.randint(4, (16,))
    terms = method.loss(Outputs(logits=logits), labels, LATE)
    assert all(term.shape == (16,) and term.isfinite().all() for term in terms.values())
    (grad,) = torch.autograd.grad(sum(terms.values()).mean(), logits)
    assert grad.isfinite().all() and (scale > 1 or grad.abs().sum() > 0)
    out = method.predict(Outputs(logits=logits.detach()))
    assert torch.allclose(out.probs.sum(-1), torch.ones(16), atol=1e-5)
    assert out.aleatoric.isfinite().all() and out.epistemic.isfinite().all()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("value", [1e4, -1e4, 0.0])
def test_finite_where_all_logits_are_alike(name, value):
    method = get_method(name)
    logits = torch.full((2, method.num_outputs(4)), value, requires_grad=True)
    loss = loss_of(method, logits, torch.tensor([0, 3])).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite() and grad.isfinite().all()


@pytest.mark.parametrize("name", METHODS)
def test_permuting_classes_and_labels_together_changes_nothing(name):
    method = get_method(name)
    torch.manual_seed(1)
    logits, labels = 3 * torch.randn(8, 4, dtype=torch.float64), torch.randint(4, (8,))
    order = torch.tensor([2, 0, 3, 1])
    moved = torch.empty_like(order).scatter_(0, order, torch.arange(4))[labels]
    first = loss_of(method, quiet(method, logits), labels)
    assert torch.allclose(first, loss_of(method, quiet(method, logits[:, order]), moved), atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_the_gradient_is_that_of_the_loss(name):
    """Central differences in float64, at a point where no clamp is active."""
    method = get_method(name)
    torch.manual_seed(2)
    logits = torch.randn(3, method.num_outputs(4), dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 2, 3])
    assert torch.autograd.gradcheck(lambda z: loss_of(method, z, labels), (logits,), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_float32_agrees_with_float64_and_half_is_upcast(name):
    method = get_method(name)
    torch.manual_seed(3)
    logits, labels = 20 * (2 * torch.rand(64, 4) - 1), torch.randint(4, (64,))
    single = loss_of(method, quiet(method, logits), labels).double()
    double = loss_of(method, quiet(method, logits.double()), labels)
    assert ((single - double).abs() <= 1e-5 * double.abs().clamp_min(1)).all()
    half = quiet(method, logits.bfloat16())
    assert torch.equal(loss_of(method, half, labels), loss_of(method, half.float(), labels))
    assert method.predict(Outputs(logits=half)).probs.dtype == torch.float32


@pytest.mark.parametrize("name", METHODS)
def test_soft_labels_that_are_hard_give_the_same_loss(name):
    method = get_method(name)
    logits, labels = torch.randn(6, method.num_outputs(4), dtype=torch.float64), torch.randint(4, (6,))
    soft = torch.nn.functional.one_hot(labels, 4).double()
    assert torch.allclose(loss_of(method, logits, labels), loss_of(method, logits, soft), atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_more_evidence_means_less_epistemic_uncertainty(name):
    """Dirichlet methods: epistemic falls strictly in every logit; others need not know."""
    method = get_method(name)
    logits = torch.tensor([[1.0, 0.5, -1.0, 0.0]])
    out = method.predict(Outputs(logits=quiet(method, logits)))
    if out.alpha is None:
        pytest.skip("has no total evidence")
    for k in range(4):
        more = method.predict(Outputs(logits=quiet(method, logits + torch.eye(4)[k])))
        assert more.epistemic < out.epistemic


@pytest.mark.parametrize("name", METHODS)
def test_learns_a_toy_problem_and_doubts_far_input(name):
    """Three Gaussian blobs must be told apart, and evidence must be lower where no data were."""
    method = get_method(name)
    torch.manual_seed(0)
    centres = torch.tensor([[4.0, 0.0], [-2.0, 3.5], [-2.0, -3.5]])
    labels = torch.randint(3, (300,))
    inputs = centres[labels] + 0.5 * torch.randn(300, 2)
    net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, method.num_outputs(3)))
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for step in range(200):
        terms = method.loss(Outputs(logits=net(inputs)), labels, Progress(step / 10, 20))
        optimizer.zero_grad()
        sum(terms.values()).mean().backward()
        optimizer.step()
    with torch.no_grad():
        near = method.predict(Outputs(logits=net(inputs)))
        between = method.predict(Outputs(logits=net(0.1 * torch.randn(100, 2))))
    assert (near.probs.argmax(-1) == labels).float().mean() > 0.97
    assert between.epistemic.mean() > near.epistemic.mean()
