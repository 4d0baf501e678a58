"""A tiny trained run with held-out rows, for what comes after training."""

import json
import random

import yaml
from tiny import WORDS

_THINGS = [word for word in WORDS if word.islower() and word not in ("the", "of", "for", "is", "a", "an", "one")]


def questions(count, seed, options=4, labelled=True):
    """Rows that repeat neither each other nor those of another seed."""
    draw = random.Random(f"questions {seed}")
    rows = []
    for number in range(count):
        words = draw.sample(_THINGS, options)
        label = draw.randrange(options)
        story = " ".join(draw.choices(_THINGS, k=draw.randrange(2, 12)))
        row = {"id": f"s{seed}-{number}", "question": f"Which one is {words[label]} ? {story}", "choices": words}
        rows.append(row | ({"answer": "ABCDEF"[label]} if labelled else {}))
    return rows


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_recipe(folder, base):
    """A recipe for the tiny model; its run goes to `folder/run`."""
    sizes = {"train": (64, 0), "validation": (150, 1), "test": (40, 2)}
    values = {
        "model": {"name": str(base)},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "lm_head"]},
        "method": {"name": "dappr", "reg_weight": 5e-3, "schedule": "constant"},
        "data": {
            "train": {
                "name": "mine",
                "splits": {k: write_rows(folder / f"{k}.jsonl", questions(*v)) for k, v in sizes.items()},
            },
            "ood": [write_rows(folder / "other.jsonl", questions(20, 3, options=5))],
        },
        "train": {
            "output_dir": str(folder / "run"), "per_device_train_batch_size": 16, "learning_rate": 1e-2,
            "num_train_epochs": 3, "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1,
            "logging_steps": 2, "disable_tqdm": True, "max_length": 64,
        },
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
