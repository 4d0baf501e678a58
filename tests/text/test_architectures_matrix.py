"""Every architecture of docs/models.md with every readout: batches change nothing, plain PEFT loads the same logits."""

from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, build_lm, save_base, table
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel
from tiny import build_tokenizer, label_names, make_rows, make_texts
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dappr_llm.methods import get_method
from dappr_llm.text import classifier, lm
from dappr_llm.text.backend import TextBackend
from dappr_llm.text.prompt import LabelPrompt, Prompt
from dappr_llm.text.readouts.head import HeadReadout

ROOT = Path(__file__).resolve().parents[2]
METHOD = get_method("dappr")
LABELS = label_names(3)
CHAT = "{% for m in messages %}Question : {{ m['content'] }} . {% endfor %}{% if add_generation_prompt %}Answer :{% endif %}"
DECODERS = [name for name, chosen in ARCHITECTURES.items() if chosen.decoder]


def disturbed(model):
    """As after training: nothing that is trained is zero or small."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2 if "lora" in name else 0.5)
    return model.eval()


def check_batches(name, backend, model, prepared):
    """Logits of each row alone, in one batch, in another order, padded; returns them."""
    with torch.no_grad():
        alone = torch.cat([backend.read(model, backend.collate([row])).logits for row in prepared])
        whole = backend.read(model, backend.collate(prepared)).logits
        turned = backend.read(model, backend.collate(prepared[::-1])).logits.flip(0)
        padded = backend.read(model, backend.collate(prepared, pack=False)).logits
    assert len({row["length"] for row in prepared}) > 1
    assert backend.packs == ARCHITECTURES[name].packed
    for found in (whole, turned, padded):
        assert torch.allclose(found, alone, atol=1e-5)
    return whole


def head_backend(name, folder, tokenizer, lora=True, **kwargs):
    base = save_base(name, folder, tokenizer)
    config = classifier.load_classifier_config(base, LABELS, METHOD, tokenizer)
    torch.manual_seed(2)
    model = classifier.load_classifier(base, config)
    if lora:
        model = classifier.add_head_adapter(model, LoraConfig(r=4), base)
    model = disturbed(model)
    return model, TextBackend(
        model, tokenizer, METHOD, readout=HeadReadout(model, tokenizer, LABELS, METHOD), base_model=base, **kwargs
    )


def plain_logits(model, backend, prepared, folder):
    """As a user of transformers reads rows, with the saved tokenizer's padding."""
    backend.save_processor(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer.pad([{"input_ids": row["input_ids"]} for row in prepared], return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_head_with_lora(name, tmp_path):
    model, backend = head_backend(name, tmp_path / "base", build_tokenizer())
    prepared = list(backend.prepare(make_texts(7)))
    logits = check_batches(name, backend, model, prepared)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    torch.manual_seed(3)  # what is not in the adapter's files would start elsewhere
    plain = AutoPeftModelForSequenceClassification.from_pretrained(
        tmp_path / "adapter", id2label=dict(enumerate(LABELS))
    )
    assert torch.allclose(plain_logits(plain, backend, prepared, tmp_path / "tokenizer"), logits, atol=1e-5)
    assert tuple(plain.config.id2label.values()) == LABELS


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_head_with_every_weight_trained(name, tmp_path):
    model, backend = head_backend(name, tmp_path / "base", build_tokenizer(), lora=False)
    prepared = list(backend.prepare(make_texts(7)))
    with torch.no_grad():
        logits = backend.read(model, backend.collate(prepared)).logits
    model.save_pretrained(tmp_path / "whole")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")
    assert torch.allclose(plain_logits(plain, backend, prepared, tmp_path / "tokenizer"), logits, atol=1e-5)
    assert tuple(plain.config.id2label.values()) == LABELS


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_features_are_what_enters_the_last_layer(name, tmp_path):
    model, backend = head_backend(name, tmp_path, build_tokenizer())
    prepared = list(backend.prepare(make_texts(5)))
    with torch.no_grad():
        found = backend.read(model, backend.collate(prepared), hidden_states=True)
    layer = backend.readout.score_layer(model)
    assert torch.allclose(nn.functional.linear(found.features, layer.weight, layer.bias), found.logits, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_letters(name, tmp_path):
    tokenizer = build_tokenizer()
    model = disturbed(
        lm.add_adapter(build_lm(name), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    )
    backend = TextBackend(model, tokenizer, METHOD, num_choices=4)
    prepared = list(backend.prepare(make_rows(7)))
    logits = check_batches(name, backend, model, prepared)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    plain = PeftModel.from_pretrained(build_lm(name), tmp_path).eval()
    batch = backend.collate(prepared)
    with torch.no_grad():
        full = plain(**{key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}).logits[:, -1]
    assert torch.allclose(full[:, backend.readout.token_ids(4)], logits, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_chat_templates(name, tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT
    model = build_lm(name)
    letters = TextBackend(model, tokenizer, METHOD, num_choices=4, prompt=Prompt(chat=True))
    check_batches(name, letters, model, list(letters.prepare(make_rows(5))))
    assert letters.prompt.rendered == ("Question : ", " . Answer :")
    model, head = head_backend(name, tmp_path, tokenizer, prompt=LabelPrompt(chat=True))
    prepared = list(head.prepare(make_texts(5)))
    check_batches(name, head, model, prepared)
    words = tokenizer.convert_ids_to_tokens(prepared[0]["input_ids"])
    assert words[:3] == ["Question", ":", "Which"] and words[-2:] == ["Answer", ":"]


def test_the_table_of_the_docs_is_this_table():
    """To write it anew: `PYTHONPATH=tests python -c "import architectures; print(architectures.table())"`."""
    assert table() in (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
