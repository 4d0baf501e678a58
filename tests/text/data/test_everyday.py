import hashlib
import json
import re
from collections import Counter
from itertools import combinations, pairwise

import pytest

from dappr_llm.text.data.everyday import SPLITS, generate, split_words
from dappr_llm.text.data.everyday_facts import ALSO, ANTONYMS, CATEGORIES, CONFUSABLE, RELATED

ALL_SPLITS = [(name, split) for name, splits in SPLITS.items() for split in splits]
EVERYDAY_SPLITS = list(SPLITS["everyday"])
HOME = {word: noun for noun, words in CATEGORIES.items() for word in words}
OPPOSITE = {word: other for pair in ANTONYMS for word, other in (pair, pair[::-1])}

DIGEST = "6650e3d6bd137e67e3c56e4bb7e52963249125d36deae9f2ea72197831b81d7e"

# Written without the tables: pairs of categories in which one word can be right for both.
OVERLAPPING = [
    *combinations(["animal", "bird", "fish", "insect"], 2),
    *combinations(["fruit", "vegetable", "tree", "flower"], 2),
    ("tool", "kitchen item"),
    ("kitchen item", "piece of furniture"),
    *(("colour", noun) for noun in ["fruit", "vegetable", "tree", "flower", "metal", "bird", "drink"]),
]

# Written without the tables: words with a second meaning and the categories in which they would be right.
AMBIGUOUS = {
    "orange": {"fruit", "colour", "tree"},
    "turkey": {"bird", "animal"},
    "Turkey": {"country"},
    "bow": {"tool"},
    "bat": {"animal"},
    "rose": {"flower", "colour", "drink"},
    "salmon": {"fish", "animal", "colour"},
    "olive": {"fruit", "tree", "colour", "vegetable"},
    "cricket": {"insect", "animal", "sport"},
    "kiwi": {"fruit", "bird", "animal"},
    "palm": {"tree", "part of the body"},
    "iris": {"flower", "part of the body"},
    "iron": {"metal", "tool", "kitchen item"},
    "beetle": {"insect", "animal", "vehicle"},
    "tongue": {"part of the body", "language"},
    "gold": {"metal", "colour"},
    "violet": {"flower", "colour"},
    "knife": {"kitchen item", "tool"},
}


def named_word(question: str) -> str | None:
    """The word that a naming question of the training split asks for."""
    match = re.fullmatch(r"(?:Which of these|Which one) is (.+)\?|Pick (.+)\.", question)
    assert match, question
    word = match[1] or match[2]
    return word if word in HOME else None


def asked_category(question: str) -> str:
    if named_word(question):
        return HOME[named_word(question)]
    match = re.fullmatch(r"(?:Which of these|Which one) is (an?) (.+)\?|Pick the (.+)\.", question)
    assert match, question
    article, noun = match[1], match[2] or match[3]
    assert article in (None, "an" if noun in ("animal", "insect") else "a"), question
    return noun


def test_sizes():
    assert SPLITS == {
        "everyday": {"train": 2400, "validation": 240, "test": 480, "calibration": 1200},
        "everyday_arithmetic": {"validation": 120, "test": 480},
        "everyday_opposites": {"validation": 120, "test": 480},
    }


def test_same_items_everywhere():
    # Each test run has its own hash seed, so an order taken from a set would show here too.
    items = [item for name, split in ALL_SPLITS if split != "calibration" for item in generate(name, split)]
    assert hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest() == DIGEST


@pytest.mark.parametrize(("name", "split"), ALL_SPLITS)
def test_form_of_items(name, split):
    items = generate(name, split)
    assert len(items) == SPLITS[name][split]
    assert [item["id"] for item in items] == [f"{name}-{split}-{index:05d}" for index in range(len(items))]
    for item in items:
        assert list(item) == ["id", "question", "options", "label"]
        assert all(isinstance(option, str) and option for option in item["options"])
        assert len(item["options"]) == len(set(item["options"])) == 4
        assert item["label"] in range(4)


