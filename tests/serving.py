"""Rows and a recipe with enough held-out rows to calibrate on, for tests of prediction, calibration and publishing."""

import random

from tiny import WORDS, write_recipe

_THINGS = [word for word in WORDS if word.islower() and word not in ("the", "of", "for", "is", "a", "an", "one")]


def questions(count, seed, options=4, labelled=True):
    """Random multiple-choice rows; different seeds give different rows."""
    draw = random.Random(f"questions {seed}")
    rows = []
    for number in range(count):
        words = draw.sample(_THINGS, options)
        label = draw.randrange(options)
        story = " ".join(draw.choices(_THINGS, k=draw.randrange(2, 12)))
        row = {"id": f"s{seed}-{number}", "question": f"Which one is {words[label]} ? {story}", "choices": words}
        rows.append(row | ({"answer": "ABCDEF"[label]} if labelled else {}))
    return rows


def serving_recipe(folder, base):
    """Write a recipe with 150 validation rows, enough to calibrate on."""
    sizes = {"train": (64, 0), "validation": (150, 1), "test": (40, 2)}
    splits = {split: questions(*size) for split, size in sizes.items()}
    settings = {"per_device_train_batch_size": 16, "num_train_epochs": 3, "save_strategy": "epoch", "max_length": 64}
    return write_recipe(folder, base, splits, questions(20, 3, options=5), gate=False, save_total_limit=1, **settings)
