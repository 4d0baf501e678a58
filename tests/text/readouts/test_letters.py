"""The answer readout: equal to the model's own logits, float32, independent of batch and padding."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import make_rows
from torch import nn

from dappr_llm.core.errors import UserError
from dappr_llm.methods import get_method
from dappr_llm.text.backend import TextBackend
from dappr_llm.text.forward_call import ForwardCall
from dappr_llm.text.model_reader import read_padded
from dappr_llm.text.readouts.vocabulary import VocabularyHead


def trained(model, lora):
    """An adapter whose B matrices are not zero, as after training."""
    model = get_peft_model(model, lora)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def read_letters(model, ids, token_ids):
    """What a model gives for these vocabulary rows at the last position."""
    VocabularyHead(model)
    return read_padded(model, {"input_ids": ids}, ForwardCall(torch.tensor(token_ids)))


def backend_for(model, tokenizer, **kwargs):
    return TextBackend(model, tokenizer, get_method("dappr"), num_choices=4, **kwargs)


def test_readout_equals_the_models_own_columns(model, tokenizer, lora):
    model = trained(model, lora)
    ids = torch.randint(3, 60, (3, 9))
    with torch.no_grad():
        full = model(ids).logits[:, -1]
        read = read_letters(model, ids, [5, 9, 11])
        untouched = model(ids).logits
    assert read.shape == (3, 3)
    assert torch.allclose(read, full[:, [5, 9, 11]], atol=1e-5)
    assert torch.equal(untouched[:, -1], full)  # a call that is not ours gets the whole vocabulary


def test_hidden_states_are_handed_over(model, tokenizer):
    model.eval()
    backend = backend_for(model, tokenizer)
    prepared = list(backend.prepare(make_rows(5)))
    with torch.no_grad():
        packed = backend.read(model, backend.collate(prepared), hidden_states=True)
        padded = backend.read(model, backend.collate(prepared, pack=False), hidden_states=True)
        assert backend.read(model, backend.collate(prepared)).features is None
    assert packed.features.shape == (5, 32)
    assert torch.allclose(packed.features, padded.features, atol=1e-5)
    rows = model.get_output_embeddings().weight[backend.readout.token_ids(4)]
    assert torch.allclose(packed.features @ rows.T, packed.logits, atol=1e-5)


def test_dropout_and_gradients_reach_the_adapter_of_the_head(model, lora):
    lora.lora_dropout = 0.5
    model = get_peft_model(model, lora).train()
    ids = torch.randint(3, 60, (3, 9))
    read_letters(model, ids, [5, 9]).square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in grads.values())
    head = next(grad for name, grad in grads.items() if "lm_head.lora_B" in name)
    assert head.abs().sum(-1).nonzero().flatten().tolist() == [5, 9]  # only the rows that were read


def test_float32_under_autocast_and_in_a_bfloat16_model(make_model, lora):
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (4, 9))
    model = trained(make_model().bfloat16(), lora)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = read_letters(model, ids, list(range(3, 60)))
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())  # more digits than bfloat16 has


def test_what_follows_the_head_acts_on_the_read_rows(tokenizer):
    """Gemma 2 caps its logits after the head: the readout must come out capped, and not only once full."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.05, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    ids = torch.randint(3, 60, (2, 7))
    with torch.no_grad():
        full = model(ids).logits[:, -1]
        read = read_letters(model, ids, [5, 9])
    assert torch.allclose(read, full[:, [5, 9]], atol=1e-6)
    assert read.abs().max() < 0.05


def build_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=80, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=2)
    )


@pytest.mark.parametrize("architecture", ["mistral", "gpt2"])
def test_batch_size_and_padding_change_nothing(architecture, make_model, tokenizer):
    model = (make_model() if architecture == "mistral" else build_gpt2()).eval()
    backend = backend_for(model, tokenizer)
    prepared = list(backend.prepare(make_rows(9)))
    assert len({row["length"] for row in prepared}) > 1
    with torch.no_grad():
        alone = torch.cat([backend.read(model, backend.collate([row])).logits for row in prepared])
        together = backend.read(model, backend.collate(prepared)).logits
        reversed_order = backend.read(model, backend.collate(prepared[::-1])).logits.flip(0)
    assert torch.allclose(alone, together, atol=1e-4)
    assert torch.allclose(alone, reversed_order, atol=1e-4)


def test_wider_readings_extend_narrower_ones(model, tokenizer):
    model.eval()
    backend = backend_for(model, tokenizer, evidence_offset=-3.0)
    batch = backend.collate(list(backend.prepare(make_rows(3))))
    with torch.no_grad():
        narrow = backend.read(model, batch).logits
        wide = backend.read(model, batch, width=6).logits
        again = backend.read(model, batch).logits
    assert wide.shape == (3, 6) and torch.equal(narrow, again)
    assert torch.allclose(wide[:, :4], narrow, atol=1e-6)


def test_the_offset_is_added_to_every_answer(model, tokenizer):
    model.eval()
    plain, shifted = backend_for(model, tokenizer), backend_for(model, tokenizer, evidence_offset=2.5)
    batch = plain.collate(list(plain.prepare(make_rows(3))))
    with torch.no_grad():
        assert torch.allclose(plain.read(model, batch).logits + 2.5, shifted.read(model, batch).logits, atol=1e-6)


def test_saved_adapter_opens_with_plain_peft(make_model, tokenizer, lora, tmp_path):
    model = trained(make_model(), lora)
    backend = backend_for(model, tokenizer)
    batch = backend.collate(list(backend.prepare(make_rows(5))))
    with torch.no_grad():
        wanted = backend.read(model, batch).logits
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    plain = PeftModel.from_pretrained(make_model(), tmp_path).eval()
    with torch.no_grad():
        full = plain(**{k: batch[k] for k in ("input_ids", "attention_mask", "position_ids")}).logits[:, -1]
    assert torch.allclose(full[:, backend.readout.token_ids(4)], wanted, atol=1e-5)


def test_dora_on_the_head_falls_back_to_its_own_output(make_model):
    model = trained(make_model(), LoraConfig(r=4, target_modules=["lm_head"], use_dora=True, task_type="CAUSAL_LM"))
    ids = torch.randint(3, 60, (2, 7))
    with torch.no_grad():
        full = model(ids).logits[:, -1]
        assert torch.allclose(read_letters(model, ids, [5, 9]), full[:, [5, 9]], atol=1e-5)


@pytest.mark.parametrize("name", ["duq", "postnet", "natpn", "rs_nn", "daedl", "fedl"])
def test_methods_for_class_conditional_features_are_refused_with_the_reason(name, model, tokenizer):
    with pytest.raises(UserError, match=f"'{name}' needs .*made for class-conditional features.*use one of: "):
        TextBackend(model, tokenizer, get_method(name), 4)


def test_methods_that_text_cannot_serve_are_refused_by_name(model, tokenizer):
    with pytest.raises(UserError, match="'duq' needs after_step, features, input_grad.*use one of: .*dappr"):
        TextBackend(model, tokenizer, get_method("duq"), 4)


def test_right_padding_is_refused(model, tokenizer):
    import copy

    right = copy.deepcopy(tokenizer)
    right.padding_side = "right"
    with pytest.raises(UserError, match="left"):
        backend_for(model, right)
