"""The tasks of `defaults_table.py`: their rows, written as files, and how a run on them is set up."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dappr_llm.text.data.everyday import generate, split_words
from dappr_llm.text.data.tasks import load_items

# CLINC150's domains `banking` and `credit cards`: near to each other, 15 intents each.
_BANKING = """
    account_blocked balance bill_balance bill_due freeze_account interest_rate min_payment order_checks pay_bill
    pin_change report_fraud routing spending_history transactions transfer
"""
_CREDIT_CARDS = """
    application_status apr card_declined credit_limit credit_limit_change credit_score damaged_card expiration_date
    improve_credit_score international_fees new_card redeem_rewards replacement_card_duration report_lost_card
    rewards_balance
"""
_FOUR = ["card_arrival", "card_linking", "card_not_working", "lost_or_stolen_card"]  # of BANKING77, all about cards

Rows = dict[str, list[dict[str, Any]]]  # by part: train, validation, test


@dataclass(frozen=True)
class Setup:
    """
    One task.

    Args:
        readout (`str`): `letters` or `head`.
        classes (`int`): K.
        steps (`int`): Optimizer steps of 16 rows.
        what (`str`): A few words for the table.
        top (`bool`): Whether an adapter on the top quarter of the layers is enough, whatever the model's size.
    """

    readout: str
    classes: int
    steps: int
    what: str
    top: bool = True


SETUPS: Mapping[str, Setup] = {
    "everyday4": Setup("letters", 4, 150, "bundled questions", top=False),
    "everyday5": Setup("letters", 5, 150, "bundled questions, a fifth option", top=False),
    "obqa": Setup("letters", 4, 150, "OpenBookQA"),
    "csqa": Setup("letters", 5, 150, "CommonsenseQA"),
    "domains2": Setup("head", 2, 100, "CLINC150: banking or credit cards"),
    "banking4": Setup("head", 4, 100, "BANKING77: four intents about cards"),
    "banking77": Setup("head", 77, 400, "BANKING77"),
    "clinc150": Setup("head", 150, 470, "CLINC150, 50 rows per intent"),
}


def write_files(name: str, folder: Path, data_root: str | None, most: int = 500) -> dict[str, str]:
    """The task's parts as JSON Lines files, by split; written once, the same every time."""
    paths = {part: folder / f"{name}-{part}.jsonl" for part in ("train", "validation", "test")}
    if not all(path.is_file() for path in paths.values()):
        rows = _rows(name, data_root)
        folder.mkdir(parents=True, exist_ok=True)
        for part, path in paths.items():
            kept = rows[part] if part == "train" else _shuffled(rows[part])[:most]
            path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return {part: str(path) for part, path in paths.items()}


def _rows(name: str, root: str | None) -> Rows:
    if name in ("everyday4", "everyday5"):
        return {part: list(_everyday(part, name == "everyday5")) for part in ("train", "validation", "test")}
    if name == "obqa":
        return {part: _questions(name, part, root) for part in ("train", "validation", "test")}
    if name == "csqa":  # its own test rows have no answers
        *train, held = _parts(_questions(name, "train", root), 10)
        return {"train": sum(train, []), "validation": held, "test": _questions(name, "validation", root)}
    if name == "domains2":
        domain = dict.fromkeys(_BANKING.split(), "banking") | dict.fromkeys(_CREDIT_CARDS.split(), "credit cards")
        found = {part: _texts("clinc_oos", part, root) for part in ("train", "validation", "test")}
        return {
            part: [{**row, "label": domain[row["label"]]} for row in rows if row["label"] in domain]
            for part, rows in found.items()
        }
    if name == "clinc150":
        found = {part: _texts("clinc_oos", part, root) for part in ("train", "validation", "test")}
        return {**found, "train": _per_label(found["train"], 50)}
    *train, held = _parts(_texts("banking77", "train", root), 10)
    found = {"train": sum(train, []), "validation": held, "test": _texts("banking77", "test", root)}
    if name == "banking4":
        return {part: [row for row in rows if row["label"] in _FOUR] for part, rows in found.items()}
    return found


def _questions(task: str, part: str, root: str | None) -> list[dict[str, Any]]:
    items = load_items(task, part, root)
    return [{"question": i["question"], "choices": i["options"], "answer": "ABCDEFGH"[i["label"]]} for i in items]


def _texts(task: str, part: str, root: str | None) -> list[dict[str, Any]]:
    items = load_items(task, part, root)
    return [{"text": item["question"], "label": item["options"][item["label"]]} for item in items]


def _everyday(part: str, fifth: bool) -> Iterator[dict[str, Any]]:
    """The bundled questions; a fifth option is a word that is in no other option and of another kind than they are."""
    chance, words = random.Random(part), [(kind, word) for kind, pool in split_words(part).items() for word in pool]
    kinds = {word: kind for kind, word in words}
    for item in generate("everyday", part):
        options, label = list(item["options"]), item["label"]
        if fifth:
            taken = {kinds.get(option) for option in options}
            word = chance.choice([word for kind, word in words if kind not in taken and word not in item["question"]])
            place = chance.randrange(5)
            options.insert(place, word)
            label += place <= label
        yield {"question": item["question"], "choices": options, "answer": "ABCDE"[label]}


def _shuffled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return random.Random(0).sample(rows, len(rows))


def _parts(rows: list[dict[str, Any]], count: int) -> list[list[dict[str, Any]]]:
    mixed = _shuffled(rows)
    return [mixed[number::count] for number in range(count)]


def _per_label(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    groups = defaultdict(list)
    for row in _shuffled(rows):
        groups[row["label"]].append(row)
    return _shuffled([row for group in groups.values() for row in group[:most]])
