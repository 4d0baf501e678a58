"""What a file of one's own holds, and the commented recipe that trains on it, for `dappr init`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from ...core.data_checks import Finding
from ...core.errors import UserError
from ...core.recipe import build_recipe
from .checks import find_in_task
from .columns import guess, missing_column
from .items import MCQItem
from .labels import label_text
from .registry import MCQTask, describe
from .settle import recipe_task
from .sources import read_file
from .tasks import iter_items

_LOOKED_AT = 2000  # rows from which columns are told
_LISTED = 30  # labels that the recipe lists one by one
_OPTION = re.compile(r"(choice|option|answer|opt)?[ _-]?([a-h]|\d)", re.I)
_FEW_ROWS = 64  # training rows per label up to which a head starts from frozen features (`train.head_init`)
# The words around a text after which a causal LM's last state says what the text is about, not only how it might go on
# (Jiang et al. 2023, arXiv 2307.16645). docs/results/few_shot.md measures what they are worth.
SUMMARY = 'This sentence : "{text}" means in one word:"'
_SUMMARY_TOKENS = 16
_EPOCHS = ((200, 10), (1000, 5), (5000, 3), (20_000, 2))  # fewer training rows than → epochs


@dataclass
class Proposal:
    """
    What was found in a file.

    Args:
        path (`str`):
            The file.
        task (`MCQTask`):
            Its columns, labels and splits.
        parts (`dict[str, list[MCQItem]]`):
            The items of each split.
        findings (`list[Finding]`):
            What the data checks say.
    """

    path: str
    task: MCQTask
    parts: dict[str, list[MCQItem]]
    findings: list[Finding] = field(default_factory=list)

    @property
    def items(self) -> list[MCQItem]:
        """All items of the file."""
        return [item for part in self.parts.values() for item in part]

    @property
    def counts(self) -> Counter[str]:
        """Rows of each label."""
        return Counter(item.options[item.label] for item in self.items)

    @property
    def max_length(self) -> int:
        """Tokens for nearly all rows, from their characters."""
        lengths = sorted(len(item.question) for item in self.items)
        own = 0 if self.task.fixed else max(sum(map(len, item.options)) for item in self.items)
        around = 48 if not self.task.fixed else 16 + _SUMMARY_TOKENS * self.few
        tokens = (lengths[int(0.99 * (len(lengths) - 1))] + own) // 3 + around
        return min(max(64, -(-tokens // 32) * 32), 512)

    @property
    def few(self) -> bool:
        """Whether labels have so few rows each that a head starts from frozen features."""
        return bool(self.task.fixed) and len(self.parts["train"]) <= _FEW_ROWS * len(self.task.labels or ())

    @property
    def epochs(self) -> int:
        """Epochs that give a small model some hundred steps."""
        count = len(self.parts["train"])
        return next((epochs for below, epochs in _EPOCHS if count < below), 1)

    def example(self) -> str:
        """A question for `dappr ask`."""
        return "a new text" if self.task.fixed else "a new question" + '" "' + '" "'.join(("one option", "another"))

    def lines(self) -> list[str]:
        """What was found, for the terminal."""
        task, items = self.task, self.items
        lengths = [len(item.question) for item in items]
        size = f"{min(lengths):,} to {max(lengths):,} characters, half of them below {int(median(lengths)):,}"
        shown = [f"{self.path}: {len(items):,} rows"]
        if task.fixed:
            shown += [f"  text    {_shown(task.columns.question)}: {size}"]
            most = ", ".join(f"{label} {count:,}" for label, count in self.counts.most_common(3))
            more = ", …" * (len(self.counts) > 3)
            shown += [f"  label   {_shown(task.columns.answer)}: {len(task.labels or ())} labels ({most}{more})"]
        else:
            most_options = max(len(item.options) for item in items)
            shown += [f"  multiple choice, up to {most_options} options: {size}"]
        shown += ["  split   " + ", ".join(f"{name} {len(part):,}" for name, part in self.parts.items())]
        return shown + [f"  {each.level:7} {each.text}" for each in self.findings]

    def recipe(self, name: str) -> str:
        """The recipe, as commented YAML."""
        task = describe(self.task)
        assert isinstance(task, dict)
        labels = task.pop("labels", None)
        task.pop("answer_type" if task.get("answer_type") == "text" and labels else "", None)
        return _TEMPLATE.format(
            file=self.path,
            recipe=name,
            what="Text classification" if self.task.fixed else "Multiple-choice questions",
            description=_yaml(f"{self.task.name}: {len(self.items):,} rows of {Path(self.path).name}"),
            model=_HEAD if self.task.fixed else _LETTERS,
            task="\n".join(f"    {key}: {_yaml(value)}" for key, value in task.items()) + self._labels(labels),
            prompt=_PROMPT if self.few else "",
            max_length=self.max_length,
            epochs=self.epochs,
            steps=-(-len(self.parts["train"]) // 16) * self.epochs,
            counts=", ".join(f"{part} {len(items):,}" for part, items in self.parts.items()),
        )

    def _labels(self, labels: list[str] | None) -> str:
        if not labels:
            return ""
        if len(labels) > _LISTED:
            return (
                f"\n    # {len(labels)} labels, found in the training rows; list them as `labels:` for another order"
            )
        counts = self.counts
        rows = [f"      - {_yaml(label)}  # {counts[label]:,} rows" for label in labels]
        return "\n    labels:  # in the order of the model's outputs\n" + "\n".join(rows)


_HEAD = """model:
  name: smollm2-135m          # bundled; any causal LM or encoder of the Hub
  dtype: auto                 # bfloat16 where the device is good at it
  readout: head               # a classification head over the fixed labels"""
