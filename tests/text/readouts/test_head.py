"""The classification head: any number of labels, float32, the same in any batch, opened by plain PEFT."""

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig
from tiny import build_classifier, label_names, make_texts
from torch import nn
from transformers import AutoModelForSequenceClassification

from dappr_llm import UserError
from dappr_llm.methods import get_method
from dappr_llm.text import classifier
from dappr_llm.text.backend import TextBackend
from dappr_llm.text.readouts.head import HeadReadout

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def trained(model, **changes):
    """An adapter whose B matrices are not zero, as after training, and a head with large weights."""
    model = classifier.add_head_adapter(model, LoraConfig(**{**LORA, **changes}))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or (parameter.requires_grad and "score" in name):
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def backend_for(model, tokenizer, labels=3, method="dappr", **kwargs):
    method = get_method(method)
    classifier.labelled_config(model.config, label_names(labels), method, tokenizer)
    readout = HeadReadout(model, tokenizer, label_names(labels), method)
    return TextBackend(model, tokenizer, method, readout=readout, **kwargs)


def read(backend, model, rows, pack=True, **kwargs):
    with torch.no_grad():
        return backend.read(model, backend.collate(rows, pack), **kwargs)


@pytest.mark.parametrize("labels", [2, 3, 26, 27, 150, 1000])
def test_batch_size_order_padding_and_packing_change_nothing(labels, tokenizer):
    model = trained(build_classifier(labels))
    backend = backend_for(model, tokenizer, labels)
    rows = list(backend.prepare(make_texts(9, labels=labels)))
    assert len({row["length"] for row in rows}) > 1 and [row["num_options"] for row in rows] == [labels] * 9
    assert [row["labels"] for row in rows] == [i % labels for i in range(9)]
    alone = torch.cat([read(backend, model, [row]).logits for row in rows])
    packed = read(backend, model, rows)
    assert backend.packs and packed.logits.shape == (9, labels) and packed.logits.dtype == torch.float32
    for found in (
        packed.logits,
        read(backend, model, rows, pack=False).logits,
        read(backend, model, rows[::-1]).logits.flip(0),
    ):
        assert torch.allclose(found, alone, atol=1e-5)


def test_logits_are_what_plain_transformers_gives(tokenizer):
    model = trained(build_classifier())
    backend = backend_for(model, tokenizer)
    rows = list(backend.prepare(make_texts(6)))
    batch = backend.collate(rows)
    with torch.no_grad():
        plain = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert torch.allclose(read(backend, model, rows).logits, plain, atol=1e-5)


def test_the_hidden_states_that_the_head_reads_are_handed_over(tokenizer):
    model = trained(build_classifier())
    backend = backend_for(model, tokenizer)
    rows = list(backend.prepare(make_texts(5)))
    for pack in (True, False):
        found = read(backend, model, rows, pack, hidden_states=True)
        layer = backend.readout.score_layer(model)
        assert found.features.shape == (5, 32)
        assert torch.allclose(found.features @ layer.weight.T, found.logits, atol=1e-5)


def test_gradients_reach_the_head_and_the_adapter(tokenizer):
    model = trained(build_classifier()).train()
    backend = backend_for(model, tokenizer)
    rows = list(backend.prepare(make_texts(5)))
    backend.read(model, backend.collate(rows)).logits.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert any("score" in name for name in grads) and all(grad is not None for grad in grads.values())