@pytest.mark.parametrize(("name", "split"), ALL_SPLITS)
@pytest.mark.parametrize("size", [None, 1001, 6000])
def test_items_are_distinct_and_labels_balanced(name, split, size):
    items = generate(name, split, size)
    assert len(items) == (size or SPLITS[name][split])
    assert len({(item["question"], frozenset(item["options"])) for item in items}) == len(items)
    counts = Counter(item["label"] for item in items)
    assert len(counts) == 4
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize(("name", "split"), ALL_SPLITS)
def test_labels_are_shuffled(name, split):
    labels = [item["label"] for item in generate(name, split, 480)]
    # A fixed cycle of the labels would leave 4 kinds of consecutive pairs.
    assert len(set(pairwise(labels))) == 16


@pytest.mark.parametrize(("name", "split"), ALL_SPLITS)
def test_smaller_size_is_a_prefix(name, split):
    assert generate(name, split, 50) == generate(name, split)[:50]
    assert generate(name, split, 0) == []


def test_category_tables():
    assert len(CATEGORIES) >= 20
    words = [word for pool in CATEGORIES.values() for word in pool]
    assert len(words) == len(set(words))
    for noun, pool in CATEGORIES.items():
        assert len(pool) >= 24
        # "catfish" would give away its category.
        assert not [word for word in pool if noun in word.lower()]
    assert {noun for group in CONFUSABLE for noun in group} <= set(CATEGORIES)
    for word, nouns in ALSO.items():
        assert set(nouns) <= set(CATEGORIES) - {HOME[word]}


def test_confusable_covers_the_overlapping_categories():
    for first, second in OVERLAPPING:
        assert any(first in group and second in group for group in CONFUSABLE), (first, second)


@pytest.mark.parametrize("split", EVERYDAY_SPLITS)
def test_everyday_has_one_right_option(split):
    for item in generate("everyday", split, 3000):
        noun = asked_category(item["question"])
        for index, option in enumerate(item["options"]):
            assert (HOME[option] == noun) == (index == item["label"]), item
            if index != item["label"]:
                assert not any(noun in group and HOME[option] in group for group in CONFUSABLE), item
                assert noun not in ALSO.get(option, ()), item
                assert noun not in AMBIGUOUS.get(option, ()), item


def test_half_of_the_training_items_and_no_others_name_their_word():
    for split in EVERYDAY_SPLITS:
        items = generate("everyday", split)
        named = [item for item in items if named_word(item["question"])]
        assert all(item["options"][item["label"]] == named_word(item["question"]) for item in named)
        assert abs(len(named) / len(items) - 0.5) < 0.03 if split == "train" else not named


@pytest.mark.parametrize("split", EVERYDAY_SPLITS)
def test_everyday_distractors_are_of_different_kinds(split):
    for item in generate("everyday", split):
        assert len({HOME[option] for option in item["options"]}) == 4, item


@pytest.mark.parametrize("split", EVERYDAY_SPLITS)
def test_everyday_categories_are_balanced(split):
    items = generate("everyday", split)
    counts = Counter(asked_category(item["question"]) for item in items)
    assert set(counts) == set(CATEGORIES)
    assert max(counts.values()) - min(counts.values()) <= 3
    assert len({item["question"].split()[1] for item in items if not named_word(item["question"])}) == 3


def test_everyday_words_are_unseen():
    used = {
        split: {option for item in generate("everyday", split, 6000) for option in item["options"]}
        for split in EVERYDAY_SPLITS
    }
    assert used["calibration"] == used["test"]
    for first, second in combinations(EVERYDAY_SPLITS, 2):
        assert {first, second} == {"calibration", "test"} or not used[first] & used[second]
    assert set().union(*used.values()) == set(HOME)


def test_calibration_items_are_like_test_items_and_none_of_them():
    """A p-value holds for rows that could have been calibration rows."""
    calibration, tests = generate("everyday", "calibration"), generate("everyday", "test", 2000)
    keys = [{(item["question"], frozenset(item["options"])) for item in items} for items in (calibration, tests)]
    assert len(calibration) == 1200 and not keys[0] & keys[1]
    assert {item["question"] for item in calibration} == {item["question"] for item in tests}


