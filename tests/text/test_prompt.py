"""The prompt, its letters, and truncation."""

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.text.prompt import Prompt, choice_token_ids
from dappr_llm.text.tokenising import tokenize_items


def test_layout():
    text = Prompt().render("What is {this}?", ["red", "blue"])
    assert text == (
        "Return the label of the correct answer for the question below.\n\n"
        "Question: What is {this}?\nChoices:\nA) red\nB) blue\nAnswer:"
    )
    assert Prompt().ending == "Answer:"


@pytest.mark.parametrize(
    "changes",
    [
        {"template": "{question} Answer:"},
        {"template": "{question.x}{choices}"},
        {"choice": "{letter}"},
        {"template": "{"},
        {"template": "{question:2000000000}{choices}"},
        {"template": "{question!r}{choices}"},
        {"template": "{question[0]}{choices}"},
        {"template": "{}{choices}{question}"},
        {"template": "{question}{choices}}"},
        {"template": "{question:{choices}}{choices}"},
        {"template": "{question}{choices}" * 100},
        {"template": "{question}{choices}" + "x" * 30_000},
        {"choice": "{letter:>9999999999}{text}"},
        {"template": ["{question}{choices}"]},
        {"instruction": None},
        {"choice": 3},
    ],
)
def test_templates_use_their_fields_and_nothing_else(changes):
    with pytest.raises(UserError, match="prompt"):
        Prompt(**changes)


def test_a_misspelt_field_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"\{qestion\}.*'question'"):
        Prompt(template="{qestion}{choices}")


def test_braces_are_doubled_and_values_are_never_templates_themselves():
    prompt = Prompt(instruction="{question}", template="{instruction} {{q}} {question} {choices}\n{{A}}:")
    assert (
        prompt.render("{choices} {{x}}", ["{letter}", "b"]) == "{question} {q} {choices} {{x}} A) {letter}\nB) b\n{A}:"
    )
    assert prompt.ending == "{A}:"


def test_letters_are_distinct_single_tokens(tokenizer):
    ids = choice_token_ids(tokenizer, 5)
    assert tokenizer.convert_ids_to_tokens(ids) == list("ABCDE")


def test_letters_that_are_not_in_the_vocabulary_are_refused(tokenizer):
    with pytest.raises(UserError, match="no single distinct token.*A–J"):
        choice_token_ids(tokenizer, 10)


def byte_tokenizer(merges_space):
    """BPE over bytes: with a merge `Ġ A` a spaced letter is one token, without it only the bare letter is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    merges = []
    if merges_space:
        for letter in "ABCD":
            vocabulary[f"Ġ{letter}"] = len(vocabulary)
            merges.append(("Ġ", letter))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left")


def test_a_spaced_letter_is_preferred_and_a_bare_one_accepted():
    spaced, bare = byte_tokenizer(True), byte_tokenizer(False)
    assert spaced.convert_ids_to_tokens(choice_token_ids(spaced, 4)) == ["ĠA", "ĠB", "ĠC", "ĠD"]
    assert bare.convert_ids_to_tokens(choice_token_ids(bare, 4)) == ["A", "B", "C", "D"]


def items(question, count=1):
    return {
        "id": ["x"] * count,
        "question": [question] * count,
        "options": [["red", "blue"]] * count,
        "label": [1] * count,
    }


def test_long_questions_lose_their_start_and_nothing_else(tokenizer):
    prompt = Prompt()
    question = "very " * 50 + "long story"
    whole = tokenize_items(items(question), tokenizer, prompt, 300)
    short = tokenize_items(items(question), tokenizer, prompt, 50)
    assert whole["truncated"] == [False] and short["truncated"] == [True]
    assert short["length"][0] == 50 < whole["length"][0]
    ending = tokenizer("long story\nChoices:\nA) red\nB) blue\nAnswer:")["input_ids"]
    assert short["input_ids"][0][-len(ending) :] == ending
    beginning = tokenizer("Return the label of the correct answer for the question below.\n\nQuestion:")["input_ids"]
    assert short["input_ids"][0][: len(beginning)] == beginning


def test_options_that_do_not_fit_are_an_error_naming_the_item(tokenizer):
    with pytest.raises(UserError, match="'x'.*max_length=20"):
        tokenize_items(items("very " * 50), tokenizer, Prompt(), 20)


@pytest.mark.parametrize(
    "truncation, kept", [("start", "long story"), ("end", "red blue"), ("head_tail", "red story")]
)
def test_what_a_long_question_loses_is_a_choice(tokenizer, truncation, kept):
    question = "red blue " + "very " * 50 + "long story"
    (ids,) = tokenize_items(items(question), tokenizer, Prompt(), 52, truncation)["input_ids"]
    text = tokenizer.decode(ids)
    assert len(ids) <= 52 and text.endswith("Choices : A ) red B ) blue Answer :")
    said = text.split("Question :")[1].split("Choices :")[0].split()
    first, last = kept.split()
    assert (said[0] == first) == (truncation != "start") and (said[-1] == last) == (truncation != "end")
