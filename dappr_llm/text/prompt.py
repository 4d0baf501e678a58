"""Prompts: their templates, chat templates, and the token ids of answers after their end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.errors import UserError, nearest
from .chat import render_chat
from .data.items import LETTERS
from .special_tokens import Piece, encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Self

INSTRUCTION = "Return the label of the correct answer for the question below."
# What may be filled in, and what has to be.
_FIELDS = {
    "template": {"instruction", "question", "choices"},
    "choice": {"letter", "text"},
    "label template": {"instruction", "text", "labels"},
}
_REQUIRED = {"template": ("choices", "question"), "choice": ("letter", "text"), "label template": ("text",)}
_BRACES = re.compile(r"\{\{|\}\}|\{[^{}]*\}|[{}]|[^{}]+")
MOST_CHARACTERS, MOST_FIELDS = 20_000, 16  # of a template
_FIRST = ("instruction", "template", "choice")


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
        chat (`bool`, *optional*, defaults to `False`):
            Put the prompt into the tokenizer's own chat template, as what the user says.
        system (`str`, *optional*):
            The system message of a chat.
        rendered (`tuple[str, str]`, *optional*):
            What the chat template puts before and after a message; written by [`settled`], kept in checkpoints.
    """

    instruction: str = INSTRUCTION
    template: str = "{instruction}\n\nQuestion: {question}\nChoices:\n{choices}\nAnswer:"
    choice: str = "{letter}) {text}"
    chat: bool = False
    system: str | None = None
    rendered: tuple[str, str] | None = None
    # Which rules hold for the fields that are templates.
    templates: ClassVar[dict[str, str]] = {"template": "template", "choice": "choice"}

    def __post_init__(self) -> None:
        if self.rendered is not None:
            object.__setattr__(self, "rendered", tuple(self.rendered))
        for name, value in self.to_dict().items():
            texts = value if name == "rendered" else [] if name == "chat" else [value]
            for text in texts:
                if not isinstance(text, str):
                    raise UserError(f"prompt.{name} must be a text, found {type(text).__name__}")
                if len(text) > MOST_CHARACTERS:
                    raise UserError(f"prompt.{name} has {len(text)} characters; at most {MOST_CHARACTERS}")
        if self.system is not None and not self.chat:
            raise UserError("prompt.system is a message of a chat: set prompt.chat: true, or write an instruction")
        for name, kind in self.templates.items():
            used = [part.field for part in _parse(getattr(self, name), kind) if isinstance(part, _Field)]
            missing = sorted(set(_REQUIRED[kind]) - set(used))
            if missing:
                raise UserError(f"prompt.{name} lacks {{{missing[0]}}}, got {getattr(self, name)!r}")
            if len(used) > MOST_FIELDS:
                raise UserError(f"prompt.{name} has {len(used)} places to fill in; at most {MOST_FIELDS}")

    def settled(self, tokenizer: PreTrainedTokenizerBase) -> Self:
        """The same prompt with what the tokenizer's chat template puts around it, if it is a chat."""
        if not self.chat or self.rendered is not None:
            return self
        return replace(self, rendered=render_chat(tokenizer, self.system))

    def pieces(self, question: str, options: Sequence[str]) -> list[Piece]:
        """The prompt of one question in pieces, each with whether it is the user's text or the template's."""
        if self.rendered is None:
            return self._message(question, options)
        before, after = self.rendered
        return [(before, False), *self._message(question, options), (after, False)]

    def _message(self, question: str, options: Sequence[str]) -> list[Piece]:
        choices: list[Piece] = []
        for number, option in enumerate(options):
            choices += [("\n", False)] if number else []
            choices += _fill(self.choice, "choice", {"letter": [(LETTERS[number], False)], "text": [(option, True)]})
        values = {"instruction": [(self.instruction, False)], "question": [(question, True)], "choices": choices}
        return _fill(self.template, "template", values)

    def content(self, pieces: Sequence[Piece]) -> list[bool]:
        """Which of the [`pieces`] say what was asked: question and options, and no word that all prompts share."""
        return [users for _, users in pieces]

    def render(self, question: str, options: Sequence[str]) -> str:
        """The prompt of one question; the answer is the next token."""
        return "".join(text for text, _ in self.pieces(question, options))

    @property
    def ending(self) -> str:
        """The end of the prompt, after which the answer is read: its last line, or what ends the chat template."""
        if self.rendered is not None:
            return self.rendered[1]
        last = _parse(self.template, self.templates["template"])[-1:]
        return "".join(part for part in last if isinstance(part, str)).rsplit("\n", 1)[-1]

    @property
    def spaces(self) -> tuple[str, ...]:
        """What may stand between prompt and answer; an assistant's message begins without a space."""
        return ("", " ") if self.chat else (" ", "")

    def to_dict(self) -> dict[str, Any]:
        """The fields; those that are later than the first checkpoints only where they are set."""
        found = {key: value for key, value in asdict(self).items() if key in _FIRST or value}
        return found | ({"rendered": list(self.rendered)} if self.rendered else {})


