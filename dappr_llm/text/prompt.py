"""The one prompt: rendering, answer letters, and tokenising items and datasets without ever cutting the ending."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError, nearest
from .data.items import LETTERS, Columns, parse_item
from .data.tasks import ItemRows, as_dataset
from .special_tokens import Piece, encode_prompts, encode_texts

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

INSTRUCTION = "Return the label of the correct answer for the question below."
_FIELDS = {"template": {"instruction", "question", "choices"}, "choice": {"letter", "text"}}
_BRACES = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]|[^{}]+")
MOST_CHARACTERS, MOST_FIELDS = 20_000, 16  # of a template


@dataclass(frozen=True)
class Prompt:
    """
    The prompt template; saved with every checkpoint, since calibrated probabilities hold for one prompt only.

    Args:
        instruction (`str`, *optional*):
            First line of the prompt.
        template (`str`, *optional*):
            The whole prompt, with `{instruction}`, `{question}` and `{choices}`; the answer letter follows its end.
        choice (`str`, *optional*, defaults to `"{letter}) {text}"`):
            Template of one option; options are joined by newlines.
    """

    instruction: str = INSTRUCTION
    template: str = "{instruction}\n\nQuestion: {question}\nChoices:\n{choices}\nAnswer:"
    choice: str = "{letter}) {text}"

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if not isinstance(value, str):
                raise UserError(f"prompt.{name} must be a text, found {type(value).__name__}")
            if len(value) > MOST_CHARACTERS:
                raise UserError(f"prompt.{name} has {len(value)} characters; at most {MOST_CHARACTERS}")
        for name in _FIELDS:
            used = [part.field for part in _parse(getattr(self, name), name) if isinstance(part, _Field)]
            missing = sorted(_FIELDS[name] - {"instruction", *used})
            if missing:
                raise UserError(f"prompt.{name} lacks {{{missing[0]}}}, got {getattr(self, name)!r}")
            if len(used) > MOST_FIELDS:
                raise UserError(f"prompt.{name} has {len(used)} places to fill in; at most {MOST_FIELDS}")

    def pieces(self, question: str, options: Sequence[str]) -> list[Piece]:
        """The prompt of one question in pieces, each with whether it is the user's text or the template's."""
        choices: list[Piece] = []
        for number, option in enumerate(options):
            choices += [("\n", False)] if number else []
            choices += _fill(self.choice, "choice", {"letter": [(LETTERS[number], False)], "text": [(option, True)]})
        values = {"instruction": [(self.instruction, False)], "question": [(question, True)], "choices": choices}
        return _fill(self.template, "template", values)

    def render(self, question: str, options: Sequence[str]) -> str:
        """The prompt of one question; the answer letter is the next token."""
        return "".join(text for text, _ in self.pieces(question, options))

    @property
    def ending(self) -> str:
        """The last line of the prompt, such as `"Answer:"`."""
        last = _parse(self.template, "template")[-1:]
        return "".join(part for part in last if isinstance(part, str)).rsplit("\n", 1)[-1]

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class _Field:
    """A place of a template that is filled in."""

    field: str


@lru_cache(maxsize=64)
def _parse(template: str, name: str) -> tuple[str | _Field, ...]:
    """
    The literal texts and fields of a template; `{{` and `}}` are braces.

    Fields are plain names: templates come with checkpoints of others, and Python's format strings can read attributes
    (`{question.__class__}`) and allocate any amount of memory (`{question:2000000000}`).
    """
    valid = _FIELDS[name]
    parts: list[str | _Field] = []
    text = ""
    for found in _BRACES.finditer(template):
        token = found.group()
        if token in ("{{", "}}"):
            text += token[0]
        elif len(token) == 1 and token in "{}":
            raise UserError(f"prompt.{name} has a single {token!r}; write {token * 2!r} for a brace: {template!r}")
        elif not token.startswith("{"):
            text += token
        elif token[1:-1] in valid:
            parts += [text, _Field(token[1:-1])] if text else [_Field(token[1:-1])]
            text = ""
        else:
            hint = nearest(re.split(r"[.:!\[]", token[1:-1])[0], valid)
            raise UserError(
                f"prompt.{name} has {token[:80]!r}; only plain names can be filled in, without format, conversion or "
                f"attribute ({hint})"
            )
    return (*parts, text) if text else tuple(parts)


def _fill(template: str, name: str, values: Mapping[str, list[Piece]]) -> list[Piece]:
    found: list[Piece] = []
    for part in _parse(template, name):
        found += [(part, False)] if isinstance(part, str) else values[part.field]
    return found


def choice_token_ids(tokenizer: PreTrainedTokenizerBase, count: int, ending: str = "Answer:") -> list[int]:
    """
    The token id of each answer letter after the end of the prompt; a `UserError` unless each is a distinct token.

    Letters are tokenised together with the end of the prompt, since tokenizers treat the start of a text differently:
    first with a space before them, then without.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer.
        count (`int`):
            Number of letters.
        ending (`str`, *optional*, defaults to `"Answer:"`):
            The last line of the prompt.
    """
    if count > len(LETTERS):
        raise UserError(f"{count} choices, but there are only {len(LETTERS)} letters")
    (stem,) = encode_texts(tokenizer, [ending], add_special_tokens=False)
    tried = []
    for space in (" ", ""):
        ids = []
        for letter in LETTERS[:count]:
            (full,) = encode_texts(tokenizer, [ending + space + letter], add_special_tokens=False)
            if full[:-1] != stem or full[-1] == tokenizer.unk_token_id:
                tried.append(f"{space + letter!r} after {ending!r} is {len(full) - len(stem)} token(s), or unknown")
                break
            ids.append(full[-1])
        if len(ids) == count:
            if len(set(ids)) == count:
                return ids
            tried.append(f"the letters with {space!r} before them share a token")
    raise UserError(
        f"This tokenizer ({type(tokenizer).__name__}, {tokenizer.name_or_path or 'unnamed'}) has no single distinct "
        f"token for each of the answer letters {LETTERS[0]}–{LETTERS[count - 1]}: {'; '.join(tried)}"
    )


def tokenize_items(
    rows: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, prompt: Prompt, max_length: int
) -> dict[str, list[Any]]:
    """
    Tokenise a batch of items, for `Dataset.map(batched=True)`.

    A prompt longer than `max_length` tokens loses words at the start of its question; options and ending are kept.

    Args:
        rows (`dict[str, list]`):
            Columns `id`, `question`, `options` and `label`.
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer.
        prompt (`Prompt`):
            The prompt template.
        max_length (`int`):
            Maximum length of a prompt in tokens.

    Returns:
        Columns `input_ids`, `labels`, `num_options`, `length` and `truncated`.
    """
    pieces = [prompt.pieces(q, o) for q, o in zip(rows["question"], rows["options"], strict=True)]
    input_ids = encode_prompts(tokenizer, pieces, rows["id"])
    truncated = [False] * len(pieces)
    for i, ids in enumerate(input_ids):
        if len(ids) > max_length:
            input_ids[i] = _shorten(
                rows["id"][i], rows["question"][i], rows["options"][i], tokenizer, prompt, max_length
            )
            truncated[i] = True
    return {
        "input_ids": input_ids,
        "labels": list(rows["label"]),
        "num_options": [len(o) for o in rows["options"]],
        "length": [len(ids) for ids in input_ids],
        "truncated": truncated,
    }


def _shorten(
    item_id: str, question: str, options: Sequence[str], tokenizer: PreTrainedTokenizerBase, prompt: Prompt, limit: int
) -> list[int]:
    """Token ids of the prompt with as many of the question's last words as fit into `limit` tokens (bisection)."""
    words = question.split(" ")

    def encode(count: int) -> list[int]:
        kept = " ".join(words[len(words) - count :])
        return encode_prompts(tokenizer, [prompt.pieces(kept, options)], [item_id])[0]

    low, high, best = 1, len(words) - 1, None
    while low <= high:
        middle = (low + high) // 2
        ids = encode(middle)
        if len(ids) <= limit:
            best, low = ids, middle + 1
        else:
            high = middle - 1
    if best is None:
        raise UserError(
            f"Item {item_id!r}: its options alone need more than max_length={limit} tokens; raise train.max_length"
        )
    return best


