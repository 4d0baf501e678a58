"""Radial flows, PostNet and NatPN."""

import pytest
import torch
from golden import PRECISIONS, close

from dappr_llm.core.errors import UserError
from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import HeadInfo, Progress, get_method
from dappr_llm.methods.dirichlet import entropy
from dappr_llm.methods.flows import RadialFlows
from dappr_llm.methods.natpn import log_budget, natural_alpha
from dappr_llm.methods.postnet import PostNetHead, class_budget, evidence_to_alpha

LAYERS = [((0.1, 0.0), 0.2, -0.3), ((-0.5, 0.4), -0.1, 0.6)]  # centre, a', b'
POINT = [[0.3, -0.2]]
EARLY = Progress(0, 10)


def set_layers(flows, where):
    """`where` maps (layer, flow) to one of LAYERS."""
    with torch.no_grad():
        for (layer, flow), (centre, a, b) in where.items():
            flows.centres[layer, flow] = torch.tensor(centre)
            flows.raw_a[layer, flow], flows.raw_b[layer, flow] = a, b


def random_flows(dim=3, layers=4, flows=2):
    torch.manual_seed(0)
    flow = RadialFlows(dim, layers, flows).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return flow


def test_the_log_determinant_is_that_of_the_jacobian():
    flow = random_flows()
    for point in 2 * torch.randn(5, 3, dtype=torch.float64):
        jacobian = torch.autograd.functional.jacobian(lambda x: flow(x[None])[0][0], point)  # [F, L, L]
        sign, wanted = torch.linalg.slogdet(jacobian)
        assert (sign == 1).all() and torch.allclose(flow(point[None])[1][0], wanted, atol=1e-10)


def test_a_flow_is_a_density():
    """It integrates to 1 over the plane."""
    flow = random_flows(dim=2, layers=3, flows=2)
    axis = torch.linspace(-30, 30, 1501, dtype=torch.float64)
    with torch.no_grad():
        density = flow.log_prob(torch.cartesian_prod(axis, axis)).exp()
    assert torch.allclose(density.sum(0) * (axis[1] - axis[0]) ** 2, torch.ones(2, dtype=torch.float64), atol=2e-3)


def test_flows_are_finite_at_their_centres_and_far_away():
    flow = random_flows().float()
    x = torch.cat([flow.centres[0].detach(), torch.full((2, 3), 1e6)]).requires_grad_()
    value = flow.log_prob(x)
    grads = torch.autograd.grad(value.sum(), [x, *flow.parameters()])
    assert value.isfinite().all() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
def test_postnet_golden_values(dtype, tolerance):
    head = PostNetHead(2, 2, 1, class_budget((10, 20), "counts")).to(dtype)
    if dtype == torch.float64:  # the buffer was float32 before
        head.log_counts = torch.tensor([10.0, 20.0], dtype=dtype).log()
    set_layers(head.flows, {(0, 0): LAYERS[0], (0, 1): LAYERS[1]})
    point = torch.tensor(POINT, dtype=dtype)
    density = head.flows.log_prob(point)[0]
    assert close(density[0], -2.32005999, tolerance) and close(density[1], -1.71361726, tolerance)
    out = Outputs(head={"log_evidence": head.log_evidence(point)})
    method = get_method("postnet")
    found = method.predict(out)
    assert close(found.alpha[0, 0], 1.98267690, tolerance) and close(found.alpha[0, 1], 4.60425473, tolerance)
    assert close(found.probs.max(), 0.698998, tolerance)
    assert close(entropy(found.alpha.double()), -0.43914968, tolerance)
    for label, wanted in ((0, 1.395717), (1, 0.392795)):
        assert close(sum(method.loss(out, torch.tensor([label]), EARLY).values()), wanted, tolerance)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
def test_natpn_golden_values(dtype, tolerance):
    flow = RadialFlows(2, 2).to(dtype)
    set_layers(flow, {(0, 0): LAYERS[0], (1, 0): LAYERS[1]})
    density = flow.log_prob(torch.tensor(POINT, dtype=dtype)).squeeze(-1)
    assert close(density, -2.09787400, tolerance)
    assert close(density + log_budget(2, "normal"), 0.43315024, tolerance)
    class_logits = torch.tensor([[1.0, -0.5]], dtype=dtype)
    out = Outputs(head={"class_logits": class_logits, "log_density": density, "flow_density": density})
    method = get_method("natpn", latent_dim=2)
    alpha = method.alpha(out)[0]
    assert close(alpha[0], 2.26078805, tolerance) and close(alpha[1], 1.28131984, tolerance)
    middle = Progress(5, 10)
    for label, wanted in ((0, 0.538433), (1, 1.307565)):
        assert close(sum(method.loss(out, torch.tensor([label]), middle).values()), wanted, tolerance)
    found = method.predict(out)
    assert close(torch.special.entr(found.probs).sum(), 0.654412, tolerance)
    assert close(found.epistemic, 2.09787400, tolerance)