_LETTERS = """model:
  name: smollm2-135m          # bundled; any causal LM of the Hub
  dtype: auto                 # bfloat16 where the device is good at it
  readout: letters            # rows bring their own options: the answer is read from the letters A, B, C, …
  # adapter: runs/binding     # a model this small first has to learn what letters stand for: `dappr train binding`"""


def _yaml(value: Any) -> str:
    """A value on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**6)
    return text.strip().removesuffix("\n...")


_PROMPT = f"""  # Few rows: after these words a causal LM's last state sums the text up; leave them out for an encoder.
  prompt: {{template: {_yaml(SUMMARY)}}}
"""
_TEMPLATE = """# {what} on {file}, written by `dappr init`.
#   dappr train {recipe}
description: {description}
{model}
lora: {{r: 16, lora_alpha: 32, lora_dropout: 0.05, target_modules: all-linear}}
method: {{name: ce}}            # or {{name: dappr}}, {{name: dappr_exp}} for many labels, …
data:
  # {counts} rows; rows with equal texts are in the same part.
  train:
{task}
  # ood: [other.csv]          # texts of another kind, without labels: does the model notice?
train:
{prompt}  max_length: {max_length}             # tokens; longer texts are cut
  learning_rate: 5e-4
  lr_scheduler_type: cosine
  warmup_steps: 10
  weight_decay: 0.0
  num_train_epochs: {epochs}         # {steps:,} steps
  per_device_train_batch_size: 16
  per_device_eval_batch_size: 32
  train_sampling_strategy: group_by_length
  logging_steps: 10
  eval_strategy: epoch
  save_strategy: epoch
  save_total_limit: 1
  seed: 0
"""


def _shown(column: Any) -> str:
    return repr(column) if isinstance(column, str) else " + ".join(map(repr, column or ()))


def propose(path: str, given: Mapping[str, Any] | None = None) -> Proposal:
    """
    Look at a file.

    Args:
        path (`str`):
            A CSV, JSONL or Parquet file.
        given (`Mapping`, *optional*):
            What is known of it: `question` (or text), `choices`, `options` (or labels), `answer` (or label),
            `encoding`.
    """
    given = {key: value for key, value in (given or {}).items() if value}
    rows = [row for _, row in islice(read_file(path, given.get("encoding"), class_names=True), _LOOKED_AT)]
    if not rows:
        raise UserError(f"{path} has no rows")
    recipe = build_recipe({"data": {"train": {"path": path, **_columns(path, rows, given)}}}, path)
    task = recipe_task(recipe)
    splits = {"train": "train", "validation": "validation", "test": "test"}
    findings = find_in_task(task, splits, None, 10**6)
    problems: list[Any] = []
    parts = {split: [item for _, item in iter_items(task, split, None, True, problems)] for split in splits}
    if not all(parts.values()):
        raise UserError(f"{path}: {sum(map(len, parts.values()))} good rows are too few for {', '.join(parts)}")
    return Proposal(path, task, parts, findings)


def _columns(path: str, rows: list[dict[str, Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a file has: by their usual names, otherwise by what they hold."""
    found = dict(given)
    names = list(rows[0])
    if len(names) == 1:
        raise UserError(
            f"{path} has one column, {names[0]!r}; a text and a label are needed (are the columns separated by "
            "commas, semicolons, tabs or bars?)"
        )
    if "choices" in found:
        return found
    if "options" not in found and (guess("choices", names) or _option_columns(names)):
        if not guess("choices", names):
            found["choices"] = _option_columns(names)
        return found
    text, label = found.pop("question", None), found.pop("answer", None)
    label = label or guess("answer", names, fixed=True) or _label_by_content(path, rows, names)
    others = [name for name in names if name != label]
    text = text or guess("question", others, fixed=True) or _text_by_content(path, rows, others)
    return {**found, "text": text, "label": label}


def _option_columns(names: list[str]) -> list[str]:
    """Columns called `A`, `B`, … or `choice1`, `choice2`, …, if there are a question and an answer beside them."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _OPTION.fullmatch(name.strip())
        if match:
            groups.setdefault((match[1] or "").lower(), []).append(name)
    best = max(groups.values(), key=len, default=[])
    others = [name for name in names if name not in best]
    return best if len(best) >= 2 and guess("question", others) and guess("answer", others) else []


def _label_by_content(path: str, rows: list[dict[str, Any]], names: list[str]) -> str:
    """The one column with few different values, each of them often."""
    few = []
    for name in names:
        texts = [label_text(row.get(name), path) for row in rows if not isinstance(row.get(name), list | dict)]
        if 2 <= len(set(texts)) <= max(2, len(texts) // 4):
            few.append(name)
    if len(few) != 1:
        also = f"; {', '.join(map(repr, few))} have few different values each" if few else ""
        raise UserError(f"{missing_column('answer', None, names, path, fixed=True)}, or --label my_column{also}")
    return few[0]


def _text_by_content(path: str, rows: list[dict[str, Any]], names: list[str]) -> str:
    """The column with the longest texts."""
    lengths = {
        name: sum(len(row[name]) for row in rows if isinstance(row.get(name), str)) / len(rows) for name in names
    }
    best = max(lengths, key=lambda name: lengths[name], default=None)
    if best is None or lengths[best] < 2:
        raise missing_column("question", None, names, path, fixed=True)
    return best
