"""A tiny causal LM, its word-level tokenizer, and multiple-choice rows over its vocabulary."""

import json

WORDS = [
    "Return",
    "the",
    "label",
    "of",
    "correct",
    "answer",
    "for",
    "question",
    "below",
    ".",
    "Question",
    ":",
    "Choices",
    "Answer",
    "Which",
    "one",
    "is",
    "a",
    "an",
    ")",
    "?",
    "fruit",
    "tool",
    "colour",
    "plum",
    "fig",
    "pear",
    "hammer",
    "saw",
    "drill",
    "red",
    "blue",
    "green",
    "A",
    "B",
    "C",
    "D",
    "E",
    "F",
    "sky",
    "grass",
    "very",
    "long",
    "story",
    "about",
    "1",
    "2",
    "3",
    "4",
]


def build_model(seed=0, layers=2, **changes):
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(seed)
    config = MistralConfig(
        vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=2, eos_token_id=2,
        sliding_window=None, **changes,
    )  # fmt: skip
    return MistralForCausalLM(config)


def build_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<s>", *dict.fromkeys(WORDS)])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", padding_side="left"
    )


def make_rows(count=12, start=0, options=4):
    groups = {"fruit": ["plum", "fig", "pear"], "tool": ["hammer", "saw", "drill"], "colour": ["red", "blue", "green"]}
    names = list(groups)
    rows = []
    for i in range(start, start + count):
        kind = names[i % 3]
        right = groups[kind][(i // 3) % 3]
        wrong = [groups[names[(i + 1) % 3]][i % 3], groups[names[(i + 2) % 3]][(i + 1) % 3], "sky", "grass", "story"]
        choices = wrong[: options - 1]
        label = i % options
        choices.insert(label, right)
        question = f"Which one is a {kind} ?" + " very long story" * (i % 4)
        rows.append({"id": f"q{i}", "question": question, "choices": choices, "answer": "ABCDEF"[label]})
    return rows


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_recipe(folder, base, splits, ood, gate=True, **train):
    """Write a recipe that trains a base model on the given splits, with one OOD task; its output folder is `folder/run`."""
    import yaml

    values = {
        "model": {"name": str(base)},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "lm_head"]},
        "method": {"name": "dappr", "reg_weight": 5e-3, "schedule": "constant"},
        "data": {
            "train": {
                "name": "mine",
                "splits": {split: write_rows(folder / f"{split}.jsonl", rows) for split, rows in splits.items()},
            },
            "ood": [write_rows(folder / "other.jsonl", ood)],
            "checks": "warn",  # a few words make few different questions
        },
        "train": {
            "output_dir": str(folder / "run"), "learning_rate": 1e-2, "eval_strategy": "epoch", "logging_steps": 2,
            "disable_tqdm": True, **train,
        },
        "gate": gate,
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def make_texts(count=12, start=0, labels=3):
    """Rows of text classification: `text` and `label`; the label can be read off the text."""
    things = ["plum", "fig", "pear", "hammer", "saw", "drill", "red", "blue", "green", "sky", "grass", "story"]
    rows = []
    for i in range(start, start + count):
        label = i % labels
        words = [things[label % len(things)], things[label // len(things) % len(things)]]
        rows.append({"text": f"Which {' '.join(words)} is" + " very long story" * (i % 4), "label": f"label {label}"})
    return rows


def label_names(count):
    return tuple(f"label {i}" for i in range(count))


def build_classifier(labels=3, seed=0, outputs=None, **changes):
    """The tiny causal LM as a sequence classifier."""
    import torch
    from transformers import MistralForSequenceClassification

    config = build_model(seed, **changes).config
    config.num_labels = outputs or labels
    torch.manual_seed(seed)
    return MistralForSequenceClassification(config)
