"""Packed batches: the numbers and gradients of padded ones, from fewer tokens, on models of several kinds."""

import itertools
import logging

import pytest
import torch
from peft import get_peft_model
from tiny import build_model, make_rows
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dappr_llm import DAPPrConfig, DAPPrTrainer
from dappr_llm.inference.stochastic_passes import read_passes
from dappr_llm.methods import dirichlet, get_method
from dappr_llm.text.backend import TextBackend
from dappr_llm.text.packing import attention
from dappr_llm.text.packing import layout as packing
from dappr_llm.text.packing.layers import decoder_layers

SIZES = {"vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def llama(**changes):
    """Grouped key heads, rotary positions, a tied head: SmolLM2's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True, **changes))


def gpt2():
    """Absolute positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=80, n_positions=128, n_embd=32, n_layer=2, n_head=4, **dropout))


def qwen3():
    """Norms on queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS))


def gemma3():
    """Layers with and without a window, shorter than the prompts, and two kinds of rotary positions."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **HEADS, sliding_window=7, layer_types=kinds))


def neox():
    """Parallel attention and rotary positions on a part of each head."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, num_attention_heads=4, max_position_embeddings=128))


PACKED = {
    "mistral": build_model,
    "mistral_window": build_model,
    "llama": llama,
    "gpt2": gpt2,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "neox": neox,
}


def make(name, lora=None, **kwargs):
    torch.manual_seed(0)
    if name == "mistral_window":
        model = build_model()
        model.config.sliding_window = 9
    else:
        model = PACKED[name]() if name in PACKED else name()
    for parameter in model.parameters():  # far from the start: attention must matter
        parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
    if lora:
        targets = {"gpt2": ["c_attn", "lm_head"], "neox": ["query_key_value", "embed_out"]}
        lora.target_modules = targets.get(name, ["q_proj", "v_proj", "lm_head"])
        model = get_peft_model(model, lora)
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(parameter, std=0.3)
    return model.eval()


def backend_of(model, tokenizer, method="dappr", **kwargs):
    return TextBackend(model, tokenizer, get_method(method), num_choices=4, **kwargs)


def both(model, tokenizer, rows):
    packed, plain = backend_of(model, tokenizer), backend_of(model, tokenizer, packing=False)
    prepared = list(packed.prepare(rows))
    assert "packed" in packed.collate(prepared) and "packed" not in plain.collate(prepared)
    return packed, plain, prepared


@pytest.mark.parametrize("share", [True, False])
def test_a_layout_leads_every_row_along_its_own_tokens(share):
    rows = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8], [5, 6], [5, 6, 7, 1, 2, 3]]
    plan = packing.layout(rows, share, waste=0)
    tokens, positions = plan["input_ids"][0], plan["position_ids"][0]
    wanted = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert len(tokens) == (len(wanted) if share else sum(map(len, rows)))
    assert [tokens[i].item() for i in plan["last"]] == [row[-1] for row in rows]
    assert [positions[i].item() for i in plan["last"]] == [len(row) - 1 for row in rows]
    own, paths = [], set()
    for group in plan["groups"]:
        for row, (new, length) in enumerate(group["lengths"]):
            path = group["keys"][row, :length]
            assert positions[path].tolist() == list(range(length))
            assert torch.equal(path[length - new :], group["take"][row, :new])
            own += group["take"][row, :new].tolist()
            paths.add(tuple(tokens[path].tolist()))
    assert sorted(own) == list(range(len(tokens)))  # each token is computed once
    assert paths <= wanted and {tuple(row) for row in rows} - paths <= {(5, 6)}  # that one ends within others


def test_groups_hold_rows_of_similar_length():
    rows = [[1, *range(10, 10 + n)] for n in (3, 3, 4, 40, 41, 90)]
    loose, tight = packing.layout(rows, waste=10**9), packing.layout(rows, waste=200)
    assert len(loose["groups"]) == 1
    assert [sorted(new for new, _ in group["lengths"]) for group in tight["groups"]] != []
    padded = sum(group["take"].numel() for group in tight["groups"])
    assert padded < 1.3 * tight["input_ids"].numel() < loose["groups"][0]["take"].numel()


@pytest.mark.parametrize("name", PACKED)
def test_logits_equal_padded_ones(name, tokenizer, lora):
    model = make(name, lora)
    packed, plain, prepared = both(model, tokenizer, make_rows(9) + make_rows(2) + make_rows(3, 20, options=3))
    with torch.no_grad():
        wanted = plain.read(model, plain.collate(prepared)).logits
        found = packed.read(model, packed.collate(prepared)).logits
        assert packed.packs  # really packed
        alone = torch.cat([packed.read(model, packed.collate([row])).logits for row in prepared])
        apart = backend_of(model, tokenizer, share_prefix=False)
        unshared = apart.read(model, apart.collate(prepared)).logits
    assert wanted.std() > 0.1
    for other in (found, alone, unshared):
        assert torch.allclose(other, wanted, atol=1e-4), (other - wanted).abs().max()
    real = sum(len(row["input_ids"]) for row in prepared)
    assert packed.collate(prepared)["packed"]["input_ids"].numel() < 0.75 * real


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gpt2", "gemma3"])
def test_gradients_equal_padded_ones(name, checkpointing, tokenizer, lora):
    """Through the shared beginning too: its tokens collect what every row sends back."""
    model = make(name, lora)
    packed, plain, prepared = both(model, tokenizer, make_rows(8))
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    grads = []
    for backend in (plain, packed):
        model.zero_grad()
        backend.read(model, backend.collate(prepared)).logits.square().mean().backward()
        grads.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    assert packed.packs and grads[0].keys() == grads[1].keys() and len(grads[0]) >= 4
    for key, grad in grads[0].items():
        assert torch.allclose(grads[1][key], grad, atol=1e-4, rtol=1e-3), key


def test_training_is_the_same_with_and_without(tmp_path, tokenizer, lora):
    logs = []
    for number, options in enumerate(({}, {"share_prefix": False}, {"packing": False})):
        args = DAPPrConfig(
            str(tmp_path / str(number)), per_device_train_batch_size=8, num_train_epochs=2, learning_rate=1e-2,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, **options,
        )  # fmt: skip
        trainer = DAPPrTrainer(build_model(), args, make_rows(32), processing_class=tokenizer, peft_config=lora)
        trainer.train()
        logs.append([(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry])
    for other in logs[:2]:
        for found, wanted in zip(other, logs[2], strict=True):
            assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("kind", ["bloom", "gemma2"])
def test_a_model_with_attention_of_its_own_is_computed_with_padding(kind, tokenizer, caplog):
    from transformers import BloomConfig, BloomForCausalLM, Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    if kind == "bloom":  # takes no positions
        model = BloomForCausalLM(BloomConfig(vocab_size=80, hidden_size=32, n_layer=2, n_head=4)).eval()
    else:  # caps its scores, which only its own attention can
        model = Gemma2ForCausalLM(Gemma2Config(**SIZES, **HEADS, attn_implementation="eager")).eval()
    packed, plain = backend_of(model, tokenizer), backend_of(model, tokenizer, packing=False)
    prepared = list(packed.prepare(make_rows(5)))
    with torch.no_grad(), caplog.at_level(logging.INFO):
        found = packed.read(model, packed.collate(prepared)).logits
        assert torch.equal(found, plain.read(model, plain.collate(prepared)).logits)
    assert "packed" not in packed.collate(prepared)  # no more layouts that nobody reads
    assert ("Gemma2ForCausalLM is computed with padding" in caplog.text) == (kind == "gemma2")


class _Syncs(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "unique")):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [(4, 4), (3, 4)])
def test_a_step_waits_for_nothing(tmp_path, tokenizer, lora, options, monkeypatch):
    # torch's own looks at the labels first, though only on a CPU.
    monkeypatch.setattr(dirichlet, "one_hot", lambda labels, count: labels.unsqueeze(-1) == torch.arange(count))
    args = DAPPrConfig(str(tmp_path), report_to="none", max_length=60)
    rows = make_rows(4, options=options[0]) + make_rows(4, 10, options=options[1])
    trainer = DAPPrTrainer(build_model(), args, rows, processing_class=tokenizer, peft_config=lora)
    batch = trainer.backend.collate(list(trainer.train_dataset))
    trainer.model.train()
    trainer.compute_loss(trainer.model, dict(batch))  # the first one checks the model, and may wait
    with _Syncs() as syncs:
        trainer.compute_loss(trainer.model, dict(batch)).backward()
    assert syncs.found == []


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "neox"])
def test_the_last_block_is_computed_where_answers_are_read(name, tokenizer, lora):
    model = make(name, lora)
    backend = backend_of(model, tokenizer)
    prepared = list(backend.prepare(make_rows(6) + make_rows(1)))
    batch = backend.collate(prepared)
    backend.read(model, batch)
    layer = decoder_layers(model)[-1]
    queries = [layer.self_attn.q_proj, layer.self_attn.o_proj] if name in ("llama", "gemma3") else []
    blocks = [layer.mlp, *queries]
    seen = []
    handles = [
        block.register_forward_pre_hook(lambda module, args: seen.append((module, args[0].shape[1])))
        for block in blocks
    ]
    backend.read(model, batch)
    for handle in handles:
        handle.remove()
    assert dict(seen) == dict.fromkeys(blocks, 6)  # one of the seven prompts is there twice
    assert len(seen) == len(blocks)


def test_a_block_with_dropout_stays_whole(tokenizer, lora):
    lora.lora_dropout = 0.5
    model = make("llama", lora)
    backend = backend_of(model, tokenizer)
    batch = backend.collate(list(backend.prepare(make_rows(6))))
    backend.read(model, batch)
    layer, seen = decoder_layers(model)[-1], []
    for block in (layer.self_attn.q_proj, layer.self_attn.o_proj):
        block.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    for mode in (False, True):
        backend.read(model.train(mode), batch)
    everything = batch["packed"]["input_ids"].shape[1]
    assert seen == [6, 6, everything, 6]


def test_the_check_leaves_no_trace(tokenizer, lora):
    lora.lora_dropout = 0.0
    model = make("mistral", lora).train()
    model.base_model.model.model.norm.eval()
    modes = [module.training for module in model.modules()]
    backend = backend_of(model, tokenizer)
    state = torch.random.get_rng_state()
    backend.read(model, backend.collate(list(backend.prepare(make_rows(3)))))  # checks before it reads
    assert backend.packs and torch.equal(torch.random.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes


def test_another_model_is_untouched_before_during_and_after(tokenizer):
    """Also one that was built from the very same config object."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def registered():
        names = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
        return {name: (ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS.get(name)) for name in names}

    ours = make("llama")
    other = type(ours)(ours.config).eval()  # shares the config object
    ids = torch.randint(3, 60, (2, 9))
    with torch.no_grad():
        logits, functions = other(ids).logits, registered()
        during = []
        backend = backend_of(ours, tokenizer)
        decoder_layers(ours)[0].register_forward_hook(lambda *_: during.append((other(ids).logits, registered())))
        backend.read(ours, backend.collate(list(backend.prepare(make_rows(4)))))
        after = other(ids).logits
    assert backend.packs and during and ours.config._attn_implementation == "dappr_packed_sdpa"
    assert other.config._attn_implementation == "sdpa" and registered() == functions
    assert torch.equal(after, logits)
    for found, names in during:
        assert torch.equal(found, logits) and names == functions


