"""Hidden states for the gate: the fixed rule, and the same numbers however rows are batched, packed or cached."""

import pytest
import torch
from architectures import ARCHITECTURES
from peft import LoraConfig, get_peft_model
from tiny import build_model, label_names, make_rows, make_texts
from transformers import AutoModelForSequenceClassification

from dappr_llm.methods.cross_entropy import CrossEntropy
from dappr_llm.methods.dappr import DAPPr
from dappr_llm.text.backend import TextBackend
from dappr_llm.text.content_tokens import positions
from dappr_llm.text.pooled_states import pooled_layers
from dappr_llm.text.prompt import LabelPrompt, Prompt, TokenPrompt
from dappr_llm.text.readouts.head import HeadReadout
from dappr_llm.text.tokenising import tokenize_items


def build(tokenizer, layers=6, **options):
    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = get_peft_model(build_model(layers=layers), lora).eval()
    return model, TextBackend(model, tokenizer, DAPPr(), num_choices=4, **options)


def rows_of(backend, count=9):
    prepared = backend.prepare(make_rows(count), labelled=False)
    return [prepared[i] for i in range(count)]


@torch.no_grad()
def read(model, backend, rows, pack=True):
    out = backend.read(model, backend.collate(rows, pack=pack, gate=True), gate=True)
    return out.gate, out.logits


def test_which_layers():
    assert pooled_layers(30) == {10: True, 15: True, 20: True, 29: False}
    assert pooled_layers(28) == {9: True, 14: True, 19: True, 27: False}
    assert pooled_layers(2) == {1: True}
    assert pooled_layers(1) == {0: True}


def test_the_rule_is_what_transformers_gives(tokenizer):
    """Against `output_hidden_states` of a padded batch, position by position."""
    model, backend = build(tokenizer)
    rows = rows_of(backend)
    found, _ = read(model, backend, rows)
    for i, row in enumerate(rows):
        with torch.no_grad():
            out = model(torch.tensor([row["input_ids"]]), output_hidden_states=True)
        content = positions(row["content"])
        expected = []
        for layer in (2, 3, 4):
            states = out.hidden_states[layer][0]
            expected += [states[-1], states[content].mean(0)]
        expected += [out.hidden_states[5][0][content].mean(0), out.hidden_states[6][0][-1]]  # the last one is normed
        torch.testing.assert_close(found[i], torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert len(backend.gate_groups(model)) == found.shape[1] == 8


@pytest.mark.parametrize("share", [True, False])
def test_batches_packing_and_order_change_nothing(tokenizer, share):
    model, backend = build(tokenizer, share_prefix=share)
    rows = rows_of(backend)
    together, logits = read(model, backend, rows)
    assert backend.packs
    padded, _ = read(model, backend, rows, pack=False)
    torch.testing.assert_close(padded, together, rtol=1e-4, atol=1e-5)
    single = torch.cat([read(model, backend, [row], pack=False)[0] for row in rows])
    torch.testing.assert_close(single, together, rtol=1e-4, atol=1e-5)
    turned, _ = read(model, backend, rows[::-1] + rows[:1])  # and one row twice, which shares all its tokens
    torch.testing.assert_close(turned[:-1].flip(0), together, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(turned[-1], together[0], rtol=1e-4, atol=1e-5)
    plain = backend.read(model, backend.collate(rows)).logits
    torch.testing.assert_close(logits, plain, rtol=1e-5, atol=1e-6)


def test_without_being_asked_nothing_is_pooled(tokenizer):
    model, backend = build(tokenizer)
    rows = rows_of(backend)
    read(model, backend, rows)
    out = backend.read(model, backend.collate(rows))
    assert out.gate is None and "content" not in backend.collate(rows)


def test_the_cache_of_frozen_layers_changes_nothing(tokenizer, tmp_path):
    model, backend = build(tokenizer)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".layers.5." in name and "lora" in name
    rows = rows_of(backend)
    before, _ = read(model, backend, rows)
    backend.use_frozen_layers_cache(model, str(tmp_path))
    for pack in (True, False):
        after, _ = read(model, backend, rows, pack)
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert "trunk" in backend.collate(rows)["packed"]  # other calls still start from it


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_a_gate(tokenizer, name):
    """Encoders have means and what their head pools; decoders also the last token."""
    config, labels = ARCHITECTURES[name].tiny(), label_names(3)
    config.id2label = dict(enumerate(labels))
    config.pad_token_id = 0
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    readout = HeadReadout(model, tokenizer, labels, CrossEntropy())
    backend = TextBackend(model, tokenizer, CrossEntropy(), prompt=LabelPrompt(), readout=readout)
    prepared = backend.prepare(make_texts(6), labelled=False)
    rows = [prepared[i] for i in range(6)]
    found, _ = read(model, backend, rows)
    names = backend.gate_groups(model)
    assert names[-1] == "read state" and any("last token" in each for each in names) == ARCHITECTURES[name].decoder
    assert found.shape[:2] == (6, len(names)) and len(names) > 1
    single = torch.cat([read(model, backend, [row])[0] for row in rows])
    torch.testing.assert_close(single, found, rtol=1e-4, atol=1e-5)


# --- which tokens count ---------------------------------------------------------------------------------------------


def words(tokenizer, prompt, question, options=("plum", "saw"), limit=300, labels=None, truncation="start"):
    rows = {"id": ["a"], "question": [question], "options": [list(options)], "label": [0]}
    found = tokenize_items(rows, tokenizer, prompt, limit, truncation, labels)
    ids = found["input_ids"][0]
    return tokenizer.convert_ids_to_tokens([ids[i] for i in positions(found["content"][0])])


def test_content_is_question_and_options(tokenizer):
    found = words(tokenizer, Prompt(), "Which one is a fruit ?")
    assert found == ["Which", "one", "is", "a", "fruit", "?", "plum", "saw"]


def test_content_of_a_classifier_is_its_text_without_the_first_token(tokenizer):
    given = {"labels": ("fruit", "tool")}
    assert words(tokenizer, LabelPrompt(), "red blue green", **given) == ["blue", "green"]
    assert words(tokenizer, TokenPrompt(), "red blue green", **given) == ["red", "blue", "green"]
    assert words(tokenizer, LabelPrompt(), "red", **given) == ["red"]


def test_content_of_a_text_that_was_cut_is_what_is_left(tokenizer):
    long = "red " * 60 + "blue"
    for truncation, kept in (("start", "blue"), ("end", "red")):
        found = words(tokenizer, Prompt(), long, limit=50, truncation=truncation)
        assert found[-2:] == ["plum", "saw"] and found[-3] == kept and 5 < len(found) < 40


def test_content_in_a_chat_and_of_texts_with_control_tokens(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}<s>"
    prompt = Prompt(chat=True).settled(tokenizer)
    assert words(tokenizer, prompt, "Which fruit") == ["Which", "fruit", "plum", "saw"]
    found = words(tokenizer, prompt, "Which <s> fruit")
    assert found[0] == "Which" and found[-3:] == ["fruit", "plum", "saw"] and len(found) > 4
