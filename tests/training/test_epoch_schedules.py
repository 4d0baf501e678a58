"""Learning rates and model selection by the epoch."""

from types import SimpleNamespace

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.training.callbacks.every_epochs import EveryEpochs
from dappr_llm.training.config import DAPPrConfig
from dappr_llm.training.epoch_schedules import epoch_schedule, learning_rate

COSINE = {"kind": "cosine", "lag": 1}


@pytest.mark.parametrize(
    ("base", "epochs", "golden"),
    [
        (2e-3, 200, {0: 1e-6, 1: 1e-6, 2: 2.009e-4, 5: 8.006e-4, 10: 1.8001e-3, 11: 1.987750e-3, 12: 1.985184e-3,
                     100: 1.020629e-3, 199: 1.049097e-5}),
        (5e-3, 100, {2: 5.009e-4, 11: 4.877886e-3, 50: 2.583370e-3, 99: 1.492331e-5}),
    ],
)  # fmt: skip
def test_the_reference_codes_cosine(base, epochs, golden):
    for epoch, value in golden.items():
        assert learning_rate(COSINE, base, epoch, epochs) == pytest.approx(value, rel=1e-5)


def test_steps_and_the_optimizer():
    import torch

    spec = {"kind": "step", "every": 2, "factor": 0.1}
    args = SimpleNamespace(epoch_schedule=spec, learning_rate=0.5, num_train_epochs=5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = epoch_schedule(args, optimizer, steps_per_epoch=3)
    rates = []
    for _ in range(15):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.5] * 6 + [0.05] * 6 + [0.005] * 3)


@pytest.mark.parametrize("spec", [{"kind": "cosin"}, {"kind": "step", "evry": 3}, "step", {}])
def test_unknown_schedules_are_refused(tmp_path, spec):
    with pytest.raises(UserError, match="epoch_schedule"):
        DAPPrConfig(output_dir=str(tmp_path), epoch_schedule=spec)


def test_every_few_epochs_and_after_the_last():
    callback, args = EveryEpochs(4), SimpleNamespace(num_train_epochs=10)
    kept = []
    for epoch in range(1, 11):
        control = SimpleNamespace(should_evaluate=True, should_save=True)
        callback.on_epoch_end(args, SimpleNamespace(epoch=float(epoch)), control)
        kept += [epoch] if control.should_evaluate and control.should_save else []
    assert kept == [4, 8, 10]


def test_of_equally_good_checkpoints_the_later_one_is_kept():
    callback = EveryEpochs(1)
    args = SimpleNamespace(metric_for_best_model="accuracy", greater_is_better=True)
    for value, beaten in ((0.9, True), (0.8, False)):
        state = SimpleNamespace(best_metric=0.9)
        callback.on_evaluate(args, state, None, metrics={"eval_accuracy": value})
        assert (value > state.best_metric) == beaten