def test_natpn_epistemic_has_no_ties_where_evidence_has():
    density = torch.tensor([-500.0, -400.0, 50.0, 60.0])
    out = Outputs(head={"class_logits": torch.zeros(4, 3), "log_density": density, "flow_density": density})
    method = get_method("natpn")
    assert method.predict(out).epistemic.unique().numel() == 4
    alpha0 = method.alpha(out).sum(-1)
    assert alpha0[0] == alpha0[1] and alpha0[2] == alpha0[3] and alpha0[2] == pytest.approx(3 + torch.e**30, rel=1e-6)


def test_evidence_out_of_bounds_can_come_back():
    log_evidence = torch.tensor([[-90.0, 90.0]], requires_grad=True)
    alpha = natural_alpha(log_evidence[0], torch.zeros(2, 3))
    assert alpha.max().item() == pytest.approx(1 + torch.e**30 / 3, rel=1e-5)
    (grad,) = torch.autograd.grad(alpha.log().sum(), log_evidence)
    assert grad[0, 1] > 0.9 * 3 and grad.isfinite().all()
    assert evidence_to_alpha(torch.tensor([-100.0])).item() == 1


@pytest.mark.parametrize(
    "epoch, epochs, flow_only",
    [(0, 100, True), (2.99, 100, True), (3, 100, False), (99.9, 100, False), (100, 100, False),
     (0, 10, True), (1, 10, False), (0.05, 1, True), (0.5, 1, False)],
)  # fmt: skip
def test_natpn_phases(epoch, epochs, flow_only):
    method, progress = get_method("natpn"), Progress(epoch, epochs)
    head = method.build_head(HeadInfo(3, 5))
    assert method.flow_only(progress) == flow_only
    trained = method.trained(head, progress)
    assert (trained is None) != flow_only
    terms = method.loss(Outputs(head=head(features=torch.randn(4, 5))), torch.tensor([0, 1, 2, 0]), progress)
    sum(terms.values()).mean().backward()
    moved = {name for name, p in head.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    every = dict(head.named_parameters())
    assert moved == {name for name in every if not flow_only or name.startswith("flow.")}
    assert all(p.grad is not None for p in head.parameters())  # distributed backward passes wait for each


def test_natpn_flow_is_fitted_to_final_features_and_nothing_else_moves():
    """Two far groups of features: at the start the gap between them has more density than they, afterwards less."""
    torch.manual_seed(0)
    method = get_method("natpn", latent_dim=4, flow_finetune_steps=300)
    head = method.build_head(HeadInfo(2, 8)).eval()
    features = torch.randn(400, 8)
    with torch.no_grad():
        shift = 3 * torch.nn.functional.normalize(
            torch.linalg.lstsq(head.latent.weight, torch.ones(4)).solution, dim=0
        )
        labels = torch.arange(400) % 2
        features = 0.3 * features + 4 * shift * (2 * labels - 1).unsqueeze(-1)
    before = {name: value.clone() for name, value in head.state_dict().items()}

    def gap():
        with torch.no_grad():
            own, between = (head(features=f)["log_density"].mean() for f in (features, 0.3 * torch.randn(200, 8)))
        return own - between

    assert gap() < 0
    method.fit_head(head, features, labels)
    assert gap() > 0
    changed = {name for name, value in head.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith("flow.") for name in changed)
    assert all(p.grad is None for p in head.parameters())


def test_postnet_needs_a_row_of_every_class():
    with pytest.raises(UserError, match="class 1 has no training row"):
        get_method("postnet").build_head(HeadInfo(3, 5, (4, 0, 2)))
    with pytest.raises(UserError, match="class_counts"):
        get_method("postnet").build_head(HeadInfo(3, 5))
    with pytest.raises(UserError, match="state their width"):
        get_method("natpn").build_head(HeadInfo(3))


@pytest.mark.parametrize(
    "budget, wanted", [("counts", [10, 30]), ("one", [1, 1]), ("log", [2.397895, 3.433987]), ("share", [0.25, 0.75])]
)
def test_postnet_budgets(budget, wanted):
    assert torch.allclose(class_budget((10, 30), budget).exp(), torch.tensor(wanted, dtype=torch.float32))
