"""One pipeline, many threads: the answers of one thread, and a pipeline that works afterwards."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import make_rows

from dappr_llm import UncertaintyPipeline, load_checkpoint
from dappr_llm.text.backend import TextBackend

THREADS, CALLS = 8, 50


def requests():
    """Single questions and lists, with 2 to 4 options and of different lengths."""
    found = []
    for number in range(CALLS):
        rows = make_rows(1 + number % 3, start=number, options=2 + number % 3)
        found.append([{key: row[key] for key in ("id", "question", "choices")} for row in rows])
    return found


def values(answers):
    return [(a.answer, a.prediction_set, a.abstain, [*a.probs, *(a.alpha or ()), a.epistemic]) for a in answers]


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one[:3] == other[:3]
        assert one[3] == pytest.approx(other[3], abs=1e-5)


@pytest.mark.parametrize("packing", [True, False])
def test_threads_get_the_answers_of_one_thread(trained, packing):
    run = load_checkpoint(trained / "run")
    if not packing:
        old = run.backend
        run.backend = TextBackend(
            run.model, old.tokenizer, run.method, old.num_choices, old.prompt, old.max_length, packing=False
        )
    pipe = UncertaintyPipeline(run)
    asked = requests()
    wanted = [values(pipe(rows)) for rows in asked]
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    start = threading.Barrier(THREADS)

    def work(number):
        start.wait()
        order = list(range(number, CALLS)) + list(range(number))  # no two threads ask in the same order
        return [(i, values(pipe(asked[i]))) for i in order]

    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(work, range(THREADS)):
            for i, answers in found:
                assert_same(answers, wanted[i])
    for rows, answers in zip(asked, wanted, strict=True):
        assert_same(values(pipe(rows)), answers)
    assert all(torch.equal(value, state[name]) for name, value in run.model.state_dict().items())


def test_the_first_calls_may_come_from_several_threads(trained):
    """The packing check runs once, whoever comes first."""
    wanted = values(UncertaintyPipeline(load_checkpoint(trained / "run"))(requests()[2]))
    pipe = UncertaintyPipeline(load_checkpoint(trained / "run"))
    start = threading.Barrier(THREADS)

    def work(_):
        start.wait()
        return values(pipe(requests()[2]))

    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(work, range(THREADS)):
            assert_same(found, wanted)


def test_stochastic_passes_are_the_same_in_threads(trained):
    from dappr_llm.methods import get_method

    run = load_checkpoint(trained / "run")
    method = get_method("mc_dropout", passes=4)
    dropouts = torch.nn.ModuleDict({"default": torch.nn.Dropout(0.3)})
    for module in run.model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout = dropouts
    run.method, run.backend = method, run.backend.with_method(method, 0.0)
    run.model.eval()
    pipe = UncertaintyPipeline(run)
    asked = requests()[:8]
    wanted = [values(pipe(rows)) for rows in asked]
    state = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: [values(pipe(rows)) for rows in asked], range(4)):
            for one, other in zip(found, wanted, strict=True):
                assert_same(one, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in run.model.modules())
