"""Data checks of a recipe on text, before any model is loaded; see `core.data_checks`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...core import data_checks
from ...core.data_checks import Finding, Part
from ...core.errors import UserError
from ...core.splits import same_text
from .items import UNKNOWN, MCQItem, RowProblem
from .registry import TASKS, MCQTask
from .settle import file_hashes, recipe_task
from .tasks import iter_items

if TYPE_CHECKING:
    from ...core.schemas.recipe import Recipe

_MAX_LENGTH = 300  # the default of `DAPPrConfig`
_CHARACTERS = 4  # per token, in English; fewer elsewhere, so that little is said too often
_WORDS = {
    "empty": "have no text",
    "unlabelled": "have no label, which training and evaluation need",
}


def check_recipe(recipe: Recipe) -> None:
    """
    Read all rows of a recipe's task and say what is wrong with them: `UserError` for what would make results wrong.

    Args:
        recipe (`Recipe`):
            Its `data` section is read; `data.checks` says what is done about errors.
    """
    data = recipe.data
    task = recipe_task(recipe)
    for split, found in file_hashes(task).items():
        if task.sha256.get(split, found) != found:
            raise UserError(
                f"{task.splits[split]} is not the file that the recipe means, by its sha256: restore it, or remove "
                "sha256 from data.train to train on what it holds now"
            )
    mode = data.checks or ("warn" if task.name in TASKS else "error")
    if mode == "off" or data.streaming or task.bundled:
        return
    held_out = data.validation_split or ("validation" if data.validation_fraction else None)
    splits = {"train": data.train_split, "validation": held_out, "test": data.test_split}
    asked = {role: split for role, split in splits.items() if split}
    findings = find_in_task(task, asked, data.root, int(recipe.train.get("max_length", _MAX_LENGTH)))
    data_checks.report(findings, task.name, mode)


def find_in_task(task: MCQTask, splits: Mapping[str, str], root: str | None, max_length: int) -> list[Finding]:
    """
    Everything wrong with the rows of a task.

    Args:
        task (`MCQTask`):
            The task, settled.
        splits (`Mapping[str, str]`):
            `train`, `validation` and `test` → the names of these splits.
        root (`str`, *optional*):
            Local folder with copies of Hub datasets.
        max_length (`int`):
            Tokens that fit.
    """
    problems: list[RowProblem] = []
    rows = {role: list(iter_items(task, split, root, True, problems)) for role, split in splits.items()}
    parts = [
        Part(
            role,
            [_key(item, bool(task.fixed)) for _, item in found],
            [item.options[item.label] if item.label != UNKNOWN else "" for _, item in found],
            [place for place, _ in found],
        )
        for role, found in rows.items()
    ]
    everything = [each for found in rows.values() for each in found]
    lengths = [len(item.question) for _, item in everything]
    total = len(everything) + len({problem.where for problem in problems})
    return (
        _row_problems(problems, total)
        + data_checks.find(parts, task.labels)
        + data_checks.too_long(lengths, [place for place, _ in everything], max_length, _CHARACTERS)
    )


def _key(item: MCQItem, fixed: bool) -> str:
    return same_text(item.question) if fixed else "\n".join(map(same_text, (item.question, *item.options)))


def _row_problems(problems: list[RowProblem], total: int) -> list[Finding]:
    places: dict[str, dict[str, str]] = defaultdict(dict)  # a file that is dealt out may be read once per part
    for problem in problems:
        places[problem.kind][problem.where] = problem.value
    found = []
    for kind, rows in places.items():
        unknown = ", ".join(repr(label) for label in list(dict.fromkeys(rows.values()))[:3])
        words = _WORDS.get(kind) or f"have labels that are unknown to training ({unknown})"
        first = data_checks.named(list(rows))
        found.append(Finding("error", f"{len(rows):,} of {total:,} rows {words} (first: {first})"))
    return found
