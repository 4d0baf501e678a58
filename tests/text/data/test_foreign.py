"""The list of foreign questions: sixty, distinct, of the quickstart's form, and none of `everyday`'s words as topic."""

from collections import Counter

from dappr_llm.text.data.everyday import generate
from dappr_llm.text.data.foreign import foreign_questions


def test_form():
    items = foreign_questions()
    assert len(items) == len({item["question"] for item in items}) == len({item["id"] for item in items}) == 60
    assert Counter(item["label"] for item in items) == dict.fromkeys(range(4), 15)
    for item in items:
        assert len(set(item["options"])) == 4 and all(item["options"])


def test_right_options_stay_right():
    found = {item["question"]: item["options"][item["label"]] for item in foreign_questions()}
    assert found["What is the capital of France?"] == "Paris" and found["Calculate 8 * 7 - 6."] == "50"


def test_none_is_an_everyday_question():
    own = {item["question"] for split in ("train", "test") for item in generate("everyday", split)}
    assert not own & {item["question"] for item in foreign_questions()}