@dataclass(frozen=True)
class LabelPrompt(Prompt):
    """
    The prompt of a classifier with fixed labels; by default the text alone.

    Args:
        template (`str`, *optional*, defaults to `"{text}"`):
            The whole prompt, with `{text}` and, if wanted, `{instruction}` and `{labels}`.
        listed (`str`, *optional*):
            What stands for `{labels}`; by default the names of the labels.
    """

    instruction: str = ""
    template: str = "{text}"
    choice: str = ""
    listed: str | None = None
    templates: ClassVar[dict[str, str]] = {"template": "label template"}

    def _message(self, question: str, options: Sequence[str]) -> list[Piece]:
        labels = ", ".join(options) if self.listed is None else self.listed
        values = {"instruction": [(self.instruction, False)], "text": [(question, True)], "labels": [(labels, True)]}
        return _fill(self.template, "label template", values)

    def content(self, pieces: Sequence[Piece]) -> list[bool]:
        # Each part of the template is one piece; the list of labels is the same in every prompt.
        own = [part == _Field("text") for part in _parse(self.template, "label template")]
        return own if self.rendered is None else [False, *own, False]


@dataclass(frozen=True)
class TokenPrompt(LabelPrompt):
    """The prompt of a classifier whose labels are tokens that a causal LM says next."""

    instruction: str = "Classify the text below."
    template: str = "{instruction}\nLabels: {labels}\n\nText: {text}\nLabel:"

    def listing(self, labels: str) -> Self:
        """The same prompt with this text for `{labels}`, if its template has them and nothing was said before."""
        wanted = _Field("labels") in _parse(self.template, "label template")
        return replace(self, listed=labels) if wanted and self.listed is None else self


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
    valid, shown = _FIELDS[name], name.split()[-1]
    parts: list[str | _Field] = []
    text = ""
    for found in _BRACES.finditer(template):
        token = found.group()
        if token in ("{{", "}}"):
            text += token[0]
        elif len(token) == 1 and token in "{}":
            raise UserError(f"prompt.{shown} has a single {token!r}; write {token * 2!r} for a brace: {template!r}")
        elif not token.startswith("{"):
            text += token
        elif token[1:-1] in valid:
            parts += [text, _Field(token[1:-1])] if text else [_Field(token[1:-1])]
            text = ""
        else:
            hint = nearest(re.split(r"[.:!\[]", token[1:-1])[0], valid)
            raise UserError(
                f"prompt.{shown} has {token[:80]!r}; only plain names can be filled in, without format, conversion or "
                f"attribute ({hint})"
            )
    return (*parts, text) if text else tuple(parts)


def _fill(template: str, name: str, values: Mapping[str, list[Piece]]) -> list[Piece]:
    found: list[Piece] = []
    for part in _parse(template, name):
        found += [(part, False)] if isinstance(part, str) else values[part.field]
    return found


def choice_token_ids(
    tokenizer: PreTrainedTokenizerBase, count: int, ending: str = "Answer:", spaces: tuple[str, ...] = (" ", "")
) -> list[int]:
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
        spaces (`tuple[str, ...]`, *optional*):
            What may stand before a letter, in the order in which it is tried.
    """
    if count > len(LETTERS):
        raise UserError(f"{count} choices, but there are only {len(LETTERS)} letters")
    tried = []
    for space in spaces:
        ids = []
        for letter in LETTERS[:count]:
            found = next_token(tokenizer, ending, space + letter)
            if isinstance(found, str):
                tried.append(found)
                break
            ids.append(found)
        if len(ids) == count:
            if len(set(ids)) == count:
                return ids
            tried.append(f"the letters with {space!r} before them share a token")
    raise UserError(
        f"This tokenizer ({type(tokenizer).__name__}, {tokenizer.name_or_path or 'unnamed'}) has no single distinct "
        f"token for each of the answer letters {LETTERS[0]}–{LETTERS[count - 1]}: {'; '.join(tried)}"
    )


def next_token(tokenizer: PreTrainedTokenizerBase, ending: str, answer: str) -> int | str:
    """The one token that an answer is after the end of a prompt; if it is none, a sentence that says so."""
    (stem,) = encode_texts(tokenizer, [ending], add_special_tokens=False)
    (full,) = encode_texts(tokenizer, [ending + answer], add_special_tokens=False)
    if full[:-1] != stem or full[-1] == tokenizer.unk_token_id:
        return f"{answer!r} after {ending!r} is {len(full) - len(stem)} token(s), or unknown"
    return full[-1]
