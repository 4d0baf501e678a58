"""DUQ: golden values, the double backward pass, and centroids that follow their class."""

import pytest
import torch
from golden import PRECISIONS, close

from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import HeadInfo, Progress, get_method
from dappr_llm.methods.duq import DUQHead, gradient_penalty, kernel_loss

EARLY = Progress(0, 10)


def golden_head(dtype=torch.float64):
    """Two classes in the plane: W_0 = I, W_1 = I/2, centroids at the origin and at (1, 1)."""
    head = DUQHead(2, 2, 2, length_scale=0.5).to(dtype)
    with torch.no_grad():
        head.weight.copy_(torch.stack([torch.eye(2), 0.5 * torch.eye(2)], dim=1))
        head.counts.fill_(13)
        head.sums.copy_(13 * torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    return head


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("weight, total", [(0.75, 0.331376), (0.1, 0.254450)])
def test_golden_values(weight, total, dtype, tolerance):
    x = torch.tensor([[0.5, 0.0]], dtype=dtype, requires_grad=True)
    out = golden_head(dtype)(features=x)
    kernels = torch.exp(-out["distance"])[0]
    assert close(kernels[0], 0.77880078, tolerance) and close(kernels[1], 0.20961139, tolerance)
    (slope,) = torch.autograd.grad(kernels.sum(), x, retain_graph=True)
    assert close(slope[0, 0], -0.62159224, tolerance) and close(slope[0, 1], 0.20961139, tolerance)
    assert close(kernel_loss(out["distance"], torch.tensor([[1.0, 0.0]], dtype=dtype)), 0.242615, tolerance)
    assert close(gradient_penalty(out["distance"], x), 0.118348, tolerance)
    method = get_method("duq", penalty_weight=weight, length_scale=0.5)
    terms = method.loss(Outputs(features=x, inputs=x, head=out), torch.tensor([0]), EARLY)
    assert close(sum(terms.values()), total, tolerance)


def test_scores_are_the_distance_to_the_nearest_centroid():
    out = Outputs(head=golden_head()(features=torch.tensor([[0.5, 0.0]], dtype=torch.float64)))
    found = get_method("duq").predict(out)
    assert close(found.aleatoric, 1 - 0.77880078) and close(torch.exp(-found.epistemic), 0.77880078)
    assert close(found.probs[0, 0], 0.77880078 / (0.77880078 + 0.20961139)) and found.alpha is None


def test_centroids_follow_their_class():
    head = golden_head()
    out = Outputs(features=torch.tensor([[0.5, 0.0]], dtype=torch.float64))
    get_method("duq").after_step(head, out, torch.tensor([0]))
    centroids = head.sums / head.counts.unsqueeze(-1)
    assert close(head.counts[0], 12.988) and close(centroids[0, 0], 3.849707e-05, 1e-11) and centroids[0, 1] == 0
    assert close(head.counts[1], 0.999 * 13) and torch.allclose(centroids[1], torch.ones(2, dtype=torch.float64))


def test_the_penalty_trains_the_network_through_its_gradient():
    """Double backward: the derivative of the penalty by a weight, against central differences."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    head = DUQHead(2, 3, 2, length_scale=1.0).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def penalty(weight):
        features = torch.func.functional_call(net, {"0.weight": weight}, (x,))
        return gradient_penalty(head(features=features)["distance"], x)

    assert torch.autograd.gradcheck(penalty, (net[0].weight.detach().requires_grad_(),), eps=1e-6, atol=1e-6)


def test_evaluation_has_no_penalty():
    x = torch.tensor([[0.5, 0.0]], dtype=torch.float64, requires_grad=True)
    method = get_method("duq")
    with torch.no_grad():
        out = golden_head()(features=x)
    assert set(method.loss(Outputs(inputs=x, head=out), torch.tensor([0]), EARLY)) == {"fit"}
    out = golden_head()(features=x.detach())
    assert set(method.loss(Outputs(head=out), torch.tensor([0]), EARLY)) == {"fit"}


def test_start_values_and_the_size_of_the_centroids():
    torch.manual_seed(0)
    head = get_method("duq").build_head(HeadInfo(10, 64))
    assert head.weight.shape == (64, 10, 64)
    assert head.weight.std().item() == pytest.approx((2 / 640) ** 0.5, rel=0.05)
    assert (head.sums / 13).std().item() == pytest.approx(0.05, rel=0.2)
    assert get_method("duq", centroid_dim=5).build_head(HeadInfo(10, 64)).sums.shape == (10, 5)
    apart = get_method("duq", centroid_std=1.0).build_head(HeadInfo(10, 64))
    assert (apart.sums / apart.counts.unsqueeze(-1)).std().item() == pytest.approx(1.0, rel=0.1)


def test_a_point_on_a_centroid_and_one_far_away_have_finite_gradients():
    distance = torch.tensor([[0.0, 3e9], [5e9, 1e-9]], requires_grad=True)
    loss = kernel_loss(distance, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    loss.sum().backward()
    assert loss.isfinite().all() and distance.grad.isfinite().all()
