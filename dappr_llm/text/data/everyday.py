"""The bundled multiple-choice task `everyday` and its OOD tasks, generated from small fact tables."""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from .everyday_facts import ALSO, ANTONYMS, CATEGORIES, CONFUSABLE, RELATED

T = TypeVar("T")
# Question, right answer, three distractors.
Draw = tuple[str, str, list[str]]

SPLITS: dict[str, dict[str, int]] = {
    "everyday": {"train": 2400, "validation": 240, "test": 480, "calibration": 1200},
    "everyday_arithmetic": {"validation": 120, "test": 480},
    "everyday_opposites": {"validation": 120, "test": 480},
}

CATEGORY_QUESTIONS = ("Which of these is {article} {noun}?", "Which one is {article} {noun}?", "Pick the {noun}.")
# Every second training question contains the right option itself. A small model must first learn that a letter stands
# for the option beside it, and copying a word is learned long before classifying it.
NAMING_QUESTIONS = ("Which of these is {word}?", "Which one is {word}?", "Pick {word}.")
OPPOSITE_QUESTIONS = ("What is the opposite of {word}?", "Which word is the opposite of {word}?")

# The generator gives up after this many duplicates in a row.
MAX_MISSES = 10_000
# So many items of the test split have a question that no calibration item has.
_KEPT_FOR_TESTS = 2000


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _rng(*parts: str) -> random.Random:
    return random.Random(_digest("/".join(parts)))


def _shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    # Across Python versions only `Random.random` is reproducible, not `shuffle` or `sample`.
    result = list(items)
    for last in range(len(result) - 1, 0, -1):
        other = int(rng.random() * (last + 1))
        result[last], result[other] = result[other], result[last]
    return result


def _deal(rng: random.Random, items: Sequence[T]) -> Iterator[T]:
    """Yield `items` endlessly, reshuffled after each pass, so that all are equally frequent."""
    while True:
        yield from _shuffled(rng, items)


def split_words(split: str) -> dict[str, list[str]]:
    """
    The words of each category of `everyday` in one split.

    The splits share no word: of 30 words, 20 are for training, 4 for validation and 6 for testing. Only calibration
    and test share theirs, since a p-value holds for rows that could have been calibration rows.

    Args:
        split (`str`):
            One of `"train"`, `"validation"`, `"calibration"` and `"test"`.

    Returns:
        `dict[str, list[str]]`: The words by category.
    """
    _check("everyday", split)
    pools = {}
    for noun, words in CATEGORIES.items():
        ordered = sorted(words, key=lambda word: _digest(f"{noun}/{word}"))
        held_out = len(words) // 3
        validation = held_out * 2 // 5
        pools[noun] = {
            "train": ordered[held_out:],
            "validation": ordered[:validation],
            "calibration": ordered[validation:held_out],
            "test": ordered[validation:held_out],
        }[split]
    return pools


def confusable(first: str, second: str) -> bool:
    """
    Whether words of one category could be right answers to a question about the other one.

    Args:
        first (`str`):
            A category of `everyday`.
        second (`str`):
            Another category.

    Returns:
        `bool`: `True` if they are the same category or in the same group of `CONFUSABLE`.
    """
    return first == second or any(first in group and second in group for group in CONFUSABLE)


def _everyday(rng: random.Random, split: str) -> Iterator[Draw]:
    pools = split_words(split)
    answers = {noun: _deal(rng, words) for noun, words in pools.items()}
    for noun in _deal(rng, list(pools)):
        others = [other for other in pools if not confusable(noun, other)]
        # Distractors of three different categories: two of one kind could be ruled out without the question.
        distractors = [
            _shuffled(rng, [word for word in pools[other] if noun not in ALSO.get(word, ())])[0]
            for other in _shuffled(rng, others)[:3]
        ]
        answer = next(answers[noun])
        if split == "train" and rng.random() < 0.5:
            question = _shuffled(rng, NAMING_QUESTIONS)[0].format(word=answer)
        else:
            article = "an" if noun[0] in "aeiou" else "a"
            question = _shuffled(rng, CATEGORY_QUESTIONS)[0].format(article=article, noun=noun)
        yield question, answer, distractors


def _problems() -> Iterator[tuple[str, str, int, list[int]]]:
    """Yield operation, question, result and the offsets of plausible wrong results, for every arithmetic problem."""
    slips = [-10, -2, -1, 1, 2, 10]
    for a in range(10, 100):
        for b in range(10, 100):
            if a + b <= 120:
                yield "+", f"What is {a} + {b}?", a + b, slips
            if a > b:
                yield "-", f"What is {a} - {b}?", a - b, slips
    for a in range(2, 20):
        for b in range(2, 13):
            yield "times", f"What is {a} times {b}?", a * b, slips + [-a, -b, a, b]


