"""DAEDL and its Gaussians; F-EDL."""

import pytest
import torch
from golden import PRECISIONS, close, logits

from dappr_llm.core.errors import UserError
from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import HeadInfo, Progress, get_method
from dappr_llm.methods.class_gaussians import fit_gaussians, log_density
from dappr_llm.methods.dirichlet import kl_to_symmetric
from dappr_llm.methods.edl import expected_error
from dappr_llm.methods.fedl import flexible_moments

EARLY = Progress(0, 10)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("label, error, kl, total", [(0, 0.119632 + 0.040346, 1.109109, 0.215433),
                                                     (2, 1.469124 + 0.040346, 2.055793, 1.612259)])  # fmt: skip
def test_daedl_golden_values(label, error, kl, total, dtype, tolerance):
    terms = get_method("daedl").loss(Outputs(logits=logits(dtype)), torch.tensor([label]), EARLY)
    assert close(terms["fit"], error, max(tolerance, 2e-6))  # the reference gives two rounded parts
    assert close(terms["reg"] / 0.05, kl, tolerance)
    assert close(sum(terms.values()), total, tolerance)


@pytest.mark.parametrize(
    "share, alpha0, largest", [(1.0, 10.405657, 0.710100), (0.5, 5.608838, 0.484643), (0.0, 4, 0.25)]
)
def test_density_scales_the_logits(share, alpha0, largest):
    out = Outputs(logits=logits(), head={"density": torch.tensor([share], dtype=torch.float64)})
    found = get_method("daedl").predict(out)
    assert (
        close(found.alpha.sum(), alpha0) and close(found.probs.max(), largest) and close(found.epistemic, 4 / alpha0)
    )


def test_golden_density():
    means = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    whitening = torch.stack([torch.eye(2), torch.diag(torch.tensor([0.5, 2.0]).rsqrt())]).double()
    whitening[1] = torch.diag(torch.tensor([0.5, 2.0], dtype=torch.float64).rsqrt())
    points = torch.tensor([[0.0, 0.0], [1.0, 0.5], [6.0, 6.0]], dtype=torch.float64)
    found = log_density(points, means, whitening, torch.ones(2, dtype=torch.bool))
    for value, wanted in zip(found, [-1.819727, -1.964743, -26.837860], strict=True):
        assert close(value, wanted)


def test_many_rows_give_the_plain_gaussian():
    torch.manual_seed(0)
    mixing = torch.randn(4, 4, dtype=torch.float64)
    labels = torch.randint(2, (20000,))
    features = torch.randn(20000, 4, dtype=torch.float64) @ mixing + 5 * labels.unsqueeze(-1)
    for shared in (False, True):
        means, whitening, present = fit_gaussians(features, labels, 2, shared)
        covariance = torch.linalg.inv(whitening.mT @ whitening)
        plain = [features[labels == k].T.cov() for k in range(2)]
        for k in range(len(covariance)):
            assert torch.allclose(covariance[k], plain[k], rtol=0.05, atol=0.05)
        assert present.all() and torch.allclose(means[1] - means[0], torch.full((4,), 5.0).double(), atol=0.2)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 10])
def test_few_rows_per_class_give_a_usable_density(rows, shared):
    """64 features and a handful of rows: near rows must be likelier than far ones, and nothing explodes."""
    torch.manual_seed(0)
    labels = torch.arange(5).repeat_interleave(rows)
    centres = 3 * torch.randn(5, 64)
    features = centres[labels] + torch.randn(len(labels), 64)
    fitted = fit_gaussians(features, labels, 5, shared)
    near = log_density((centres.repeat(20, 1) + torch.randn(100, 64)).double(), *fitted)
    far = log_density(20 * torch.randn(100, 64).double(), *fitted)
    assert near.isfinite().all() and far.isfinite().all()
    assert near.min() > far.max()
    scales = torch.linalg.svdvals(fitted[1])
    assert (scales.amax(-1) / scales.amin(-1)).max() < 1e5


def test_dead_features_absent_classes_and_equal_rows():
    features = torch.zeros(6, 3)
    features[:, 0] = torch.tensor([0.0, 1.0, 2.0, 5.0, 5.0, 5.0])
    labels = torch.tensor([0, 0, 0, 2, 2, 2])
    means, whitening, present = fit_gaussians(features, labels, 3)
    assert present.tolist() == [True, False, True] and whitening.isfinite().all()
    values = log_density(torch.randn(4, 3).double(), means, whitening, present)
    assert values.isfinite().all()
    with pytest.raises(UserError, match="NaN or Inf"):
        fit_gaussians(features * torch.nan, labels, 3)


