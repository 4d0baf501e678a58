"""Length-grouped batches: less padding, every row once, and the gradient to expect of a random order."""

import pytest
import torch
from tiny import build_model, make_rows
from transformers.trainer_pt_utils import LengthGroupedSampler

from dappr_llm import DAPPrConfig, DAPPrTrainer
from dappr_llm.training.samplers import LengthGrouped

LENGTHS = [3 + row * row % 41 for row in range(22)]
BATCH = 4
EPOCHS = 3000


def sampler(lengths=LENGTHS, epoch=0.0, seed=0, batch=BATCH):
    return LengthGrouped(batch, lengths, seed, lambda: epoch)


def frequencies(orders):
    """How often each row is in each step, `[steps, rows]`, and what a random order gives."""
    steps = -(-len(LENGTHS) // BATCH)
    found = torch.zeros(steps, len(LENGTHS))
    for order in orders:
        for step in range(steps):
            found[step, order[step * BATCH : (step + 1) * BATCH]] += 1
    sizes = torch.tensor([min(BATCH, len(LENGTHS) - step * BATCH) for step in range(steps)])
    return found / EPOCHS, (sizes / len(LENGTHS)).unsqueeze(1).expand_as(found)


def padding(order, lengths, batch=16):
    parts = [[lengths[row] for row in order[i : i + batch]] for i in range(0, len(order), batch)]
    return sum(len(part) * max(part) for part in parts) / sum(map(sum, parts))


@pytest.mark.parametrize("count", [1, 3, 4, 5, 16, 22, 203])
def test_every_row_once_and_the_same_order_again(count):
    lengths = [1 + row % 7 for row in range(count)]
    order = list(sampler(lengths, epoch=2.0))
    assert sorted(order) == list(range(count)) and len(sampler(lengths)) == count
    assert order == list(sampler(lengths, epoch=2.7))  # in the middle of the epoch: after a resume
    if count > 5:
        assert order != list(sampler(lengths, epoch=3.0)) != list(sampler(lengths, epoch=3.0, seed=5))


def test_rows_of_a_batch_are_of_similar_length():
    generator = torch.Generator().manual_seed(0)
    lengths = (20 + 60 * torch.rand(800, generator=generator)).int().tolist()
    grouped = padding(list(sampler(lengths, batch=16)), lengths)
    random = padding(torch.randperm(800, generator=generator).tolist(), lengths)
    assert grouped < 1.1 < 1.4 < random


def test_every_row_is_as_likely_in_every_step_as_in_a_random_order():
    found, wanted = frequencies(list(sampler(seed=seed)) for seed in range(EPOCHS))
    spread = (wanted * (1 - wanted) / EPOCHS).sqrt()
    assert ((found - wanted).abs() / spread).max() < 4.5  # 132 binomial counts
    # The test can tell: transformers' own sampler has its longest row in the first step, always.
    theirs = LengthGroupedSampler(BATCH, lengths=LENGTHS)
    found, wanted = frequencies(list(theirs) for _ in range(EPOCHS))
    assert ((found - wanted).abs() / spread).max() > 50


def test_the_expected_gradient_of_every_step_is_that_of_all_rows(tmp_path, tokenizer, lora):
    """A step's gradient is the mean of its rows' own; over epochs every step's mean is the mean of all rows."""
    torch.manual_seed(0)
    args = DAPPrConfig(str(tmp_path), report_to="none", num_choices=4)
    trainer = DAPPrTrainer(build_model(), args, processing_class=tokenizer, peft_config=lora)
    weights = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
    for weight in weights:
        torch.nn.init.normal_(weight, std=0.3)
    rows = list(trainer.backend.prepare(make_rows(len(LENGTHS))))

    def gradient(batch):
        loss = trainer.compute_loss(trainer.model.train(), trainer.backend.collate(batch))
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, weights)])

    each = torch.stack([gradient([row]) for row in rows])
    batch = list(sampler())[:BATCH]
    assert torch.allclose(gradient([rows[row] for row in batch]), each[batch].mean(0), atol=1e-6)
    everything = each.mean(0)
    assert torch.allclose(gradient(rows), everything, atol=1e-6)

    def apart(orders):
        """How far the mean gradient of each step is from that of all rows."""
        expected = torch.zeros(6, each.shape[1])
        for order in orders:
            expected += torch.stack([each[part].mean(0) for part in torch.tensor(order).split(BATCH)]) / EPOCHS
        return (expected - everything).norm(dim=1).max()

    # What is left is chance: a step's spread over the square root of the epochs.
    spread = (each - everything).norm(dim=1).square().mean().sqrt() / (2 * EPOCHS) ** 0.5
    assert spread < 0.05 * everything.norm()
    assert apart(list(sampler(seed=seed)) for seed in range(EPOCHS)) < 3 * spread
    theirs = LengthGroupedSampler(BATCH, lengths=LENGTHS)
    assert apart(list(theirs) for _ in range(EPOCHS)) > 10 * spread
