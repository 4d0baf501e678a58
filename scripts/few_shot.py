"""
Text classification from a few rows: BANKING77 with 10 intents of 8 rows each, against what costs seconds.

    python scripts/few_shot.py --data-root data --dtype bfloat16
    python scripts/few_shot.py --data-root data --rest-of-train --draws 100 101 102     # to choose settings by

A draw is a seed: it picks the intents, their training rows, and is the seed of training. The recipe is the one that
`dappr init` writes for a file of these rows; only the method, the dtype and what `--set` says are changed. All test
rows of the drawn intents are predicted, by every method and by our own baselines: TF-IDF + logistic regression, and
frozen features (of the same base model) + logistic regression. `--rest-of-train` tests on 40 rows per intent of the
train split that were not drawn, of intents that the draws 0 to 4 do not use: settings are chosen there, never on test
rows.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from benchlib import arguments, machine, parse, save, show

from dappr_llm.core.recipe import Recipe, build_recipe
from dappr_llm.evaluation.bootstrap import over_seeds
from dappr_llm.evaluation.classification_metrics import accuracy
from dappr_llm.evaluation.row_baselines import row_baselines
from dappr_llm.inference.batching import RowSet
from dappr_llm.text.data.proposal import propose
from dappr_llm.text.data.settle import raw_rows
from dappr_llm.text.data.tasks import get_task
from dappr_llm.training.build import build_args, build_run, build_tests
from dappr_llm.training.trainer import DAPPrTrainer

METHODS: dict[str, dict[str, Any]] = {
    "CE": {"name": "ce"},
    "DAPPr softplus": {"name": "dappr", "reg_weight": 5e-3, "schedule": "constant"},
    "DAPPr exp": {"name": "dappr_exp"},
}
TFIDF, FEATURES, START = "TF-IDF + LR", "frozen features + LR", "head before training"
REPORTED = range(5)  # draws
Texts = dict[str, list[str]]  # by intent


def texts_of(split: str, root: str | None) -> Texts:
    """The texts of each intent of BANKING77, in the order of the file."""
    found: Texts = {}
    for _, row in raw_rows(get_task("banking77"), split, root):
        found.setdefault(row["label"], []).append(row["text"])
    return dict(sorted(found.items()))


def intents_of(draw: int, names: Sequence[str], count: int) -> list[str]:
    """The intents of a draw."""
    return sorted(np.random.default_rng([draw, 0]).choice(np.array(names), count, replace=False).tolist())


def write_rows(path: Path, texts: Texts) -> None:
    """A JSONL file with the columns `text` and `label`."""
    lines = [json.dumps({"text": text, "label": label}) for label, several in texts.items() for text in several]
    path.write_text("\n".join(lines) + "\n")


def draw_files(folder: Path, draw: int, args: Any) -> tuple[Path, Path]:
    """Files with the training and the test rows of a draw."""
    train = texts_of("train", args.data_root)
    names = list(train)
    if args.rest_of_train:
        used = {name for reported in REPORTED for name in intents_of(reported, names, args.intents)}
        names = [name for name in names if name not in used]
    chosen = intents_of(draw, names, args.intents)
    rng = np.random.default_rng([draw, 1])
    rows = {name: rng.permutation(len(train[name])) for name in chosen}
    drawn = {name: [train[name][i] for i in rows[name][: args.rows]] for name in chosen}
    if args.rest_of_train:
        tested = {name: [train[name][i] for i in rows[name][args.rows :][:40]] for name in chosen}
    else:
        test = texts_of("test", args.data_root)
        tested = {name: test[name] for name in chosen}
    paths = folder / "train.jsonl", folder / "test.jsonl"
    for path, texts in zip(paths, (drawn, tested), strict=True):
        write_rows(path, texts)
    return paths


def recipe_of(files: tuple[Path, Path], method: str, draw: int, args: Any) -> Recipe:
    """What `dappr init` proposes for the training rows, with another method and all rows in their own part."""
    train, test = files
    values = yaml.safe_load(propose(str(train)).recipe("few_shot.yaml"))
    task = {key: value for key, value in values["data"]["train"].items() if key in ("text", "label", "labels")}
    values["data"] = {
        "train": {"name": "banking77_few", "splits": {"train": str(train), "test": str(test)}, **task},
        "validation_split": None,
    }
    values["method"] = METHODS[method]
    values["model"]["dtype"] = args.dtype
    values["train"] |= {
        "seed": draw, "output_dir": str(train.parent / "run"), "eval_strategy": "no", "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    for setting in args.set:
        key, _, value = setting.partition("=")
        section, _, name = key.partition(".")
        values[section][name] = yaml.safe_load(value)
    values["train"]["learning_rate"] = float(values["train"]["learning_rate"])  # PyYAML reads 5e-4 as a text
    return build_recipe(values, "few_shot.yaml")


def run_method(recipe: Recipe, with_baselines: bool) -> dict[str, float]:
    """Test accuracies of one training, and where asked of the baselines on the same rows; in %."""
    args = build_args(recipe)
    test, _ = build_tests(recipe)
    assert test is not None
    run = build_run(recipe, args)
    trainer = DAPPrTrainer(run.model, args, run.train, method=run.method, backend=run.backend)
    found = {}
    if with_baselines:
        states = tuple(trainer.predictor.hidden_states(rows)[0].numpy() for rows in (run.train, test.rows))
        table = trainer.predict_tables([dataclasses.replace(test)])[0]
        made = row_baselines(run.train, test.rows, table, states)
        found = {TFIDF: measured(made.tables["tfidf"]), FEATURES: measured(made.tables["features"])}
        found[START] = start_accuracy(trainer, test)
    start = time.perf_counter()
    trainer.train()
    found["seconds"] = time.perf_counter() - start
    found["accuracy"] = measured(trainer.predict_tables([test])[0])
    return found


def start_accuracy(trainer: DAPPrTrainer, test: RowSet) -> float:
    """Accuracy of the head as training finds it: the probe, where it starts from that."""
    from dappr_llm.training.head_init import init_head

    init_head(trainer)
    return measured(trainer.predict_tables([test])[0])


def measured(table: Any) -> float:
    return 100 * accuracy(table.probs, table.labels)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--draws", type=int, nargs="+", default=list(REPORTED), help="seeds (default: 0 to 4)")
    parser.add_argument("--intents", type=int, default=10)
    parser.add_argument("--rows", type=int, default=8, help="training rows per intent")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--dtype", default="auto", help="of the base model: auto, bfloat16, float32")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change the recipe")
    parser.add_argument("--rest-of-train", action="store_true", help="other intents, tested on their training rows")
    args = parse(parser)
    logging.disable(logging.WARNING)
    print(json.dumps(machine()))
    accuracies: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    for draw in args.draws:
        with tempfile.TemporaryDirectory() as folder:
            files = draw_files(Path(folder), draw, args)
            for number, method in enumerate(args.methods):
                found = run_method(recipe_of(files, method, draw, args), with_baselines=number == 0)
                times.setdefault(method, []).append(found.pop("seconds"))
                accuracies.setdefault(method, []).append(found.pop("accuracy"))
                for name, value in found.items():
                    accuracies.setdefault(name, []).append(value)
        print(
            f"draw {draw}: " + ", ".join(f"{name} {values[-1]:.1f}" for name, values in accuracies.items()), flush=True
        )
    report(args, accuracies, times)


def report(args: Any, accuracies: dict[str, list[float]], times: dict[str, list[float]]) -> None:
    """Print the table, and write all values."""
    heads = ["", "mean", *(f"draw {draw}" for draw in args.draws), f"minus {TFIDF}", f"minus {FEATURES}", "seconds"]
    order = sorted(accuracies, key=lambda name: np.mean(accuracies[name]))
    rows = []
    for name in order:
        values = accuracies[name]
        row = [name, f"{np.mean(values):.1f}", *(f"{value:.1f}" for value in values)]
        for other in (TFIDF, FEATURES):
            row.append("" if name == other else difference(values, accuracies[other]))
        rows.append([*row, f"{np.mean(times[name]):.0f}" if name in times else ""])
    part = "40 rows each of the train split that were not drawn" if args.rest_of_train else "all their test rows"
    title = (
        f"Accuracy in %, {args.intents} intents x {args.rows} rows, {part}; differences with 95 % intervals over draws"
    )
    show(title, heads, rows)
    content = {"draws": args.draws, "intents": args.intents, "rows": args.rows, "dtype": args.dtype, "set": args.set}
    content |= {"rest_of_train": args.rest_of_train, "methods": METHODS}
    save(args.json, {**machine(), **content, "accuracy": accuracies, "training_seconds": times})


def difference(values: Sequence[float], others: Sequence[float]) -> str:
    """Mean paired difference and its t-interval over draws."""
    found = over_seeds([one - other for one, other in zip(values, others, strict=True)])
    return f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


if __name__ == "__main__":
    main()