def test_the_density_is_one_until_fitted_and_then_says_how_near():
    torch.manual_seed(0)
    method = get_method("daedl")
    head = method.build_head(HeadInfo(3, 8, (100, 100, 100))).eval()
    labels = torch.arange(3).repeat_interleave(100)
    features = 4 * torch.randn(3, 8)[labels] + torch.randn(300, 8)
    assert (head(features)["density"] == 1).all()
    method.fit_head(head, features, labels)
    inside, outside = head(features)["density"], head(features + 50)["density"]
    assert inside.max() == 1 and inside.min() < 1e-4 < inside.mean() and (outside <= 1e-5).all()
    z = torch.randn(300, 3)
    far = method.predict(Outputs(logits=z, head={"density": outside}))
    near = method.predict(Outputs(logits=z, head={"density": inside}))
    assert torch.equal(far.probs.argmax(-1), z.argmax(-1))  # evidence goes, the answer stays
    assert (far.aleatoric >= near.aleatoric - 1e-6).all()


@pytest.mark.parametrize(
    "kind, counts, matrices", [("auto", (100, 16, 50), 3), ("auto", (100, 15, 50), 1), ("auto", None, 1),
                               ("full", None, 3), ("shared", (99, 99, 99), 1)]
)  # fmt: skip
def test_covariances_are_shared_where_rows_are_few(kind, counts, matrices):
    head = get_method("daedl", covariance=kind).build_head(HeadInfo(3, 8, counts))
    assert len(head.whitening) == matrices


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
def test_fedl_golden_values(dtype, tolerance):
    p_logits = torch.tensor([[1.0, 0.0, 0.0, -1.0]], dtype=dtype)
    out = Outputs(logits=logits(dtype), head={"p_logits": p_logits, "tau_logit": torch.tensor([0.5], dtype=dtype)})
    method = get_method("fedl")
    found = method.predict(out)
    for value, wanted in zip(found.probs[0], [0.69506444, 0.16171173, 0.04915709, 0.09406674], strict=True):
        assert close(value, wanted, tolerance)
    assert close(found.epistemic, 0.042986, tolerance) and close(found.aleatoric, 0.436484, tolerance)
    for label, wanted in (
        (0, (0.130401, 0.042986, 0.299284, 0.472671)),
        (2, (1.422216, 0.042986, 0.974953, 2.440155)),
    ):
        terms = method.loss(out, torch.tensor([label]), EARLY)
        for value, part in zip((*terms.values(), sum(terms.values())), wanted, strict=True):
            assert close(value, part, tolerance)


def test_fedl_moments_are_those_of_the_mixture():
    """Against a sum over the mixture's Dirichlets, and against EDL's where tau vanishes."""
    torch.manual_seed(0)
    z, p_logits, tau_logit = (torch.randn(6, 4).double(), torch.randn(6, 4).double(), torch.randn(6).double())
    mean, variance, p = flexible_moments(z, p_logits, tau_logit)
    tau = torch.nn.functional.softplus(tau_logit)
    first, second = torch.zeros_like(z), torch.zeros_like(z)
    for j in range(4):
        alpha = z.exp() + tau.unsqueeze(-1) * torch.eye(4).double()[j]
        total = alpha.sum(-1, keepdim=True)
        first += p[:, j : j + 1] * alpha / total
        second += p[:, j : j + 1] * alpha * (alpha + 1) / (total * (total + 1))
    assert torch.allclose(mean, first) and torch.allclose(variance, second - first.square())
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    head = {"p_logits": p_logits, "tau_logit": torch.full((6,), -60.0).double()}
    terms = get_method("fedl").loss(Outputs(logits=z, head=head), labels, EARLY)
    target = torch.nn.functional.one_hot(labels, 4).double()
    assert torch.allclose(terms["fit"] + terms["variance"], expected_error(z.exp(), target))


def test_daedl_is_edl_with_an_exponential():
    z, labels = torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 3, 0])
    target = torch.nn.functional.one_hot(labels, 4).double()
    terms = get_method("daedl").loss(Outputs(logits=z), labels, EARLY)
    assert torch.allclose(terms["fit"], expected_error(z.exp(), target), atol=1e-5)
    assert torch.allclose(terms["reg"], 0.05 * kl_to_symmetric(target + (1 - target) * z.exp()), atol=1e-4)