def test_float32_above_a_bfloat16_model_and_under_autocast(tokenizer):
    model = trained(build_classifier(40).bfloat16())
    head = [p for name, p in model.named_parameters() if "score.modules_to_save" in name]
    assert [p.dtype for p in head] == [torch.float32]  # half precision would lose small steps of training
    backend = backend_for(model, tokenizer, 40)
    rows = list(backend.prepare(make_texts(5, labels=40)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = read(backend, model, rows).logits
    assert found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())
    batch = backend.collate(rows)
    with torch.no_grad():  # a call by anybody else works too
        assert model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.shape == (5, 40)


def test_methods_with_more_outputs_per_class_get_a_wider_head(tokenizer):
    method = get_method("ib_edl")
    model = build_classifier(3, outputs=method.num_outputs(3)).eval()
    backend = backend_for(model, tokenizer, 3, "ib_edl")
    rows = list(backend.prepare(make_texts(4)))
    full = read(backend, model, rows)
    assert full.logits.shape == (4, method.num_outputs(3))
    assert model.config.id2label[3] == "label 0 [2]" and model.config.label2id["label 2"] == 2
    assert torch.equal(read(backend, model, rows, width=2).logits, full.narrow(3, 2).logits)
    with pytest.raises(UserError, match="4 options.*3 labels"):
        read(backend, model, rows, width=4)


def test_a_head_of_another_size_is_refused(tokenizer):
    with pytest.raises(UserError, match="has 5 outputs, but 3 labels need 3"):
        backend_for(build_classifier(5), tokenizer, 3)


@pytest.mark.parametrize("labels", [2, 27])
def test_saved_adapter_opens_with_plain_peft(labels, tokenizer, tmp_path):
    names = label_names(labels)
    base = build_classifier(labels)
    base.base_model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    method = get_method("dappr")
    config = classifier.load_classifier_config(str(tmp_path / "base"), names, method, tokenizer)
    model = trained(classifier.load_classifier(str(tmp_path / "base"), config))
    backend = backend_for(model, tokenizer, labels, evidence_offset=1.5)
    rows = list(backend.prepare(make_texts(6, labels=labels)))
    wanted = read(backend, model, rows).logits
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    # Neither PEFT nor an adapter's files know labels: whoever loads it names them, as the sidecar and the card do.
    plain = AutoPeftModelForSequenceClassification.from_pretrained(
        tmp_path / "adapter", id2label=dict(enumerate(names))
    )
    batch = backend.collate(rows)
    with torch.no_grad():
        found = plain.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert list(plain.config.id2label.values()) == list(names)
    assert torch.allclose(found + 1.5, wanted, atol=1e-5)  # the evidence offset is ours, and in no weight


def test_a_base_model_in_4_bits_keeps_its_head(tokenizer, tmp_path):
    pytest.importorskip("bitsandbytes")
    build_classifier(5).base_model.save_pretrained(tmp_path)
    config = classifier.load_classifier_config(str(tmp_path), label_names(5), get_method("dappr"), tokenizer)
    model = classifier.load_classifier(str(tmp_path), config, quantization={"load_in_4bit": True})
    kinds = {name: type(part).__name__ for name, part in model.named_modules()}
    assert kinds["model.layers.0.mlp.up_proj"] == "Linear4bit" and kinds["score"] == "Linear"
    model = trained(model)
    backend = backend_for(model, tokenizer, 5)
    rows = list(backend.prepare(make_texts(5, labels=5)))
    layer = backend.readout.score_layer(model)
    assert layer.weight.dtype == torch.float32
    found = read(backend, model, rows, hidden_states=True)
    assert torch.allclose(found.features.float() @ layer.weight.T, found.logits, atol=1e-5)


def test_encoder_decoders_and_models_without_a_classifier_are_refused(tokenizer, tmp_path):
    from transformers import MambaConfig, T5Config

    for config, said in ((T5Config(), "encoder–decoder"), (MambaConfig(), "no sequence classifier")):
        config.save_pretrained(tmp_path / config.model_type)
        with pytest.raises(UserError, match=said):
            classifier.load_classifier_config(
                str(tmp_path / config.model_type), label_names(3), get_method("dappr"), tokenizer
            )


def test_a_base_that_lacks_weights_is_refused(tokenizer, tmp_path):
    model = build_classifier(3)
    model.config.num_hidden_layers = 3
    model.config.save_pretrained(tmp_path)
    from safetensors.torch import save_file

    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    config = classifier.load_classifier_config(str(tmp_path), label_names(3), get_method("dappr"), tokenizer)
    with pytest.raises(UserError, match="lack .* weights of a MistralForSequenceClassification"):
        classifier.load_classifier(str(tmp_path), config)


def test_another_models_outputs_are_not_touched(tokenizer):
    ours, other = build_classifier(), build_classifier()
    backend_for(ours, tokenizer)
    assert not other._forward_hooks and not other.score._forward_hooks
    ids = torch.randint(3, 50, (2, 6))
    with torch.no_grad():
        assert torch.equal(ours.eval()(ids).logits, other.eval()(ids).logits)


def test_auto_model_is_what_is_trained(tokenizer, tmp_path):
    build_classifier(3).save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert classifier.is_classifier(loaded) and not classifier.is_encoder(loaded.config)
