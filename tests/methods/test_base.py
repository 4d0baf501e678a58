"""Schedules, the registry, and cross-entropy."""

import pytest
import torch

from dappr_llm.errors import UserError
from dappr_llm.methods import METHODS, Progress, get_method, name_of
from dappr_llm.methods.base import NEEDS, scheduled
from dappr_llm.methods.dappr import DAPPr
from dappr_llm.outputs import Outputs

S = torch.tensor([[2.0, 0.5, -1.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    "epoch, value", [(0, 0), (0.99, 0), (1, 2e-5), (5, 1e-4), (5.7, 1e-4), (10, 2e-4), (37, 2e-4)]
)
def test_warmup_counts_whole_epochs_from_zero(epoch, value):
    assert scheduled(2e-4, "warmup", Progress(epoch, 100)) == pytest.approx(value, abs=1e-18)


@pytest.mark.parametrize("epoch, value", [(0, 0), (1, 5e-5), (50, 2.5e-3), (99, 4.95e-3), (99.9999, 4.95e-3)])
def test_linear(epoch, value):
    assert scheduled(5e-3, "linear", Progress(epoch, 100)) == pytest.approx(value)


def test_constant_and_a_whole_epoch_just_missed_by_rounding():
    assert scheduled(5e-3, "constant", Progress(0, 1)) == 5e-3
    assert scheduled(2e-4, "warmup", Progress(3 - 1e-12, 10)) == pytest.approx(6e-5)


def test_evaluation_does_not_depend_on_when_it_is_taken():
    assert scheduled(2e-4, "warmup", Progress.final(10)) == 2e-4
    assert scheduled(5e-3, "linear", Progress.final(8)) == 5e-3


def test_cross_entropy_golden_values():
    method = get_method("ce")
    for label, wanted in ((0, 0.342350), (2, 3.342350)):
        terms = method.loss(Outputs(logits=S), torch.tensor([label]), Progress(0, 1))
        assert terms["fit"].item() == pytest.approx(wanted, abs=1e-6)
    out = method.predict(Outputs(logits=S))
    assert out.aleatoric.item() == pytest.approx(0.289900, abs=1e-6)
    assert out.epistemic.item() == pytest.approx(0.878281, abs=1e-6)
    assert out.alpha is None


def test_cross_entropy_reads_several_passes_as_mc_dropout():
    members = torch.tensor([[[2, 0.5, -1, 0], [1, 1.5, -0.5, 0.2], [2.5, -0.5, 0, -1]]], dtype=torch.float64)
    out = get_method("ce", passes=3).predict(Outputs(logits=members))
    wanted = torch.tensor([[0.62391049, 0.23257149, 0.05772490, 0.08579313]], dtype=torch.float64)
    assert torch.allclose(out.probs, wanted, atol=1e-7)
    assert out.aleatoric.item() == pytest.approx(0.376090, abs=1e-6)
    assert out.epistemic.item() == pytest.approx(0.146984, abs=1e-6)
    assert out.members.shape == (3, 1, 4)


@pytest.mark.parametrize("name", METHODS)
def test_contract(name):
    """What every entry of METHODS must do, whatever it is."""
    method = get_method(name)
    assert method.needs <= NEEDS
    assert name_of(method) == name
    assert get_method(name, **method.options()) == method
    torch.manual_seed(0)
    for scale in (1.0, 100.0, 1e4):
        logits = (scale * torch.randn(16, method.num_outputs(4))).requires_grad_()
        labels = torch.randint(4, (16,))
        terms = method.loss(Outputs(logits=logits), labels, Progress(3, 10))
        assert all(term.shape == (16,) and term.isfinite().all() for term in terms.values())
        (grad,) = torch.autograd.grad(sum(terms.values()).mean(), logits)
        assert grad.isfinite().all() and (scale > 1 or grad.abs().sum() > 0)
        out = method.predict(Outputs(logits=logits.detach()))
        assert torch.allclose(out.probs.sum(-1), torch.ones(16), atol=1e-5)
        assert out.aleatoric.isfinite().all() and out.epistemic.isfinite().all()


@pytest.mark.parametrize("name", METHODS)
def test_learns_a_toy_problem_and_doubts_far_input(name):
    """Three Gaussian blobs; a linear model must separate them, and evidence must be lower where no data were."""
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


def test_unknown_method_names_the_nearest():
    with pytest.raises(UserError, match="'dappr'"):
        get_method("dapr")


def test_a_method_object_passes_through():
    method = DAPPr(reg_weight=1e-3)
    assert get_method(method) is method
