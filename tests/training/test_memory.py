"""How a step is computed, by choice or by need: compiled blocks, gradient checkpointing only where memory asks for it."""

import pytest
import torch
from tiny import build_model, make_rows

from dappr_llm import DAPPrConfig, DAPPrTrainer, UserError
from dappr_llm.text.packing.layers import decoder_layers
from dappr_llm.training import memory as stepping
from dappr_llm.training.memory import free_bytes, kept_bytes


def rows_of_all_lengths(count=24):
    """Questions from a few to a hundred words: batches differ in how many groups attention needs."""
    words = ["very", "long", "story", "about", "the", "sky"]
    return [
        {**row, "question": " ".join(words[(i + j) % 6] for j in range(3 + 5 * i % 90)) + " " + row["question"]}
        for i, row in enumerate(make_rows(count))
    ]


def build(folder, tokenizer, lora, rows=None, **options):
    torch.manual_seed(0)
    args = DAPPrConfig(
        str(folder), per_device_train_batch_size=4, num_train_epochs=2, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, num_choices=4, **options,
    )  # fmt: skip
    return DAPPrTrainer(
        build_model(), args, rows or rows_of_all_lengths(), processing_class=tokenizer, peft_config=lora
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# --- compiling ----------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs():
    """How many graphs were compiled so far."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    reset()


def test_packed_batches_compile_blocks_once_for_all_sizes(tmp_path, tokenizer, lora, graphs):
    plain = build(tmp_path / "a", tokenizer, lora)
    plain.train()
    trainer = build(tmp_path / "b", tokenizer, lora, torch_compile=True, torch_compile_backend="aot_eager")
    batches = [trainer.backend.collate([trainer.train_dataset[i] for i in range(j, j + 4)]) for j in range(0, 24, 4)]
    assert len({len(batch["packed"]["groups"]) for batch in batches}) > 1  # or nothing is shown here
    seen = []
    trainer.add_callback(_each_step(lambda: seen.append(graphs())))
    trainer.train()
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-4)
    assert trainer.model_wrapped is trainer.model  # not compiled as a whole on top
    assert 0 < seen[0] < 10  # norms and feed-forward blocks, with gradients and without
    assert seen[-1] == seen[0]  # and never again
    trainer.save_model()
    assert sorted(p.name for p in (tmp_path / "b").glob("*.safetensors")) == ["adapter_model.safetensors"]


def test_the_blocks_of_all_layers_but_the_last_are_compiled(tmp_path, tokenizer, lora):
    trainer = build(tmp_path, tokenizer, lora, torch_compile=True, torch_compile_backend="eager")
    *lower, last = decoder_layers(trainer.model)
    for layer in lower:
        compiled = {name for name, part in layer.named_children() if part._compiled_call_impl is not None}
        assert compiled == {"mlp", "input_layernorm", "post_attention_layernorm"}
    assert all(part._compiled_call_impl is None for part in last.children())  # its positions change with each batch


def test_padded_batches_are_left_to_accelerate(tmp_path, tokenizer, lora):
    trainer = build(
        tmp_path, tokenizer, lora, torch_compile=True, torch_compile_backend="eager", packing=False, max_steps=1
    )
    assert str(trainer.accelerator.state.dynamo_plugin.backend).lower().endswith("eager")
    assert all(part._compiled_call_impl is None for part in trainer.model.modules())


def test_a_model_without_such_blocks_is_told_what_to_do(tmp_path, tokenizer, lora, monkeypatch):
    monkeypatch.setattr("dappr_llm.text.packing.layers.decoder_layers", lambda model: None)
    with pytest.raises(UserError, match="train.torch_compile: MistralForCausalLM.*train.packing: false"):
        build(tmp_path, tokenizer, lora, torch_compile=True)


def _each_step(work):
    from transformers import TrainerCallback

    class Each(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            work()

    return Each()


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free, wanted", [(1 << 20, True), (1 << 40, False), (None, False)])
def test_auto_checkpoints_only_if_memory_asks_for_it(tmp_path, tokenizer, lora, monkeypatch, caplog, free, wanted):
    plain = build(tmp_path / "a", tokenizer, lora)
    plain.train()
    monkeypatch.setattr(stepping, "free_bytes", lambda device: free)
    trainer = build(tmp_path / "b", tokenizer, lora, gradient_checkpointing="auto")
    with caplog.at_level("INFO", "dappr_llm"):
        trainer.train()
    assert trainer.args.gradient_checkpointing is trainer.model.is_gradient_checkpointing is wanted
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-4)
    assert {True: "checkpointing is on", False: "is off" if free else "stays off"}[wanted] in caplog.text


def test_auto_on_images(tmp_path, monkeypatch, caplog):
    """Nothing to turn on there: the warning says what else helps."""
    from dappr_llm.core.recipe import load_recipe
    from dappr_llm.training.build import build_args as arguments
    from dappr_llm.training.build import build_run

    settings = {"gradient_checkpointing": "auto", "output_dir": tmp_path, "eval_strategy": "no"}
    settings |= {"load_best_model_at_end": "false", "eval_every_epochs": "null", "save_strategy": "no"}
    recipe = load_recipe("digits/dappr", [f"train.{key}={value}" for key, value in settings.items()])
    args = arguments(recipe)
    run = build_run(recipe, args)
    trainer = DAPPrTrainer(run.model, args, run.train, method=run.method, backend=run.backend)
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    monkeypatch.setattr(stepping, "free_bytes", lambda device: 1 << 10)
    stepping.settle_gradient_checkpointing(trainer)
    assert trainer.args.gradient_checkpointing is False
    assert "ImageClassifier cannot checkpoint gradients" in caplog.text
    assert all(torch.equal(value, state[name]) for name, value in run.model.state_dict().items())


def test_what_a_step_needs_is_what_it_takes(tmp_path, tokenizer, lora):
    """Of rows as long as the longest a batch keeps just that; of real ones less."""
    rows = rows_of_all_lengths()
    trainer = build(tmp_path, tokenizer, lora, rows, share_prefix=False)
    longest = max(range(len(rows)), key=lambda i: trainer.train_dataset[i]["length"])
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)

    def kept(numbers):
        batch = trainer.backend.collate([trainer.train_dataset[i] for i in numbers])
        return kept_bytes(trainer.model, lambda: trainer.backend.read(trainer.model, batch))

    needed = stepping.step_bytes(trainer) - 12 * trained
    assert trainer.model.training
    assert needed == pytest.approx(kept([longest] * 4), rel=0.05)
    assert kept(range(4)) < needed


def test_a_stream_is_taken_to_be_as_long_as_allowed(tmp_path, tokenizer, lora):
    from datasets import Dataset

    rows = Dataset.from_list(rows_of_all_lengths())
    fixed = build(tmp_path / "a", tokenizer, lora, rows, max_length=200)
    stream = build(tmp_path / "b", tokenizer, lora, rows.to_iterable_dataset(), max_length=200, max_steps=1)
    first, times = stepping.longest_row(stream.train_dataset, 200)
    assert times == 200 / len(first["input_ids"]) and stepping.step_bytes(stream) > stepping.step_bytes(fixed)


def test_sharded_weights_mean_checkpointing(tmp_path, tokenizer, lora, monkeypatch):
    monkeypatch.setattr(stepping, "free_bytes", lambda device: pytest.fail("there is no model to try"))
    trainer = build(tmp_path, tokenizer, lora, gradient_checkpointing="auto")
    trainer.is_fsdp_enabled = True
    stepping.settle_gradient_checkpointing(trainer)
    assert trainer.args.gradient_checkpointing is True


@pytest.mark.parametrize("value", ["automatic", "True", 3])
def test_anything_else_is_an_error(tmp_path, value):
    with pytest.raises(UserError, match="gradient_checkpointing is .*allowed: true or false or auto"):
        DAPPrConfig(str(tmp_path), gradient_checkpointing=value)


def test_free_memory_of_this_machine():
    assert 1 << 20 < free_bytes(torch.device("cpu")) < 1 << 50
    assert free_bytes(torch.device("meta")) is None
