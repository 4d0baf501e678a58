"""Several sets in one pass: the tables of each by itself, in order, with less work."""

import numpy as np
import pytest
import torch
from tiny import build_model, make_rows

from dappr_llm import DAPPrConfig, DAPPrTrainer
from dappr_llm.inference import table_predictor
from dappr_llm.inference.batching import JoinedRows, RowSet, token_batches


def build(folder, tokenizer, lora, method="dappr", **options):
    args = DAPPrConfig(str(folder), report_to="none", disable_tqdm=True, num_choices=4, **options)
    torch.manual_seed(0)
    trainer = DAPPrTrainer(build_model(), args, processing_class=tokenizer, peft_config=lora, method=method)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return trainer


def sets():
    first, second = make_rows(9), make_rows(6, start=4)  # five questions are in both
    return [
        RowSet(first, "one", "test"),
        RowSet(second + [{**second[0], "id": "again"}], "two", "test"),
        RowSet(make_rows(5, start=30, options=5), "wide", "test", {"task_num_choices": 5}),
    ]


@pytest.mark.parametrize("method", ["dappr", "ib_edl", "ce"])
@pytest.mark.parametrize(
    "options",
    [{}, {"eval_tokens": 60}, {"packing": False}, {"eval_tokens": 0, "per_device_eval_batch_size": 2}],
    ids=str,
)
def test_tables_are_those_of_each_set_alone(tmp_path, tokenizer, lora, method, options):
    plain = build(tmp_path, tokenizer, lora, method, packing=False, eval_tokens=0, per_device_eval_batch_size=1)
    trainer = build(tmp_path, tokenizer, lora, method, **options)
    found = trainer.predict_tables(sets())
    for each, table in zip(sets(), found, strict=True):
        wanted = plain.predict_table(each.rows, each.task, each.split, **each.meta)
        assert table.ids.tolist() == wanted.ids.tolist() == [row["id"] for row in each.rows]
        assert table.meta == wanted.meta and table.width == wanted.width
        assert np.array_equal(table.labels, wanted.labels) and np.array_equal(table.num_options, wanted.num_options)
        for name in ("probs", "alpha", "aleatoric", "epistemic", "logits", "lengths", "option_lengths"):
            one, other = getattr(table, name), getattr(wanted, name)
            assert (one is None and other is None) or np.allclose(one, other, atol=1e-4), name


def test_tables_hold_logits_and_the_lengths_of_questions_and_options(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, max_length=44)  # cuts the first prompt, not its length
    rows = [*make_rows(3), {"id": "special", "question": "<s> a b", "choices": ["a", "one tool"]}]
    rows = [{key: row[key] for key in ("id", "question", "choices")} for row in rows]
    rows[0]["question"] = "very long story " * 9 + rows[0]["question"]
    table = trainer.predict_table(rows, "t")

    def count(text):
        return len(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    assert table.lengths.tolist() == [count(row["question"]) for row in rows]
    assert table.option_lengths.tolist() == [sum(map(count, row["choices"])) for row in rows]
    np.testing.assert_allclose(table.alpha, np.logaddexp(0, table.logits) + 1, rtol=1e-5)

    prepared = trainer.backend.prepare(rows, labelled=False).remove_columns(["text_length", "option_length"])
    assert trainer.predict_table(prepared, "t").lengths is None  # tokenised elsewhere
    lora.lora_dropout = 0.5
    passes = build(tmp_path, tokenizer, lora, "mc_dropout").predict_table(rows, "t")
    assert passes.logits.shape == passes.probs.shape


def test_large_tables_leave_logits_out(tmp_path, tokenizer, lora, monkeypatch):
    monkeypatch.setattr(table_predictor, "MOST_LOGITS", 7)
    assert build(tmp_path, tokenizer, lora).predict_table(make_rows(2), "t").logits is None


def test_equal_rows_are_computed_once_and_one_pass_serves_all(tmp_path, tokenizer, lora, monkeypatch):
    trainer = build(tmp_path, tokenizer, lora)
    seen = []
    read = trainer.backend.read
    monkeypatch.setattr(
        trainer.backend,
        "read",
        lambda model, batch, *args: seen.append(batch["row"].tolist()) or read(model, batch, *args),
    )
    found = trainer.predict_tables(sets())
    different = {(row["question"], *row["choices"]) for each in sets() for row in each.rows}
    assert sorted(row for batch in seen for row in batch) == list(range(len(different)))
    assert len(seen) == 1 and len(different) < sum(map(len, found))
    assert np.array_equal(found[1].probs[0], found[1].probs[-1])


def test_passes_of_equal_rows_stay_their_own(tmp_path, tokenizer, lora):
    lora.lora_dropout = 0.5
    trainer = build(tmp_path, tokenizer, lora, "mc_dropout")
    rows = make_rows(1) + [{**make_rows(1)[0], "id": "again"}]
    table = trainer.predict_table(rows, "t")
    assert not np.allclose(table.probs[0], table.probs[1], atol=1e-6)
    assert np.array_equal(table.probs, trainer.predict_table(rows, "t").probs)  # seeded


def test_joined_rows_lead_back():
    rows = [[{"name": name} for name in part] for part in ("bca", "ab")]
    keys = [[row["name"].encode() for row in part] for part in rows]
    joined = JoinedRows(rows, keys, [[1, 5, 2], [2, 1]])
    assert [row["name"] for row in joined] == ["a", "b", "c"] and joined.lengths == [2, 1, 5]
    assert [joined[i]["name"] for i in joined.inverse] == list("bcaab")
    assert [row["name"] for row in JoinedRows(rows, keys, [[1, 5, 2], [2, 1]], longest_first=True)] == ["c", "a", "b"]
    apart = JoinedRows(rows, keys, [[1] * 3, [1] * 2], join=False)
    assert len(apart) == 5 and [apart[i]["name"] for i in apart.inverse] == list("bcaab")


def test_batches_keep_to_their_tokens():
    lengths = [3, 3, 3, 9, 1, 1, 1, 1]
    assert token_batches(lengths, 6) == [[0, 1], [2], [3], [4, 5, 6, 7]]
    assert token_batches(lengths, 100, rows=3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert token_batches([], 5) == []


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_an_epoch_of_batches_has_the_gradient_of_the_whole_set(tmp_path, tokenizer, lora, strategy):
    """However rows are grouped: at fixed weights the mean of an epoch's gradients is the gradient of the mean loss."""
    args = DAPPrConfig(
        str(tmp_path), report_to="none", per_device_train_batch_size=4, train_sampling_strategy=strategy, seed=3
    )
    torch.manual_seed(0)
    trainer = DAPPrTrainer(build_model(), args, make_rows(24), processing_class=tokenizer, peft_config=lora)
    trainer.model.train()

    def gradient(batches):
        trainer.model.zero_grad()
        for batch in batches:
            (trainer.compute_loss(trainer.model, batch) / len(batches)).backward()
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])

    whole = gradient([trainer.backend.collate(list(trainer.train_dataset))])
    batches = list(trainer.get_train_dataloader())
    assert sorted(row for batch in batches for row in batch["row"].tolist()) == list(range(24))
    assert torch.allclose(gradient(batches), whole, atol=1e-5)
