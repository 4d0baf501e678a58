"""Items and datasets → token rows; a prompt that is too long loses words of its text, never options or ending."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError
from .content_tokens import content_spans
from .data.items import Columns, MCQItem, parse_item
from .data.tasks import ItemRows, as_dataset, items_of, labels_of
from .prompt import Prompt
from .special_tokens import Encoded, Piece, encode_prompts, encode_texts

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TRUNCATIONS = {  # what is cut, for the warning
    "start": "the start of their text was cut",
    "end": "the end of their text was cut",
    "head_tail": "the middle of their text was cut",
}


def tokenize_items(
    rows: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    max_length: int,
    truncation: str = "start",
    labels: tuple[str, ...] | None = None,
) -> dict[str, list[Any]]:
    """
    Tokenise a batch of items, for `Dataset.map(batched=True)`.

    A prompt longer than `max_length` tokens loses words of its text; options and ending are kept.

    Args:
        rows (`dict[str, list]`):
            Columns `id`, `question`, `label` and, where labels are not fixed, `options`.
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer.
        prompt (`Prompt`):
            The prompt template.
        max_length (`int`):
            Maximum length of a prompt in tokens.
        truncation (`str`, *optional*, defaults to `"start"`):
            Which words a longer one loses: those at the `"start"`, at the `"end"`, or in the middle (`"head_tail"`).
        labels (`tuple[str, ...]`, *optional*):
            The fixed labels of a classifier, instead of options of each row.

    Returns:
        Columns `input_ids`, `labels`, `num_options`, `length`, `truncated`, and `content`: which tokens are what was
        asked, see [`content_spans`].
    """
    options = rows["options"] if labels is None else [labels] * len(rows["question"])
    pieces = [prompt.pieces(q, o) for q, o in zip(rows["question"], options, strict=True)]
    special = not prompt.chat  # a chat template writes the tokens that begin and end a text by itself
    encoded = encode_prompts(tokenizer, pieces, rows["id"], special)
    truncated = [False] * len(pieces)
    for i, found in enumerate(encoded):
        if len(found.ids) > max_length:
            item = MCQItem(rows["id"][i], rows["question"][i], tuple(options[i]), -1)
            pieces[i], encoded[i] = _shorten(item, tokenizer, prompt, max_length, truncation)
            truncated[i] = True
    return {
        "input_ids": [found.ids for found in encoded],
        "labels": list(rows["label"]),
        "num_options": [len(o) for o in options],
        "length": [len(found.ids) for found in encoded],
        "truncated": truncated,
        "content": [
            content_spans(found, own, prompt.content(own)) for found, own in zip(encoded, pieces, strict=True)
        ],
    }


def text_lengths(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[str], options: Sequence[Sequence[str]]
) -> dict[str, list[int]]:
    """
    Tokens of each question or text, and of all its options together, as they were written: what a prompt that is too
    long loses is counted too, and the template is not.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer.
        questions (`Sequence[str]`):
            The questions or texts.
        options (`Sequence[Sequence[str]]`):
            The options of each; none where labels are fixed.

    Returns:
        Columns `text_length` and `option_length`.
    """
    texts = list(dict.fromkeys([*questions, *(option for own in options for option in own)]))
    try:
        found = encode_texts(tokenizer, texts, plain=True, add_special_tokens=False)
    except ValueError:  # a tokenizer that cannot read special tokens as text
        found = encode_texts(tokenizer, texts, add_special_tokens=False)
    counts = {text: len(ids) for text, ids in zip(texts, found, strict=True)}
    return {
        "text_length": [counts[question] for question in questions],
        "option_length": [sum(counts[option] for option in own) for own in options],
    }


def _shorten(
    item: MCQItem, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, limit: int, truncation: str
) -> tuple[list[Piece], Encoded]:
    """The prompt with as many words of the text as fit into `limit` tokens (bisection)."""

    def encode(kept: str) -> tuple[list[Piece], Encoded]:
        pieces = prompt.pieces(kept, item.options)
        return pieces, encode_prompts(tokenizer, [pieces], [item.id], not prompt.chat)[0]

    words = item.question.split(" ")
    # A text without spaces, as in Chinese, or with one endless word, is cut between characters.
    for units, glue in ((words, " "), (list(item.question), "")):
        low, high, best = 1, len(units) - 1, None
        while low <= high:
            middle = (low + high) // 2
            found = encode(glue.join(_kept(units, middle, truncation)))
            if len(found[1].ids) <= limit:
                best, low = found, middle + 1
            else:
                high = middle - 1
        if best is not None:
            return best
    raise UserError(
        f"Item {item.id!r}: its options alone need more than max_length={limit} tokens; raise train.max_length"
    )


def _kept(units: Sequence[str], count: int, truncation: str) -> Sequence[str]:
    if truncation == "start":
        return units[len(units) - count :]
    if truncation == "end":
        return units[:count]
    return [*units[: count - count // 2], *units[len(units) - count // 2 :]]


# --- whole datasets -------------------------------------------------------------------------------------------------

_ITEM = {"id", "question", "options", "label"}
_COLUMNS = ["id", "question", "label"]  # where labels are fixed


def prepare_rows(
    dataset: Dataset | ItemRows | list[dict[str, Any]],
    num_labels: int | None,
    labelled: bool,
    name: str,
    labels: tuple[str, ...] | None = None,
    **how: Any,
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
        labels (`tuple[str, ...]`, *optional*):
            The fixed labels of a classifier, which take the place of each row's own options.
        how:
            `tokenizer`, `prompt`, `max_length` and `truncation`, see `tokenize_items`.

    Returns:
        `Dataset` with the columns `input_ids`, `labels`, `num_options`, `length`, `id`, `row` and, unless the rows
        were tokenised before, those of [`text_lengths`].
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
    if labels is not None:
        dataset, how = _labelled_items(dataset, labelled, name, labels), {**how, "labels": labels}
    elif not set(dataset.column_names) >= _ITEM:
        dataset = _parse_rows(dataset, labelled, name)
    # No progress bar for what takes less than a second.
    quiet = len(dataset) < 20_000 and is_progress_bar_enabled()
    if quiet:
        disable_progress_bars()
    try:
        prepared = dataset.map(
            _tokenize_and_measure, batched=True, fn_kwargs=how, remove_columns=dataset.column_names, desc="Tokenising"
        )
    finally:
        if quiet:
            enable_progress_bars()
    _warn_of_cuts(prepared, name, how["max_length"], how.get("truncation", "start"))
    prepared = prepared.remove_columns("truncated").add_column("id", dataset["id"])
    return _with_defaults(prepared, num_labels)


def _tokenize_and_measure(rows: dict[str, list[Any]], **how: Any) -> dict[str, list[Any]]:
    options = rows["options"] if how.get("labels") is None else [()] * len(rows["question"])
    return {**tokenize_items(rows, **how), **text_lengths(how["tokenizer"], rows["question"], options)}


def _warn_of_cuts(prepared: Dataset, name: str, limit: int, truncation: str) -> None:
    cut = sum(prepared["truncated"])
    if cut:
        logger.warning(
            f"{name}: {cut} of {len(prepared)} prompts ({100 * cut / len(prepared):.0f} %) were longer than "
            f"max_length={limit}; {TRUNCATIONS[truncation]}, options and ending kept"
        )


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


def _labelled_items(dataset: Dataset, labelled: bool, name: str, labels: tuple[str, ...]) -> Dataset:
    """Rows for a classifier: items of any task with its labels, or raw rows with text and label; no options."""
    own = labels_of(dataset)
    if not {"id", "question", "label"} <= set(dataset.column_names) or not (own or "options" in dataset.column_names):
        return items_of(dataset, name, labels, labelled).to_dataset().select_columns(_COLUMNS)
    order = {label: i for i, label in enumerate(labels)}
    found: list[int] = []
    if own is not None:  # of another task: a label that this classifier does not know becomes -1
        places = [order.get(label, -1) for label in own]
        found = [places[label] if label >= 0 else -1 for label in dataset["label"]]
    else:
        pairs = zip(dataset["options"], dataset["label"], strict=True)
        found = [order.get(options[label], -1) if label >= 0 else -1 for options, label in pairs]
    if labelled and -1 in found:
        raise UserError(
            f"{name}, row {found.index(-1)}: its label is not among the {len(labels)} labels of this model"
        )
    return dataset.select_columns(["id", "question"]).add_column("label", found)


def fingerprint(input_ids: Sequence[int]) -> str:
    """A short hash of one prompt's tokens."""
    return hashlib.sha256(" ".join(map(str, input_ids)).encode()).hexdigest()[:16]