def test_a_model_that_cannot_be_packed_gets_its_attention_back(tokenizer, monkeypatch):
    monkeypatch.setattr("dappr_llm.text.packing.attention._difference", lambda *_: "it says no")
    model = make("llama")
    backend = backend_of(model, tokenizer)
    backend.read(model, backend.collate(list(backend.prepare(make_rows(4)))))
    assert not backend.packs and model.config._attn_implementation == "sdpa"


def test_saved_configs_do_not_name_our_attention(tokenizer, tmp_path):
    model = make("llama")
    backend = backend_of(model, tokenizer)
    backend.read(model, backend.collate(list(backend.prepare(make_rows(4)))))
    model.save_pretrained(tmp_path)
    assert "dappr" not in (tmp_path / "config.json").read_text()
    assert type(model).from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_the_flash_functions_see_the_name_they_were_registered_under(monkeypatch):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def fake(module, query, key, value, mask, **kwargs):
        seen.append((module.config._attn_implementation, module.config.hidden_size, module.layer_idx))
        return query.transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", fake)
    model = make("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    undo = attention.use_packed_attention(model)
    name = model.config._attn_implementation
    try:
        states = torch.randn(1, 4, 5, 8)
        ALL_ATTENTION_FUNCTIONS[name](decoder_layers(model)[1].self_attn, states, states, states, None)
    finally:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)
    undo()
    assert seen == [("flash_attention_2", 32, 1)]
    assert name == "dappr_packed_flash_attention_2" and model.config._attn_implementation == "flash_attention_2"


