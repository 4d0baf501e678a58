"""Schedules, the registry, and cross-entropy."""

import pytest
import torch

from dappr_llm.core.errors import UserError
from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import METHODS, Progress, get_method, name_of
from dappr_llm.methods.base import scheduled
from dappr_llm.methods.dappr import DAPPr

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


def test_unknown_method_names_the_nearest():
    with pytest.raises(UserError, match="'dappr'"):
        get_method("dapr")


def test_a_method_object_passes_through():
    method = DAPPr(reg_weight=1e-3)
    assert get_method(method) is method


def test_an_ablation_is_named_by_what_it_is():
    assert name_of(DAPPr()) == "dappr"
    assert name_of(DAPPr(regulariser="none", reg_weight=0.1)) == "dappr_no_reg"
    assert name_of(get_method("edl_spurious", reg_weight=3e-4)) == "edl_spurious"


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_option_names_the_valid_ones(name):
    with pytest.raises(UserError, match=f"{name}.*no option 'lamda'.*passes"):
        get_method(name, lamda=1)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("mc_dropout", {"passes": 1}, "passes is 1; allowed: a whole number of at least 2"),
        ("dappr", {"passes": 0}, "passes is 0; allowed: a whole number of at least 1"),
        ("edl", {"reg_weight": -1}, "reg_weight is -1; allowed: a number of at least 0"),
        ("edl", {"regulariser": "l2"}, "regulariser is 'l2'.*kl"),
        ("iedl", {"fisher_weight": -1}, "fisher_weight"),
        ("redl", {"prior": 0}, "prior"),
        ("ib_edl", {"draws": 0}, "draws"),
        ("dappr", {"schedule": "cosine"}, "schedule is 'cosine'.*constant"),
        ("dappr", {"reg_weight": float("nan")}, "reg_weight is nan"),
        ("dappr", {"reg_weight": "1"}, "did you mean 1"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        get_method(name, **options)
