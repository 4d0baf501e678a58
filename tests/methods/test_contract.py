"""What every entry of METHODS must do, whatever it is."""

import pytest
import torch
from fake_vision import FakeVision, blobs
from safetensors.torch import load_model, save_model

from dappr_llm.core.errors import UserError
from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import METHODS, Progress, get_method, name_of, served_by
from dappr_llm.methods.base import NEEDS

LATE = Progress(3, 10)
# Methods that read nothing but logits; the others are met through a model with their head.
ON_LOGITS = [name for name in METHODS if get_method(name).needs <= {"auxiliary_rows"}]


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


@pytest.mark.parametrize("name", ON_LOGITS)
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


@pytest.mark.parametrize("name", ON_LOGITS)
@pytest.mark.parametrize("value", [1e4, -1e4, 0.0])
def test_finite_where_all_logits_are_alike(name, value):
    method = get_method(name)
    logits = torch.full((2, method.num_outputs(4)), value, requires_grad=True)
    loss = loss_of(method, logits, torch.tensor([0, 3])).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite() and grad.isfinite().all()


@pytest.mark.parametrize("name", ON_LOGITS)
def test_permuting_classes_and_labels_together_changes_nothing(name):
    method = get_method(name)
    torch.manual_seed(1)
    logits, labels = 3 * torch.randn(8, 4, dtype=torch.float64), torch.randint(4, (8,))
    order = torch.tensor([2, 0, 3, 1])
    moved = torch.empty_like(order).scatter_(0, order, torch.arange(4))[labels]
    first = loss_of(method, quiet(method, logits), labels)
    assert torch.allclose(first, loss_of(method, quiet(method, logits[:, order]), moved), atol=1e-9)


@pytest.mark.parametrize("name", ON_LOGITS)
def test_the_gradient_is_that_of_the_loss(name):
    """Central differences in float64, at a point where no clamp is active."""
    method = get_method(name)
    torch.manual_seed(2)
    logits = torch.randn(3, method.num_outputs(4), dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 2, 3])
    assert torch.autograd.gradcheck(lambda z: loss_of(method, z, labels), (logits,), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ON_LOGITS)
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


@pytest.mark.parametrize("name", ON_LOGITS)
def test_soft_labels_that_are_hard_give_the_same_loss(name):
    method = get_method(name)
    logits, labels = torch.randn(6, method.num_outputs(4), dtype=torch.float64), torch.randint(4, (6,))
    soft = torch.nn.functional.one_hot(labels, 4).double()
    assert torch.allclose(loss_of(method, logits, labels), loss_of(method, logits, soft), atol=1e-9)


@pytest.mark.parametrize("name", ON_LOGITS)
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


def trained_on_blobs(name, steps=200, **options):
    """A small model trained as the trainer would, with every hook the method needs."""
    method = get_method(name, **options)
    points, labels = blobs()
    inputs, targets = points, labels
    if "auxiliary_rows" in method.needs:  # auxiliary rows: between the blobs and around them
        inputs = torch.cat([points, 0.3 * torch.randn(100, 2), 14 * torch.randn(200, 2)])
        targets = torch.cat([labels, torch.full((300,), -1)])
    model = FakeVision(method)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    if "fit_before" in method.needs:
        method.fit_head(model.method_head, model(points).features.detach(), labels)
    for step in range(steps):
        out = model(inputs.clone().requires_grad_("input_grad" in method.needs))
        terms = method.loss(out, targets, Progress(20 * step / steps, 20))
        optimizer.zero_grad()
        sum(terms.values()).mean().backward()
        optimizer.step()
        if "after_step" in method.needs:
            method.after_step(model.method_head, out, targets)
    model.eval()
    if "fit_after" in method.needs:
        method.fit_head(model.method_head, model(points).features.detach(), labels)
    return method, model


# What differs from the defaults so that 200 steps on a toy suffice.
TOY = {
    "duq": {"length_scale": 0.5, "decay": 0.9},
    "rs_nn": {"embedding": "pca"},
    "natpn": {"latent_dim": 4},
    "postnet": {"latent_dim": 2, "layers": 4},
}


