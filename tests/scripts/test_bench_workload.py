"""The benchmarks of image methods reach into the package: a step and a prediction must still run."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.mark.parametrize("method", ["dappr", "kl_pn", "daedl"])  # plain, auxiliary rows, a head fitted after training
def test_a_workload_steps_and_predicts(method, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import torch
    from bench_workload import Workload
    from benchlib import interleaved, median_ratio

    from dappr_llm.core.recipe import load_recipe

    work = Workload(load_recipe("mnist/dappr"), method, batch_size=4)
    before = work.model.classifier.weight.detach().clone()
    times = interleaved({"step": work.step, "predict": work.predict}, rounds=2, warmup=0)
    assert not torch.equal(before, work.model.classifier.weight)
    assert all(len(values) == 2 for values in times.values()) and work.saved_bytes() > 0
    assert median_ratio(times["step"], times["step"]) == (1.0, 1.0, 1.0)
