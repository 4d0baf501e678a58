"""
What the trainer needs to know about text: rows → tensors, a forward pass → `Outputs`, and what to write down.

The trained object stays a native `PeftModel`; this class holds only what surrounds it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from ..core.errors import UserError
from ..inference.batching import is_stream
from ..methods import Method, name_of, served_by
from . import bundled_model as embedded
from .data.items import LETTERS, Columns, MCQItem, parse_item
from .data.prepare import prepare_rows
from .data.streams import most_options, prepare_stream
from .model_reader import PromptReader
from .packing.decoder_layers import keep_differentiable, unwrapped
from .packing.self_check import PackedReading
from .prompt import Prompt, choice_token_ids, tokenize_items
from .readouts.letters import ChoiceReadout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SERVED = frozenset({"auxiliary_rows"})


def check_method(method: Method) -> None:
    """Refuse a method that needs what text cannot give, naming those that do not."""
    unserved = method.needs - _SERVED
    if unserved:
        raise UserError(
            f"Method {name_of(method)!r} needs {', '.join(sorted(unserved))}, which text models do not offer; on text "
            f"use one of: {', '.join(served_by(_SERVED))}"
        )


class TextBackend(PromptReader):
    """
    Multiple-choice questions on a causal LM.

    Args:
        model (`nn.Module`):
            A causal LM or `PeftModel`; its output embeddings get the readout hook.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer, left-padding.
        method (`Method`):
            The method, asked how many outputs it reads per choice.
        num_choices (`int`, *optional*):
            K: the letters trained on. `None`: the most options of the first rows given to `check_options`.
        prompt (`Prompt`, *optional*):
            Layout of the prompt.
        max_length (`int`, *optional*, defaults to 300):
            Longer prompts lose words of their question.
        evidence_offset (`float`, *optional*, defaults to 0.0):
            Added to every answer logit; see `DAPPrConfig.evidence_offset`.
        extra_token_ids (`list[list[int]]`, *optional*):
            For methods with more than one output per choice: the vocabulary rows of each further block, as a
            checkpoint stores them. By default the last rows of the vocabulary.
        packing (`bool`, *optional*, defaults to `True`):
            Compute batches without padding, where the model allows it.
        share_prefix (`bool`, *optional*, defaults to `True`):
            In packed batches, compute what prompts have in common once.
    """

    modality = "text"
    has_head = False  # nothing but logits: see `_SERVED`
    table_facts: Mapping[str, Any] = {}  # what prediction tables say besides

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        method: Method,
        num_choices: int | None = None,
        prompt: Prompt | None = None,
        max_length: int = 300,
        evidence_offset: float = 0.0,
        base_model: str | None = None,
        extra_token_ids: Sequence[Sequence[int]] | None = None,
        packing: bool = True,
        share_prefix: bool = True,
    ):
        check_method(method)
        keep_differentiable(model)
        if tokenizer.padding_side != "left":
            raise UserError("The tokenizer must pad on the left: tokenizer.padding_side = 'left'")
        self.tokenizer = tokenizer
        self.method = method
        self.num_choices = num_choices
        self.prompt = prompt or Prompt()
        self.max_length = _fitting_length(model, max_length)
        self.evidence_offset = evidence_offset
        self.base_model = base_model
        self.hub_base = embedded.public_name(base_model)  # what a model card names
        self._extra = [list(block) for block in extra_token_ids or ()]
        self.readout = ChoiceReadout(model, ())
        self._read_width(num_choices or 2)
        self._takes_positions = "position_ids" in inspect.signature(unwrapped(model).forward).parameters
        self.packing = PackedReading(packing and self._takes_positions, share_prefix)

    def _token_ids(self, width: int) -> list[int]:
        return choice_token_ids(self.tokenizer, width, self.prompt.ending)

    def _rows(self, width: int) -> list[int]:
        """Vocabulary rows to read: the letters, then each further block of the method's outputs."""
        return self._token_ids(width) + [row for block in self._extra_blocks(width) for row in block]

    def _extra_rows(self, block: int, blocks: int, width: int) -> list[int]:
        """
        One row per choice, from the end of the vocabulary; blocks take turns.

        A reading of more choices adds rows and moves none: the last K rows, as others read them, would shift every
        choice by one between K = 4 and K = 5.
        """
        rows = list(self._extra[block][:width]) if block < len(self._extra) else []
        taken = {*self._token_ids(width), *rows}
        candidate = self.readout.num_rows - 1 - block
        while len(rows) < width:
            if candidate < 0:
                raise UserError(f"The vocabulary has no room for {blocks + 1} outputs per choice")
            if candidate not in taken:
                rows.append(candidate)
                taken.add(candidate)
            candidate -= blocks
        return rows

    def _extra_blocks(self, width: int) -> list[list[int]]:
        blocks = self.method.num_outputs(width) // width - 1
        return [self._extra_rows(block, blocks, width) for block in range(blocks)]

    def _read_width(self, width: int) -> None:
        self.width = width
        self.readout.token_ids = self._rows(width)

    @contextmanager
    def reading(self, width: int) -> Iterator[None]:
        """Read the first `width` letters instead of the K trained ones."""
        before = self.width
        self._read_width(width)
        try:
            yield
        finally:
            self._read_width(before)

    def prepare(self, dataset: Any, labelled: bool = True, name: str = "dataset") -> Any:
        """
        Rows of any accepted layout → tokenised rows.

        Args:
            dataset (`Dataset` or `list[dict]`):
                Prepared rows (`input_ids`, `labels`), items (`id`, `question`, `options`, `label`), or raw rows
                with question, choices and answer under their usual names.
            labelled (`bool`, *optional*, defaults to `True`):
                Refuse rows without an answer.
            name (`str`, *optional*, defaults to `"dataset"`):
                How error messages call it.
        """
        how = {"tokenizer": self.tokenizer, "prompt": self.prompt, "max_length": self.max_length}
        if is_stream(dataset):
            return prepare_stream(dataset, name, lambda: self.num_choices, **how)
        return prepare_rows(dataset, self.num_choices, labelled, name, **how)

    def augmented(self, prepared: Any) -> Any:
        """Training rows as they are trained on: unchanged."""
        return prepared

    def save_processor(self, folder: Any) -> None:
        """Write the tokenizer beside the weights."""
        self.tokenizer.save_pretrained(folder)

    def as_row(self, question: Any, choices: Sequence[Any] | None = None) -> Mapping[str, Any] | None:
        """One question as a row; `None` for anything that holds several."""
        if isinstance(question, Mapping):
            return question
        if not isinstance(question, str):
            return None
        if choices is None:
            raise UserError('A question given as text needs its choices: pipe("…?", choices=["…", "…"])')
        if isinstance(choices, str):
            raise UserError("choices must be a list of texts, not one text")
        return {"question": question, "choices": list(choices)}

    def fingerprints(self, prepared: Any) -> list[str] | None:
        """A short hash of every prompt's tokens."""
        return [fingerprint(ids) for ids in prepared["input_ids"]]

    ask_help = (
        "Type a question, then one choice per line and an empty line; or all in one line: question | choice | "
        "choice.\nCtrl-D ends."
    )

    def ask_row(self, read: Callable[[str], str]) -> Mapping[str, Any] | None:
        """A question asked for in the terminal."""
        line = read("Question: ").strip()
        if "|" in line:
            question, *choices = (part.strip() for part in line.split("|"))
            return {"question": question, "choices": choices} if question else None
        choices = []
        while line:
            choice = read(f"  choice {len(choices) + 1}: ").strip()
            if not choice:
                break
            choices.append(choice)
        return {"question": line, "choices": choices} if line else None

    def items(self, rows: Sequence[Mapping[str, Any]], start: int = 0, name: str = "item") -> list[MCQItem]:
        """Raw rows, or items, as parsed items; `start` counts on in names and ids where rows come in portions."""
        return [
            parse_item(row, Columns(), f"{name} {number}", default_id=str(number))
            for number, row in enumerate(rows, start)
        ]

    def encode(self, items: Sequence[MCQItem]) -> list[dict[str, Any]]:
        """Items → rows for `collate`, each with its `num_options`, its `length` and whether it was `truncated`."""
        columns: dict[str, list[Any]] = {
            "id": [item.id for item in items],
            "question": [item.question for item in items],
            "options": [item.options for item in items],
            "label": [item.label for item in items],
        }
        encoded = tokenize_items(columns, self.tokenizer, self.prompt, self.max_length)
        return [{key: values[i] for key, values in encoded.items()} for i in range(len(items))]

    def content_key(self, item: MCQItem) -> str:
        """What an item says, as one text: equal for equal questions, wherever they stand."""
        return json.dumps([item.question, list(item.options)], ensure_ascii=False)

    def option_names(self, item: MCQItem) -> list[str]:
        """What the options of an item are called: their letters."""
        return list(LETTERS[: len(item.options)])

    def check_options(self, prepared: Any, name: str) -> None:
        """Settle K if it is still open; refuse rows that offer more options than letters are trained."""
        # A stream's later rows are checked as they come.
        counts = [most_options(prepared)] if is_stream(prepared) else list(prepared["num_options"])
        if self.num_choices is None:
            self.num_choices = max(counts)
            self._read_width(self.num_choices)
        for row, count in enumerate(counts):
            if count > self.num_choices:
                raise UserError(
                    f"{name}, row {row}: {count} options, but only {self.num_choices} letters are trained; set "
                    f"train.num_choices: {max(counts)}"
                )

    def config(self) -> dict[str, Any]:
        """What is needed to read this checkpoint's logits again."""
        assert self.num_choices is not None, "K is settled when the first rows are checked"
        return {
            "modality": self.modality,
            "base_model": self.base_model,
            "num_choices": self.num_choices,
            "letters": list(LETTERS[: self.num_choices]),
            "letter_token_ids": self._token_ids(self.num_choices),
            "extra_token_ids": self._extra_blocks(self.num_choices),
            "prompt": self.prompt.to_dict(),
            "max_length": self.max_length,
            "evidence_offset": self.evidence_offset,
        }


def fingerprint(input_ids: Sequence[int]) -> str:
    """A short hash of one prompt's tokens."""
    return hashlib.sha256(" ".join(map(str, input_ids)).encode()).hexdigest()[:16]


def _fitting_length(model: nn.Module, max_length: int) -> int:
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return min(max_length, context) if context else max_length
