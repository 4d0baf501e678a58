"""The one prompt: rendering, answer letters, tokenisation that never cuts the ending."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError
from .data.items import LETTERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTION = "Return the label of the correct answer for the question below."
_FIELDS = {"template": {"instruction", "question", "choices"}, "choice": {"letter", "text"}}


@dataclass(frozen=True)
class Prompt:
    """
    The layout of a question; stored with every checkpoint, because probabilities mean nothing without it.

    Args:
        instruction (`str`, *optional*):
            First line.
        template (`str`, *optional*):
            The whole prompt, with `{instruction}`, `{question}` and `{choices}`; must end where the letter follows.
        choice (`str`, *optional*, defaults to `"{letter}) {text}"`):
            One option; options are joined with newlines.
    """

    instruction: str = INSTRUCTION
    template: str = "{instruction}\n\nQuestion: {question}\nChoices:\n{choices}\nAnswer:"
    choice: str = "{letter}) {text}"

    def __post_init__(self) -> None:
        for name, allowed in _FIELDS.items():
            try:
                used = {field for _, field, _, _ in string.Formatter().parse(getattr(self, name)) if field is not None}
            except ValueError as error:
                raise UserError(f"prompt.{name} is not a valid template: {error}") from None
            required = allowed - {"instruction"}
            # Only bare names: a checkpoint from the Hub must not reach into attributes through format strings.
            if not required <= used <= allowed:
                names = ", ".join("{" + field + "}" for field in sorted(allowed))
                raise UserError(f"prompt.{name} must use {names} and nothing else, got {getattr(self, name)!r}")

    def render(self, question: str, options: Sequence[str]) -> str:
        """The text that the model reads, ending right before the answer letter."""
        lines = [self.choice.format(letter=LETTERS[i], text=text) for i, text in enumerate(options)]
        return self.template.format(instruction=self.instruction, question=question, choices="\n".join(lines))

    @property
    def ending(self) -> str:
        """The last line, after which the letter is read."""
        return self.template.rsplit("}", 1)[-1].rsplit("\n", 1)[-1]

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def choice_token_ids(tokenizer: PreTrainedTokenizerBase, count: int, ending: str = "Answer:") -> list[int]:
    """
    The vocabulary id of each answer letter where the prompt ends, checked to be one distinct token each.

    The letter is tokenised after the prompt's ending and not by itself, since tokenizers treat the start of a
    text differently. A letter with a space before it is tried first, then without.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer.
        count (`int`):
            How many letters.
        ending (`str`, *optional*, defaults to `"Answer:"`):
            What the prompt ends with.
    """
    if count > len(LETTERS):
        raise UserError(f"{count} choices, but there are only {len(LETTERS)} letters")
    stem = tokenizer(ending, add_special_tokens=False)["input_ids"]
    tried = []
    for space in (" ", ""):
        ids = []
        for letter in LETTERS[:count]:
            full = tokenizer(ending + space + letter, add_special_tokens=False)["input_ids"]
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
    Tokenise a batch of items (for `datasets.map(batched=True)`).

    A prompt longer than `max_length` loses words from the start of its question; options and ending stay whole.
    """
    texts = [prompt.render(q, o) for q, o in zip(rows["question"], rows["options"], strict=True)]
    input_ids = tokenizer(texts)["input_ids"]
    truncated = [False] * len(texts)
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
    item_id: str, question: str, options: Sequence[str], tokenizer: Any, prompt: Prompt, limit: int
) -> list[int]:
    """The prompt with as many last words of the question as fit (bisection: length grows with words)."""
    words = question.split(" ")

    def encode(count: int) -> list[int]:
        kept = " ".join(words[len(words) - count :])
        return tokenizer(prompt.render(kept, options))["input_ids"]

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
