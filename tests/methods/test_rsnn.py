"""RS-NN: golden values, masses and pignistic probabilities, and the choice of sets."""

import pytest
import torch
from golden import PRECISIONS, close

from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import HeadInfo, Progress, get_method
from dappr_llm.methods.class_gaussians import fit_gaussians
from dappr_llm.methods.rsnn import RandomSetHead, mobius
from dappr_llm.methods.rsnn_class_sets import choose_sets, ellipsoid_points, embed, grow_sets

EARLY = Progress(0, 10)


def golden_head(dtype=torch.float64):
    head = RandomSetHead(5, 3, budget=1)
    head.use([(0, 1)])
    return head.to(dtype)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
def test_golden_values(dtype, tolerance):
    head = golden_head(dtype)
    scores = torch.tensor([[1.0, -1.0, -2.0, 1.5]], dtype=dtype)
    mass = (scores.sigmoid() @ head.mobius)[0]
    for found, wanted in zip(mass, [0.73105858, 0.26894142, 0.11920292, -0.18242552], strict=True):
        assert close(found, wanted, tolerance)
    out = Outputs(head=head.read(scores))
    assert close(out.head["negative_mass"], 0.04560638, tolerance)
    method = get_method("rs_nn")
    for label, wanted in ((0, 0.238762), (2, 1.363762)):
        terms = method.loss(out, torch.tensor([label]), EARLY)
        assert close(sum(terms.values()), wanted, tolerance) and terms["sum"] == 0
    found = method.predict(out)
    for value, wanted in zip(found.probs[0], [0.65319574, 0.24029728, 0.10650698], strict=True):
        assert close(value, wanted, tolerance)
    assert close(found.epistemic, 0.859344, tolerance) and close(found.aleatoric, 1 - 0.65319574, tolerance)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
def test_golden_penalties(dtype, tolerance):
    out = Outputs(head=golden_head(dtype).read(torch.tensor([[2.0, 2.0, 2.0, 3.0]], dtype=dtype)))
    terms = get_method("rs_nn", mass_weight=1, sum_weight=1).loss(out, torch.tensor([0]), EARLY)
    assert close(terms["mass"], 0.20225501, tolerance) and close(terms["sum"], 0.83337120, tolerance)


def test_the_sum_is_judged_by_the_mean_over_rows():
    out = Outputs(
        head={"set_loss": torch.zeros(2, 3), "negative_mass": torch.zeros(2), "total_mass": torch.tensor([3.0, 0.0])}
    )
    assert get_method("rs_nn", sum_weight=1).loss(out, torch.tensor([0, 1]), EARLY)["sum"].tolist() == [0.5, 0.5]


def test_masses_and_probabilities_sum_to_one():
    torch.manual_seed(0)
    head = RandomSetHead(6, 5, budget=8)
    head.use([(0, 1), (2, 3), (0, 1, 2), (3, 4), (0, 1, 2, 3, 4)])  # three slots stay free
    scores = torch.cat([10 * torch.randn(50, 13), torch.full((1, 13), -1e4), torch.full((1, 13), 1e4)])
    masses = head.masses(scores.sigmoid() @ head.mobius)
    assert torch.allclose(masses.sum(-1), torch.ones(52)) and (masses >= 0).all()
    found = get_method("rs_nn").predict(Outputs(head=head.read(scores)))
    assert torch.allclose(found.probs.sum(-1), torch.ones(52)) and (found.probs >= 0).all()
    assert torch.allclose(found.probs[50], torch.full((5,), 0.2))  # no belief at all: all classes at once


def test_masses_of_a_true_belief_function_are_given_back():
    """Beliefs summed from masses over all subsets lead back to these masses."""
    sets = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    members = torch.zeros(7, 3)
    for row, chosen in enumerate(sets):
        members[row, list(chosen)] = 1
    mass = torch.tensor([0.1, 0.2, 0.05, 0.15, 0.1, 0.1, 0.3])
    subset = members @ members.T == members.sum(-1, keepdim=True)  # [B, A]: B within A
    assert torch.allclose((mass @ subset.float()) @ mobius(members), mass, atol=1e-6)


def test_free_slots_play_no_part():
    scores = torch.randn(4, 4)
    used = golden_head(torch.float32)
    wide = RandomSetHead(5, 3, budget=3)
    wide.use([(0, 1)])
    padded = torch.cat([scores, torch.randn(4, 2)], dim=-1)
    for key, value in used.read(scores).items():
        assert torch.allclose(wide.read(padded)[key], value, atol=1e-6), key


def blobs(centres, spread=0.5, rows=60, dim=6):
    torch.manual_seed(0)
    labels = torch.arange(len(centres)).repeat_interleave(rows)
    points = torch.nn.functional.pad(torch.tensor(centres), (0, dim - len(centres[0])))
    return points[labels] + spread * torch.randn(len(labels), dim), labels


CENTRES = [[0.0, 0.0, 0.0], [0.8, 0.0, 0.0], [9.0, 0.0, 0.0], [9.0, 0.9, 0.0], [9.0, 0.0, 0.9], [0.0, 9.0, 9.0]]


@pytest.mark.parametrize("embedding", ["pca", "tsne"])
def test_sets_are_those_that_overlap(embedding):
    features, labels = blobs(CENTRES)
    found = choose_sets(features, labels, 6, 5, embedding)
    assert {(0, 1), (2, 3), (2, 4), (3, 4), (2, 3, 4)} >= set(found) >= {(0, 1), (2, 3)}


def test_classes_that_are_apart_make_no_sets():
    features, labels = blobs([[0.0, 0.0, 0.0], [50.0, 0.0, 0.0], [0.0, 50.0, 0.0]])
    assert choose_sets(features, labels, 3, 5, "pca") == []


def test_overlap_is_intersection_over_union():
    """Two balls of radius 1 at distance 1: intersection 5 pi / 12, union 8 pi / 3 less that."""
    radius = 7.815**0.5
    means = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    whitening = radius * torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    inside, weights = ellipsoid_points(means, whitening, torch.ones(2, dtype=torch.bool))
    ((overlap, chosen),) = grow_sets(inside, weights, budget=3)
    common = 5 / 12
    assert chosen == (0, 1) and overlap == pytest.approx(common / (8 / 3 - common), abs=0.03)


def test_the_beam_finds_what_a_full_search_finds():
    from itertools import combinations

    features, labels = blobs(CENTRES[:5], spread=0.9)
    means, whitening, present = fit_gaussians(embed(features, "pca"), labels, 5)
    inside, weights = ellipsoid_points(means, whitening, present)
    every = {}
    for size in range(2, 6):
        for chosen in combinations(range(5), size):
            some = inside[:, list(chosen)]
            every[chosen] = ((weights * some.all(-1)).sum() / (weights * some.any(-1)).sum()).item()
    wanted = sorted((-value, chosen) for chosen, value in every.items() if value > 0)[:4]
    assert [chosen for _, chosen in grow_sets(inside, weights, 4)] == [chosen for _, chosen in wanted]


def test_chosen_sets_are_kept_in_the_head():
    method = get_method("rs_nn", budget=4, embedding="pca")
    head = method.build_head(HeadInfo(6, 6))
    assert head.members[6:].sum() == 0
    method.fit_head(head, *blobs(CENTRES))
    assert head.members[6:].sum() >= 4 and torch.equal(head.mobius, mobius(head.members))
    other = method.build_head(HeadInfo(6, 6))
    other.load_state_dict(head.state_dict())
    assert torch.equal(other.members, head.members)
    assert len(get_method("rs_nn").build_head(HeadInfo(2, 6)).members) == 3  # two classes have one set