def _varlen(module, query, key, value, mask, **sizes):
    """What the flash kernels compute, written out: rows end to end, queries are the last ones of their keys."""
    found = []
    q_ends, k_ends = sizes["cu_seq_lens_q"].tolist(), sizes["cu_seq_lens_k"].tolist()
    assert mask is None and sizes["is_causal"]
    for (a, b), (c, d) in zip(itertools.pairwise(q_ends), itertools.pairwise(k_ends), strict=True):
        assert b - a <= sizes["max_length_q"] and d - c <= sizes["max_length_k"]
        place = torch.arange(d - c)
        hidden = place > (place[(d - c) - (b - a) :, None])
        k, v = (states[0, :, c:d].repeat_interleave(2, 0) for states in (key, value))
        scores = query[0, :, a:b] @ k.transpose(1, 2) * sizes["scaling"]
        found.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(found).unsqueeze(0), None


def test_the_flash_family_reads_the_same_layout():
    torch.manual_seed(0)
    rows = [[1, 2, 3, 4], [1, 2, 9, 9, 9], [1, 2, 3], [1, 2, 5]]
    plan = packing.layout(rows, waste=0)
    size = plan["input_ids"].shape[1]
    q, k, v = torch.randn(1, 4, size, 8), torch.randn(1, 2, size, 8), torch.randn(1, 2, size, 8)
    wanted, _ = attention.packed_sdpa(None, None, q, k, v, plan, scaling=0.5)
    found, _ = attention.packed_flash(_varlen, None, q, k, v, plan, scaling=0.5)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_grouped_key_heads_fold_into_longer_queries(monkeypatch):
    """What a GPU runs, run here: queries that share a key head become one long row."""
    q, k, v = torch.randn(2, 5, 6, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    bias = torch.zeros(2, 1, 5, 7).masked_fill_(torch.rand(2, 1, 5, 7) > 0.7, -1e9)
    wanted = attention.attend(q, k, v, bias, 0.0, None)
    assert torch.allclose(attention.attend(q, k, v, bias, 0.0, None, native=False), wanted, atol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_stochastic_passes_share_no_masks(tokenizer, lora, packed):
    lora.lora_dropout = 0.5
    model = make("mistral", lora)
    backend = backend_of(model, tokenizer, "mc_dropout", packing=packed)
    prepared = list(backend.prepare(make_rows(1) * 4))  # one question, four times
    with torch.no_grad():
        logits = read_passes(backend, model, backend.collate(prepared), passes=5)
    assert logits.shape == (4, 5, 4)
    flat = logits.flatten(0, 1)
    assert (torch.pdist(flat) > 1e-6).all()


@pytest.mark.parametrize("limit", [1, 10**6])  # passes one after the other, and all side by side
def test_stochastic_passes_are_computed_without_padding(tokenizer, lora, monkeypatch, limit):
    monkeypatch.setattr("dappr_llm.inference.stochastic_passes._PASS_NUMBERS", limit)
    lora.lora_dropout = 1e-9  # nothing is ever dropped: every pass is the one without dropout
    model = make("mistral", lora)
    backend = backend_of(model, tokenizer, "mc_dropout")
    rows = [{**row, "question": "very long story " * i + row["question"]} for i, row in enumerate(make_rows(5))]
    prepared = list(backend.prepare(rows))
    seen = []
    model.get_base_model().model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    with torch.no_grad():
        found = read_passes(backend, model, backend.collate(prepared), passes=3)
        padded = backend_of(model, tokenizer, packing=False)
        wanted = padded.read(model, padded.collate(prepared)).logits
    assert found.shape == (5, 3, 4)
    assert torch.allclose(found, wanted.unsqueeze(1).expand_as(found), atol=1e-4)
    own = sum(row["length"] for row in prepared)
    computed = [shape[1] for shape in seen if shape[0] == 1 and shape[1] >= own]
    assert computed == ([own] * 3 if limit == 1 else [3 * own])
