"""The prompt of a multiple-choice question: rendering, token ids of the answer letters, tokenisation, truncation."""

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
        for name, allowed in _FIELDS.items():
            try:
                used = {field for _, field, _, _ in string.Formatter().parse(getattr(self, name)) if field is not None}
            except ValueError as error:
                raise UserError(f"prompt.{name} is not a valid template: {error}") from None
            required = allowed - {"instruction"}
            # Plain names only: format strings of a Hub checkpoint must not access attributes ("{x.__class__}").
            if not required <= used <= allowed:
                names = ", ".join("{" + field + "}" for field in sorted(allowed))
                raise UserError(f"prompt.{name} must use {names} and nothing else, got {getattr(self, name)!r}")

    def render(self, question: str, options: Sequence[str]) -> str:
        """The prompt of one question; the answer letter is the next token."""
        lines = [self.choice.format(letter=LETTERS[i], text=text) for i, text in enumerate(options)]
        return self.template.format(instruction=self.instruction, question=question, choices="\n".join(lines))

    @property
    def ending(self) -> str:
        """The last line of the prompt, such as `"Answer:"`."""
        return self.template.rsplit("}", 1)[-1].rsplit("\n", 1)[-1]

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


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
    item_id: str, question: str, options: Sequence[str], tokenizer: PreTrainedTokenizerBase, prompt: Prompt, limit: int
) -> list[int]:
    """Token ids of the prompt with as many of the question's last words as fit into `limit` tokens (bisection)."""
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
