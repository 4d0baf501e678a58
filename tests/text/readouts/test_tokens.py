"""Labels read from tokens: which tokens, the same logits however batches are made, checkpoints, plain PEFT."""

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from tiny import WORDS, build_model, build_tokenizer, label_names, make_texts
from torch import nn

from dappr_llm.core.errors import UserError
from dappr_llm.methods import get_method
from dappr_llm.text.backend import TextBackend
from dappr_llm.text.prompt import TokenPrompt
from dappr_llm.text.readouts.answer_tokens import answer_prompt, choose_answers, find_answers
from dappr_llm.text.readouts.tokens import TokenReadout

LABELS = ("fruit", "tool", "colour")


def wide_tokenizer(count=400):
    """The tiny tokenizer with that many more words."""
    from transformers import PreTrainedTokenizerFast

    state = json.loads(build_tokenizer().backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for i in range(count):
        vocabulary[f"w{i}"] = len(vocabulary)
    from tokenizers import Tokenizer

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), pad_token="<pad>", unk_token="<unk>", bos_token="<s>",
        padding_side="left",
    )  # fmt: skip


def bpe_tokenizer(texts):
    """A byte-level BPE tokenizer that knows the words of these texts as whole tokens, with a space before them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=["<pad>", "<s>"], initial_alphabet=alphabet)
    core.train_from_iterator(texts * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", padding_side="left")


def build(labels, tokenizer, model, answers=None, method="dappr", prompt=None, **kwargs):
    layout = answer_prompt(prompt or {}, labels).settled(tokenizer)
    found = choose_answers(tokenizer, labels, answers, layout)
    readout = TokenReadout(model, tokenizer, found)
    return TextBackend(
        model, tokenizer, get_method(method), prompt=layout.listing(found.listed), readout=readout, **kwargs
    )


def sized_model(tokenizer, seed=0):
    model = build_model(seed)
    model.resize_token_embeddings(max(len(tokenizer), 80))
    return model.eval()


def trained(model):
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM")
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def read(backend, model, rows, pack=True, **kwargs):
    with torch.no_grad():
        return backend.read(model, backend.collate(rows, pack=pack), **kwargs)


# --- which tokens ---------------------------------------------------------------------------------------------------


def test_given_answers_are_single_tokens_after_the_prompt(tokenizer):
    found = choose_answers(tokenizer, ("spam", "ham"), {"spam": " red", "ham": " blue"}, TokenPrompt())
    assert tokenizer.convert_ids_to_tokens(list(found.ids)) == ["red", "blue"]
    assert found.listed == "spam = red, ham = blue"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"spam": " red blue", "ham": " fig"}, r"'spam' is ' red blue', which is not one token.*\['red', 'blue'\]"),
        ({"spam": " unheard", "ham": " fig"}, r"'spam' is ' unheard'.*<unk>"),
        ({"spam": " red", "ham": "red"}, "'spam' and 'ham' have the same token 'red'"),
        ({"spam": " red", "ham": " fig", "eggs": " saw"}, "no label 'eggs'"),
        ({"spam": " red"}, "no answer for the label 'ham'"),
    ],
)
def test_other_answers_are_refused(answers, said, tokenizer):
    with pytest.raises(UserError, match=said):
        choose_answers(tokenizer, ("spam", "ham"), answers, TokenPrompt())


def test_numbers_may_be_labels_of_answers(tokenizer):
    found = choose_answers(tokenizer, ("0", "1"), {0: " red", 1: " blue"}, TokenPrompt())
    assert found.labels == ("0", "1")


def test_a_space_at_the_end_of_the_prompt_is_explained():
    tokenizer = bpe_tokenizer(["Label: Yes No"])
    prompt = TokenPrompt(template="{text} Label: ")
    with pytest.raises(UserError, match=r"grown together|not one token"):
        choose_answers(tokenizer, ("a", "b"), {"a": "Yes", "b": "No"}, prompt)


def test_names_that_are_tokens_stand_for_themselves():
    tokenizer = bpe_tokenizer(["Label: spam ham eggs card arrival linking refund"])
    found = find_answers(tokenizer, ("spam", "ham"), TokenPrompt())
    assert tokenizer.convert_ids_to_tokens(list(found.ids)) == ["Ġspam", "Ġham"]
    assert found.texts == (" spam", " ham") and found.listed == "spam, ham"


def test_an_assistants_message_begins_without_a_space():
    tokenizer = bpe_tokenizer(["Label: spam ham", "spam", "ham"])
    prompt = TokenPrompt(chat=True, rendered=("<user>", "<assistant>"))
    found = find_answers(tokenizer, ("spam", "ham"), prompt)
    assert tokenizer.convert_ids_to_tokens(list(found.ids)) == ["spam", "ham"] and found.texts == ("spam", "ham")


def test_a_word_that_two_labels_share_stands_for_neither():
    tokenizer = bpe_tokenizer(["Label: card arrival linking refund"])
    found = find_answers(tokenizer, ("card_arrival", "card_linking", "refund"), TokenPrompt())
    assert tokenizer.convert_ids_to_tokens(list(found.ids)) == ["Ġarrival", "Ġlinking", "Ġrefund"]
    assert found == find_answers(tokenizer, ("card_arrival", "card_linking", "refund"), TokenPrompt())


def test_labels_without_words_of_their_own_get_reserve_tokens(caplog):
    caplog.set_level("INFO")
    tokenizer = wide_tokenizer()
    found = choose_answers(tokenizer, label_names(300), None, TokenPrompt())
    assert len(set(found.ids)) == 300 and not set(found.ids) & set(tokenizer.all_special_ids)
    assert "Found 300 tokens for 300 labels: label 0 = " in caplog.text
    with pytest.raises(UserError, match="500 labels need as many tokens.*model.readout: head"):
        find_answers(tokenizer, label_names(500), TokenPrompt())


def test_the_prompt_lists_a_few_labels_and_not_many(tokenizer):
    few = answer_prompt({}, LABELS).listing("fruit, tool, colour")
    assert few.render("Which ?", LABELS).startswith("Classify the text below.\nLabels: fruit, tool, colour\n")
    many = answer_prompt({}, label_names(31)).listing("…")
    assert many.render("Which ?", label_names(31)) == "Classify the text below.\n\nText: Which ?\nLabel:"
    own = answer_prompt({"template": "{text} ?"}, LABELS).listing("…")
    assert own.render("Which", LABELS) == "Which ?" and own.listed is None


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [2, 3, 27, 150, 300])
def test_batch_size_order_and_packing_change_nothing(labels):
    tokenizer = wide_tokenizer()
    model = trained(sized_model(tokenizer))
    backend = build(label_names(labels), tokenizer, model)
    rows = list(backend.prepare(make_texts(7, labels=labels)))
    together = read(backend, model, rows).logits
    assert together.shape == (7, labels) and backend.num_choices == labels
    alone = torch.cat([read(backend, model, [row]).logits for row in rows])
    backwards = read(backend, model, rows[::-1]).logits.flip(0)
    padded = read(backend, model, rows, pack=False).logits
    for other in (alone, backwards, padded):
        assert torch.allclose(together, other, atol=1e-4)
    assert backend.packs


def test_only_the_rows_of_the_answers_are_computed_and_their_state_is_handed_over(tokenizer):
    model = trained(build_model())
    backend = build(LABELS, tokenizer, model)
    rows = list(backend.prepare(texts(5)))
    seen = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: seen.append((args[0].shape, output.shape)))
    for pack in (True, False):
        found = read(backend, model, rows, pack, hidden_states=True)
        assert found.features.shape == (5, 32)
        ids = backend.readout.token_ids(3)
        base = head.get_base_layer().weight[ids] + head.scaling["default"] * (
            head.lora_B["default"].weight[ids] @ head.lora_A["default"].weight
        )
        assert torch.allclose(found.features @ base.T, found.logits, atol=1e-5)
    handle.remove()
    assert [shapes[1][-1] for shapes in seen[-2:]] == [3, 3]


def texts(count, start=0):
    return [
        {"text": f"Which {WORDS[24 + i % 9]} is", "label": LABELS[i % 9 // 3]} for i in range(start, start + count)
    ]


def test_methods_with_more_outputs_read_more_rows(tokenizer):
    model = build_model().eval()
    backend = build(LABELS, tokenizer, model, method="ib_edl")
    rows = list(backend.prepare(texts(4)))
    three, two = read(backend, model, rows).logits, read(backend, model, rows, width=2).logits
    assert three.shape == (4, 6) and torch.allclose(two, three[:, [0, 1, 3, 4]], atol=1e-6)
    with pytest.raises(UserError, match="4 options, but this model has 3 labels"):
        read(backend, model, rows, width=4)


@pytest.mark.parametrize("labels", [2, 27])
def test_plain_peft_gives_the_same_logits_at_these_tokens(labels, tmp_path):
    tokenizer = wide_tokenizer()
    base = sized_model(tokenizer)
    base.save_pretrained(tmp_path / "base")
    model = trained(type(base).from_pretrained(tmp_path / "base"))
    backend = build(label_names(labels), tokenizer, model)
    rows = list(backend.prepare(make_texts(6, labels=labels)))
    wanted = read(backend, model, rows).logits
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    plain = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    batch = backend.collate(rows, pack=False)
    with torch.no_grad():
        full = plain(**{k: batch[k] for k in ("input_ids", "attention_mask", "position_ids")}).logits[:, -1]
    assert torch.allclose(full[:, backend.config()["answer_token_ids"]], wanted, atol=1e-5)