# --- whole datasets -------------------------------------------------------------------------------------------------

_ITEM = {"id", "question", "options", "label"}


def prepare_rows(
    dataset: Dataset | ItemRows | list[dict[str, Any]], num_labels: int | None, labelled: bool, name: str, **how: Any
) -> Dataset:
    """
    Parse and tokenise a dataset; the part of `TextBackend.prepare` for map-style datasets (streams: `prepare_stream`).

    Args:
        dataset (`Dataset`, `ItemRows` or `list[dict]`):
            Raw rows, parsed items, or tokenised rows (with `input_ids`), which only get their missing columns.
        num_labels (`int`, *optional*):
            K, the number of trained options, if it is known yet.
        labelled (`bool`):
            Raise a `UserError` for rows without a label.
        name (`str`):
            Name of the dataset in error messages.
        how:
            `tokenizer`, `prompt` and `max_length`, see `tokenize_items`.

    Returns:
        `Dataset` with the columns `input_ids`, `labels`, `num_options`, `length`, `id` and `row`.
    """
    from datasets import Dataset, disable_progress_bars, enable_progress_bars
    from datasets.utils.logging import is_progress_bar_enabled

    if isinstance(dataset, ItemRows):
        dataset = dataset.to_dataset()
    elif isinstance(dataset, list):
        dataset = Dataset.from_list(dataset)
    if "input_ids" in dataset.column_names:
        return _with_defaults(dataset, num_labels)
    if len(dataset) == 0:
        raise UserError(f"{name} has no rows")
    if not set(dataset.column_names) >= _ITEM:
        dataset = _parse_rows(dataset, labelled, name)
    # No progress bar for what takes less than a second.
    quiet = len(dataset) < 20_000 and is_progress_bar_enabled()
    if quiet:
        disable_progress_bars()
    try:
        prepared = dataset.map(
            tokenize_items, batched=True, fn_kwargs=how, remove_columns=dataset.column_names, desc="Tokenising"
        )
    finally:
        if quiet:
            enable_progress_bars()
    truncated = sum(prepared["truncated"])
    if truncated:
        logger.warning(
            f"{name}: {truncated} of {len(prepared)} prompts were longer than max_length={how['max_length']}; "
            "the start of their question was cut, options and ending kept"
        )
    prepared = prepared.remove_columns("truncated").add_column("id", dataset["id"])
    return _with_defaults(prepared, num_labels)


def _with_defaults(dataset: Dataset, num_labels: int | None) -> Dataset:
    missing: dict[str, list[Any]] = {}
    size = len(dataset)
    columns = set(dataset.column_names)
    if "labels" not in columns:
        missing["labels"] = [-1] * size
    if "num_options" not in columns:
        if num_labels is None:
            raise UserError("Prepared rows need a num_options column, or set num_choices in DAPPrConfig")
        missing["num_options"] = [num_labels] * size
    if "length" not in columns:
        missing["length"] = [len(ids) for ids in dataset["input_ids"]]
    if "id" not in columns:
        missing["id"] = [str(i) for i in range(size)]
    for key, values in missing.items():
        dataset = dataset.add_column(key, values)
    if "row" in columns:
        dataset = dataset.remove_columns("row")
    return dataset.add_column("row", list(range(size)))


def _parse_rows(dataset: Dataset, labelled: bool, name: str) -> Dataset:
    items = []
    for number, row in enumerate(dataset):
        item = parse_item(row, Columns(), f"{name}, row {number}", default_id=str(number))
        if labelled and item.label < 0:
            raise UserError(f"{name}, row {number}: the row has no answer, which training and evaluation need")
        items.append(dataclasses.asdict(item))
    return as_dataset(items)