def _arithmetic(rng: random.Random, split: str) -> Iterator[Draw]:
    pools: dict[str, list[tuple[str, int, list[int]]]] = {}
    for operation, question, result, slips in _problems():
        # A fifth of the problems is for validation, chosen by hash: the splits share no question.
        if (_digest(question) % 5 == 0) == (split == "validation"):
            pools.setdefault(operation, []).append((question, result, slips))
    problems = {operation: _deal(rng, pool) for operation, pool in pools.items()}
    for operation in _deal(rng, list(pools)):
        question, result, slips = next(problems[operation])
        wrong = [value for value in dict.fromkeys(result + slip for slip in slips) if value >= 0]
        yield question, str(result), [str(value) for value in _shuffled(rng, wrong)[:3]]


def _opposites(rng: random.Random, split: str) -> Iterator[Draw]:
    ordered = sorted(ANTONYMS, key=lambda pair: _digest(pair[0]))
    # A quarter of the pairs is for validation: the splits share no word.
    cut = len(ordered) // 4
    pairs = ordered[:cut] if split == "validation" else ordered[cut:]
    opposite = dict(pairs) | {second: first for first, second in pairs}
    for word in _deal(rng, list(opposite)):
        answer = opposite[word]
        excluded = {word, answer}.union(*(group for group in RELATED if answer in group))
        distractors = _shuffled(rng, [other for other in opposite if other not in excluded])[:3]
        yield _shuffled(rng, OPPOSITE_QUESTIONS)[0].format(word=word), answer, distractors


_GENERATORS: dict[str, Callable[[random.Random, str], Iterator[Draw]]] = {
    "everyday": _everyday,
    "everyday_arithmetic": _arithmetic,
    "everyday_opposites": _opposites,
}


def _check(name: str, split: str) -> None:
    if name not in SPLITS:
        raise ValueError(f"Unknown task {name!r}, valid names: {', '.join(SPLITS)}.")
    if split not in SPLITS[name]:
        raise ValueError(f"Unknown split {split!r} of task {name!r}, valid splits: {', '.join(SPLITS[name])}.")


def generate(name: str, split: str, size: int | None = None) -> list[dict[str, Any]]:
    """
    Generate the items of a bundled multiple-choice task.

    The items are the same on every machine and Python version, and a smaller size gives the first items of a larger
    one. No two items of a split have the same question and options, and the four labels are equally frequent.

    Args:
        name (`str`):
            Name of the task: `"everyday"`, `"everyday_arithmetic"` or `"everyday_opposites"`.
        split (`str`):
            `"train"` and `"calibration"` (`"everyday"` only), `"validation"` or `"test"`. Calibration items are drawn
            as test items are, and are none of them.
        size (`int`, *optional*):
            Number of items. Defaults to the size in `SPLITS`.

    Returns:
        `list[dict]`: Items with keys `id`, `question`, `options` (four strings) and `label` (index of the right
        option).

    Example:

    ```python
    >>> from dappr_llm.text.data.everyday import generate

    >>> item = generate("everyday", "train")[0]
    >>> item["question"], item["options"], item["label"]
    ('Which of these is a piece of clothing?', ['sweatshirt', 'whisk', 'linden', 'train'], 0)
    ```
    """
    _check(name, split)
    size = SPLITS[name][split] if size is None else size
    if size < 0:
        raise ValueError(f"`size` must not be negative, got {size}.")
    draws = _GENERATORS[name](_rng(name, split, "items"), split)
    labels = _deal(_rng(name, split, "labels"), range(4))
    items: list[dict[str, Any]] = []
    tests = generate(name, "test", _KEPT_FOR_TESTS) if split == "calibration" else []
    seen = {(item["question"], frozenset(item["options"])) for item in tests}
    misses = 0
    while len(items) < size:
        question, answer, options = next(draws)
        key = (question, frozenset([answer, *options]))
        if key in seen:
            misses += 1
            if misses > MAX_MISSES:
                raise ValueError(f"{name!r} ({split}) has no {size} distinct items, only about {len(items)}.")
            continue
        misses = 0
        seen.add(key)
        label = next(labels)
        options.insert(label, answer)
        item_id = f"{name}-{split}-{len(items):05d}"
        items.append({"id": item_id, "question": question, "options": options, "label": label})
    return items
