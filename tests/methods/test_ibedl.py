"""IB-EDL: golden values for given noise, and noise that belongs to the row."""

import pytest
import torch
from golden import PRECISIONS, close, logits

from dappr_llm.core.outputs import Outputs, from_alpha
from dappr_llm.methods import Progress, get_method
from dappr_llm.methods.ibedl import draw_alpha, information

RAW = [-1.0, -1.0, -0.5, 0.0]
NOISE = [[[0.0] * 4], [[1.0, -1.0, 0.5, 0.0]]]


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
@pytest.mark.parametrize("label, mean, total", [(0, 0.562678, 0.562723), (2, (1.033217 + 1.028983) / 2, 1.031145)])
def test_golden_values(label, mean, total, dtype, tolerance):
    z, raw, noise = logits(dtype), logits(dtype, RAW), torch.tensor(NOISE, dtype=dtype)
    assert close(information(z, raw), 4.510065, tolerance)
    terms = get_method("ib_edl").terms(z, raw, noise, torch.tensor([label]))
    assert close(terms["fit"], mean, tolerance)
    assert close(sum(terms.values()), total, tolerance)


@pytest.mark.parametrize(
    "penalty, alpha, epistemic",
    [
        (0.0, [3.26726699, 1.88247295, 1.34799632, 1.69314718], 0.488348),
        (0.5, [3.11063614, 1.72584211, 1.11095783, 1.34657359], 0.548395),
    ],
)
def test_golden_prediction(penalty, alpha, epistemic):
    z, raw, noise = logits(), logits(values=RAW), torch.tensor(NOISE, dtype=torch.float64)
    found = get_method("ib_edl", scale_penalty=penalty).lowered(draw_alpha(z, raw, noise).mean(0), raw)
    assert torch.allclose(found, torch.tensor([alpha], dtype=torch.float64), atol=1e-7)
    assert close(from_alpha(found).epistemic, epistemic)


def test_a_row_is_predicted_alike_in_every_company():
    method = get_method("ib_edl")
    torch.manual_seed(0)
    rows = torch.randn(7, 8)
    together = method.predict(Outputs(logits=rows)).alpha
    torch.manual_seed(99)
    alone = torch.cat([method.predict(Outputs(logits=row[None])).alpha for row in rows.flip(0)]).flip(0)
    assert torch.allclose(together, alone, atol=1e-6)
    narrow = method.predict(Outputs(logits=rows).narrow(4, 3)).alpha
    assert torch.allclose(together[:, :3], narrow, atol=1e-6)


def test_another_noise_seed_gives_another_prediction_but_not_by_much():
    rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    first, second = (get_method("ib_edl", noise_seed=seed).predict(Outputs(logits=rows)).probs for seed in (0, 1))
    assert 0 < (first - second).abs().max() < 0.1


def test_training_noise_follows_the_global_seed():
    method, out, labels = get_method("ib_edl"), Outputs(logits=torch.ones(3, 8)), torch.zeros(3, dtype=torch.long)

    def fit(seed):
        torch.manual_seed(seed)
        return method.loss(out, labels, Progress(0, 1))["fit"]

    assert torch.equal(fit(1), fit(1)) and not torch.equal(fit(1), fit(2))