def test_split_words():
    pools = {split: split_words(split) for split in EVERYDAY_SPLITS}
    assert pools.pop("calibration") == pools["test"]
    for noun, words in CATEGORIES.items():
        sizes = {split: len(pools[split][noun]) for split in pools}
        assert 0.6 <= sizes["train"] / len(words) <= 0.7
        assert sizes["validation"] >= 3 and sizes["test"] >= 5
        assert sorted(word for split in pools for word in pools[split][noun]) == sorted(words)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_arithmetic_is_true(split):
    compute = {"+": int.__add__, "-": int.__sub__, "times": int.__mul__}
    for item in generate("everyday_arithmetic", split, 2000):
        match = re.fullmatch(r"What is (\d+) (\+|-|times) (\d+)\?", item["question"])
        assert match, item
        values = [int(option) for option in item["options"]]
        result = compute[match[2]](int(match[1]), int(match[3]))
        assert values.count(result) == 1 and values[item["label"]] == result, item
        assert min(values) >= 0
        assert item["options"] == [str(value) for value in values]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_arithmetic_operations_are_balanced(split):
    counts = Counter(item["question"].split()[3] for item in generate("everyday_arithmetic", split))
    assert set(counts) == {"+", "-", "times"}
    assert max(counts.values()) - min(counts.values()) <= 3


def test_antonym_tables():
    assert len(ANTONYMS) >= 60
    words = [word for pair in ANTONYMS for word in pair]
    assert len(words) == len(set(words))
    # The words of the near OOD task are no words of the task itself.
    assert not set(words) & set(HOME)
    for group in RELATED:
        assert set(group) <= set(words), group
        assert not [word for word in group if OPPOSITE[word] in group]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_opposites_have_one_right_option(split):
    asked = set()
    for item in generate("everyday_opposites", split, 2000):
        match = re.fullmatch(r"(?:What|Which word) is the opposite of (\w+)\?", item["question"])
        assert match, item
        word = match[1]
        asked.add(word)
        answer = item["options"][item["label"]]
        assert answer == OPPOSITE[word], item
        for option in item["options"]:
            assert option in OPPOSITE and option != word, item
            assert option == answer or not any(option in group and answer in group for group in RELATED), item
    assert asked == {OPPOSITE[word] for word in asked}


@pytest.mark.parametrize(
    ("word", "second_opposite"),
    [("hard", "easy"), ("light", "dark"), ("right", "false"), ("end", "first"), ("low", "tall"), ("take", "lend")],
)
def test_second_opposites_are_related_to_the_answer(word, second_opposite):
    assert any(OPPOSITE[word] in group and second_opposite in group for group in RELATED)


@pytest.mark.parametrize("name", ["everyday_arithmetic", "everyday_opposites"])
def test_companions_share_no_question_between_splits(name):
    questions = [{item["question"] for item in generate(name, split)} for split in ("validation", "test")]
    assert not questions[0] & questions[1]


def test_errors_name_the_valid_values():
    with pytest.raises(ValueError, match="'birds', valid names: everyday, everyday_arithmetic, everyday_opposites"):
        generate("birds", "train")
    with pytest.raises(ValueError, match="'dev' of task 'everyday', valid splits: train, validation, test, "):
        generate("everyday", "dev")
    with pytest.raises(ValueError, match="'train' of task 'everyday_opposites', valid splits: validation, test"):
        generate("everyday_opposites", "train")
    with pytest.raises(ValueError, match="got -1"):
        generate("everyday", "test", -1)


def test_impossible_size_is_an_error(monkeypatch):
    monkeypatch.setattr("dappr_llm.text.data.everyday.MAX_MISSES", 50)
    monkeypatch.setattr(
        "dappr_llm.text.data.everyday.ANTONYMS", (("hot", "cold"), ("big", "small"), ("wet", "dry")) * 4
    )
    with pytest.raises(ValueError, match="has no 1000 distinct items"):
        generate("everyday_opposites", "test", 1000)
