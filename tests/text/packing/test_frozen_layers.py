"""The frozen trunk's states, computed once: the same training and predictions as without, from the top layers alone."""

import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny import make_rows
from transformers import LlamaConfig, LlamaForCausalLM

from dappr_llm import DAPPrConfig, DAPPrTrainer, UserError
from dappr_llm.text.packing import layout as packing


def build_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model


def build(folder, tokenizer, layers=(4, 5), model=None, method="dappr", seed=0, **options):
    lora = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM",
        layers_to_transform=list(layers) if layers else None, lora_dropout=0.1,
    )  # fmt: skip
    if layers:  # PEFT applies layers_to_transform to every target: the head is none of the layers
        lora.target_modules = ["q_proj", "v_proj"]
    args = DAPPrConfig(
        str(folder), per_device_train_batch_size=8, num_train_epochs=2, learning_rate=1e-2, logging_steps=1, seed=seed,
        save_strategy="no", report_to="none", disable_tqdm=True, num_choices=4, **options,
    )  # fmt: skip
    return DAPPrTrainer(
        model or build_model(), args, make_rows(32), processing_class=tokenizer, peft_config=lora, method=method
    )


def cache_of(trainer, folder):
    """Another cache of the same model."""
    trainer.backend.use_frozen_layers_cache(trainer.model, str(folder))
    return trainer.backend.reader.frozen


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def outcome(trainer):
    trainer.train()
    table = trainer.predict_table(make_rows(12, start=30), "t", "test")
    return losses(trainer), table.probs


def test_results_equal_those_without(tmp_path, tokenizer):
    wanted = outcome(build(tmp_path / "a", tokenizer))
    found = outcome(build(tmp_path / "b", tokenizer, trunk_cache=str(tmp_path / "trunk")))
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)
    assert np.allclose(found[1], wanted[1], atol=1e-4)


def test_later_runs_compute_nothing_below_the_boundary(tmp_path, tokenizer):
    cache = str(tmp_path / "trunk")
    first = build(tmp_path / "a", tokenizer, trunk_cache=cache)
    outcome(first)
    assert first.backend.reader.frozen.boundary == 4
    different = {(row["question"], *row["choices"]) for row in make_rows(32) + make_rows(12, start=30)}
    assert (
        first.backend.reader.frozen.computed == len(different) + 2
    )  # and the two rows of the check; the second epoch none
    first.backend.reader.frozen.store.flush()
    calls = []
    for number, (method, seed) in enumerate((("ce", 0), ("edl", 1))):
        later = build(tmp_path / f"b{number}", tokenizer, method=method, seed=seed, trunk_cache=cache)
        for layer in later.backend.reader.frozen.layers[:4]:
            layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
        found = outcome(later)
        assert later.backend.reader.frozen.computed == 0
        plain = outcome(build(tmp_path / f"c{number}", tokenizer, method=method, seed=seed))
        assert found[0] == pytest.approx(plain[0], rel=1e-4) and np.allclose(found[1], plain[1], atol=1e-4)
    assert not calls


def test_stochastic_passes_start_at_the_boundary_too(tmp_path, tokenizer):
    options = {"method": "mc_dropout", "max_steps": 3}
    wanted = outcome(build(tmp_path / "a", tokenizer, **options))
    cached = build(tmp_path / "b", tokenizer, trunk_cache=str(tmp_path / "trunk"), **options)
    found = outcome(cached)
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)
    assert np.allclose(found[1], wanted[1], atol=1e-4)  # nothing is drawn below the boundary: the same masks
    calls = []
    cached.backend.reader.frozen.layers[3].self_attn.register_forward_hook(lambda *_: calls.append(1))
    again = cached.predict_table(make_rows(12, start=30), "t", "test")
    assert np.array_equal(again.probs, found[1]) and np.ptp(again.members, axis=0).max() > 1e-4
    assert not calls


def test_gradients_and_checkpointing(tmp_path, tokenizer):
    wanted = outcome(build(tmp_path / "a", tokenizer))
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    found = outcome(build(tmp_path / "b", tokenizer, trunk_cache=str(tmp_path / "trunk"), **options))
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)


def test_other_weights_have_states_of_their_own(tmp_path, tokenizer):
    one = build(tmp_path / "a", tokenizer, trunk_cache=str(tmp_path / "trunk"))
    one.backend.reader.frozen.store.flush()
    other = build(tmp_path / "b", tokenizer, model=build_model(seed=1), trunk_cache=str(tmp_path / "trunk"))
    higher = build(tmp_path / "c", tokenizer, layers=(5,), trunk_cache=str(tmp_path / "trunk"))
    folders = {trainer.backend.reader.frozen.store.folder for trainer in (one, other, higher)}
    assert len(folders) == 3 and other.backend.reader.frozen.computed == 2


def test_states_survive_a_half_written_file(tmp_path, tokenizer):
    trainer = build(tmp_path / "a", tokenizer, trunk_cache=str(tmp_path / "trunk"))
    trunk = trainer.backend.reader.frozen.store
    trunk.flush()
    (trunk.folder / "killed.bin").write_bytes(b"half")  # no index yet: as if it were not there
    again = cache_of(trainer, tmp_path / "trunk")
    rows = [[5, 6, 7], [5, 6, 9, 9]]
    plan = packing.layout(rows)
    states = again.states(rows, plan)
    again.store.flush()
    assert torch.equal(again.states(rows, plan), states) and states.shape == (1, 5, 32)  # from disk: the same


def test_states_of_rows_with_a_common_beginning_are_each_row_s_own(tmp_path, tokenizer):
    trainer = build(tmp_path / "a", tokenizer, trunk_cache=str(tmp_path / "trunk"))
    trainer.model.eval()
    rows = [[5, 6, 9, 9], [5, 6], [5, 6, 9], [5, 6, 7, 8, 9], [5, 6, 7, 4]]

    def states(cache, rows):
        return cache.states(rows, packing.layout(rows, share=False))[0].split([len(row) for row in rows])

    together = states(cache_of(trainer, tmp_path / "one"), rows)
    alone = cache_of(trainer, tmp_path / "two")
    for row, found in zip(rows, together, strict=True):
        assert torch.allclose(found, states(alone, [row])[0], atol=1e-5)


def test_nothing_frozen_is_an_error(tmp_path, tokenizer):
    with pytest.raises(UserError, match="lowest layer trains.*layers_to_transform"):
        build(tmp_path, tokenizer, layers=None, trunk_cache=str(tmp_path / "trunk"))
    with pytest.raises(UserError, match="dataloader_num_workers: 0"):
        build(tmp_path, tokenizer, trunk_cache=str(tmp_path / "trunk"), dataloader_num_workers=2)
    with pytest.raises(UserError, match="packed batches"):
        build(tmp_path, tokenizer, trunk_cache=str(tmp_path / "trunk"), packing=False)