@pytest.mark.parametrize("name", METHODS)
def test_learns_a_toy_problem_and_doubts_far_input(name, tmp_path):
    """Three blobs must be told apart, the middle between them doubted; and a saved model says the same again."""
    method, model = trained_on_blobs(name, **TOY.get(name, {}))
    points, labels = blobs()
    between = 0.1 * torch.randn(100, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        near, far = method.predict(model(points)), method.predict(model(between))
    assert (near.probs.argmax(-1) == labels).float().mean() > 0.97
    assert far.epistemic.mean() > near.epistemic.mean()
    if method.needs:  # a density, distances, or auxiliary rows: it must also know about the far outside
        with torch.no_grad():
            outside = method.predict(model(100 * torch.randn(100, 2, generator=torch.Generator().manual_seed(2))))
        assert outside.epistemic.mean() > near.epistemic.mean()

    save_model(model, str(tmp_path / "model.safetensors"))
    again = FakeVision(method, seed=9)
    load_model(again, str(tmp_path / "model.safetensors"))
    with torch.no_grad():
        loaded = method.predict(again.eval()(points))
    for key in ("probs", "aleatoric", "epistemic"):
        assert torch.equal(loaded[key], near[key]), key


WITH_HEAD = [name for name in METHODS if name not in ON_LOGITS]


def test_only_methods_with_a_head_may_do_without_logits():
    for name in METHODS:
        method = get_method(name)
        head = FakeVision(method).method_head
        assert (head is not None) == (name in WITH_HEAD)
        assert method.num_outputs(3) > 0 or head is not None


@pytest.mark.parametrize("name", WITH_HEAD)
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
def test_heads_stay_finite_at_extreme_input(name, scale):
    """Features and logits far outside anything seen: loss, gradients and scores must be numbers."""
    method = get_method(name, **TOY.get(name, {}))
    model = FakeVision(method)
    head = model.method_head
    torch.manual_seed(0)
    features = (scale * torch.randn(16, 32)).requires_grad_()
    outputs = method.num_outputs(3)
    logits = (scale * torch.randn(16, outputs)).requires_grad_() if outputs else None
    labels = torch.randint(3, (16,))
    out = Outputs(logits, features, features, head(features=features, logits=logits))
    assert all(value.shape[0] == 16 and value.isfinite().all() for value in out.head.values())
    terms = method.loss(out, labels, LATE)
    assert all(term.shape == (16,) and term.isfinite().all() for term in terms.values())
    read = [p for p in (features, logits, *head.parameters()) if p is not None]
    grads = torch.autograd.grad(sum(terms.values()).mean(), read, allow_unused=True)
    assert any(grad is not None for grad in grads)
    assert all(grad.isfinite().all() for grad in grads if grad is not None)
    found = method.predict(Outputs(logits, features, None, head.eval()(features=features, logits=logits)))
    assert torch.allclose(found.probs.sum(-1), torch.ones(16), atol=1e-5)
    assert found.aleatoric.isfinite().all() and found.epistemic.isfinite().all()


@pytest.mark.parametrize("name", WITH_HEAD)
def test_a_row_is_predicted_alike_in_every_company(name):
    method, model = trained_on_blobs(name, steps=5, **TOY.get(name, {}))
    points = 3 * torch.randn(6, 2)
    with torch.no_grad():
        together = method.predict(model(points))
        alone = [method.predict(model(point[None])) for point in points]
        gathered = model(points)
        gathered = method.predict(Outputs(logits=gathered.logits, head=gathered.head))  # what ranks send
    for key in ("probs", "aleatoric", "epistemic"):
        assert torch.allclose(together[key], torch.cat([one[key] for one in alone]), atol=1e-5), key
        assert torch.equal(together[key], gathered[key]), key


@pytest.mark.parametrize("name", WITH_HEAD)
def test_several_passes_are_refused_or_averaged(name):
    try:
        method = get_method(name, passes=3)
    except UserError as error:
        assert "passes is 3; allowed: a whole number of at least 1 and at most 1" in str(error)
        return
    out = FakeVision(method).eval()(torch.randn(4, 2))
    stacked = Outputs(head={key: torch.stack([value] * 3, dim=1) for key, value in out.head.items()})
    assert torch.allclose(method.predict(stacked).probs, method.predict(out).probs)


def test_every_need_is_met_by_some_method_and_said_by_name():
    assert set().union(*(get_method(name).needs for name in METHODS)) == NEEDS
    assert set(served_by(frozenset({"auxiliary_rows"}))) == set(ON_LOGITS)
