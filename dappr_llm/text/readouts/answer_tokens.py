"""
One distinct token of the vocabulary per label: the user's own (`model.answers`), or found from the labels' names.

Found tokens are, in this order: a label's whole name if it is one token, after a space or without; the first token of
its name, then the first tokens of its words, where no other label has the same; any other of these; and at last words
of the vocabulary that have nothing to do with it, which training gives their meaning. The same labels and tokenizer
always give the same tokens.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...core.errors import UserError, nearest
from ..data.labels import label_text
from ..prompt import TokenPrompt, next_token
from ..special_tokens import encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MOST_LISTED = 30  # labels that the default prompt lists
WITHOUT_LIST = "{instruction}\n\nText: {text}\nLabel:"
_SHOWN = 5  # of the tokens that were found
_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+|[^\W\d_A-Za-z]+")


@dataclass(frozen=True)
class AnswerTokens:
    """
    The answer of each label.

    Args:
        labels (`tuple[str, ...]`):
            Names of the labels.
        texts (`tuple[str, ...]`):
            What the model says for each of them.
        ids (`tuple[int, ...]`):
            The token of each text.
    """

    labels: tuple[str, ...]
    texts: tuple[str, ...]
    ids: tuple[int, ...]

    @property
    def listed(self) -> str:
        """Labels and answers as the prompt lists them; a label that is its own answer stands alone."""
        pairs = zip(self.labels, (text.strip() for text in self.texts), strict=True)
        return ", ".join(label if answer in ("", label) else f"{label} = {answer}" for label, answer in pairs)


def answer_prompt(given: Mapping[str, Any], labels: Sequence[str]) -> TokenPrompt:
    """The prompt of these fields; the default template lists the labels if they are not too many."""
    few = {} if len(labels) <= MOST_LISTED else {"template": WITHOUT_LIST}
    return TokenPrompt(**{**few, **given})


def choose_answers(
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    answers: Mapping[Any, str] | None,
    prompt: TokenPrompt,
    where: str = "model.answers",
) -> AnswerTokens:
    """
    The answers that were given, checked; without them, tokens found from the labels' names.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer.
        labels (`Sequence[str]`):
            Names of the labels.
        answers (`Mapping`, *optional*):
            Label → text of exactly one token.
        prompt (`TokenPrompt`):
            Settled; the answer follows its end.
        where (`str`, *optional*):
            What errors call the answers.
    """
    if answers is not None:
        return _given(tokenizer, labels, answers, prompt, where)
    found = find_answers(tokenizer, labels, prompt)
    some = ", ".join(f"{label} = {text!r}" for label, text in zip(labels[:_SHOWN], found.texts, strict=False))
    more = ", …" if len(labels) > _SHOWN else ""
    logger.info(f"Found {len(labels)} tokens for {len(labels)} labels: {some}{more} (model.answers sets others)")
    return found


def _given(
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    answers: Mapping[Any, str],
    prompt: TokenPrompt,
    where: str,
) -> AnswerTokens:
    named = {label_text(label, where): text for label, text in answers.items()}
    for label in named:
        if label not in labels:
            raise UserError(f"{where}: the data have no label {label!r}; {nearest(str(label), labels)}")
    ids: dict[int, str] = {}
    for label in labels:
        if label not in named:
            raise UserError(f"{where}: no answer for the label {label!r}; every label of the data needs one")
        token = next_token(tokenizer, prompt.ending, named[label])
        if isinstance(token, str):
            raise UserError(
                f"{where}: the answer of {label!r} is {named[label]!r}, which is not one token after "
                f"{prompt.ending!r}: the tokenizer reads {_pieces(tokenizer, prompt.ending, named[label])}; give a "
                "text of exactly one token, mostly a short word with a space before it"
            )
        if token in ids:
            raise UserError(
                f"{where}: the labels {ids[token]!r} and {label!r} have the same token "
                f"{_names(tokenizer, [token])[0]!r}; each label needs its own"
            )
        ids[token] = label
    return AnswerTokens(tuple(labels), tuple(named[label] for label in labels), tuple(ids))


def _pieces(tokenizer: PreTrainedTokenizerBase, ending: str, answer: str) -> str:
    (stem,) = encode_texts(tokenizer, [ending], add_special_tokens=False)
    (full,) = encode_texts(tokenizer, [ending + answer], add_special_tokens=False)
    if full[: len(stem)] == stem:
        return str(_names(tokenizer, full[len(stem) :]))
    return f"{_names(tokenizer, full)}, in which the two have grown together"


def _names(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    return [str(name) for name in tokenizer.convert_ids_to_tokens(list(ids))]


# --- tokens from names ----------------------------------------------------------------------------------------------


def find_answers(tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], prompt: TokenPrompt) -> AnswerTokens:
    """A distinct token for each label; see the head of this file for the order of preference."""
    names = list(labels)
    # With a space before it, then without; an assistant's message begins without one.
    before, instead = prompt.spaces
    likely = _tokens_after(tokenizer, prompt.ending, [before + name for name in names])
    other = _tokens_after(tokenizer, prompt.ending, [instead + name for name in names])
    plain = _PlainTokens(tokenizer)
    first = [plain.only(found[:1]) for found in likely]
    words = _first_of_words(tokenizer, prompt, names, plain)
    tiers: list[tuple[list[list[int]], bool]] = [
        ([plain.only(found) if len(found) == 1 else [] for found in likely], True),
        ([plain.only(found) if len(found) == 1 else [] for found in other], True),
        (first, True),
        (words, True),
        ([plain.only(found) for found in words], False),
        ([plain.only([*one, *two]) for one, two in zip(likely, other, strict=True)], False),
    ]
    chosen: dict[int, int] = {}  # place of a label → token
    taken: set[int] = set()
    for candidates, own in tiers:
        # Of a token that two labels could claim with equal right neither gets it, as long as there are others.
        shared = Counter(token for found in candidates for token in set(found)) if own else Counter()
        for place, found in enumerate(candidates):
            free = (token for token in found if token not in taken and shared[token] <= 1)
            token = None if place in chosen else next(free, None)
            if token is not None:
                chosen[place] = token
                taken.add(token)
    reserve = plain.reserve(taken)
    for place in range(len(names)):
        if place not in chosen:
            token = next(reserve, None)
            if token is None:
                raise UserError(
                    f"{len(names)} labels need as many tokens, and this tokenizer has {len(chosen)} that can be used; "
                    "use model.readout: head"
                )
            chosen[place] = token
    ids = [chosen[place] for place in range(len(names))]
    texts = [
        before + name if [token] == one else instead + name if [token] == two else plain.text(token)
        for name, token, one, two in zip(names, ids, likely, other, strict=True)
    ]
    return AnswerTokens(tuple(names), tuple(texts), tuple(ids))


def _tokens_after(tokenizer: PreTrainedTokenizerBase, ending: str, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts after the end of the prompt; none of a text that grows together with it."""
    (stem,) = encode_texts(tokenizer, [ending], add_special_tokens=False)
    full = encode_texts(tokenizer, [ending + text for text in texts], add_special_tokens=False)
    return [ids[len(stem) :] if ids[: len(stem)] == stem else [] for ids in full]


def _first_of_words(
    tokenizer: PreTrainedTokenizerBase, prompt: TokenPrompt, names: Sequence[str], plain: _PlainTokens
) -> list[list[int]]:
    """The first tokens of the words of each name (`card_arrival`, `CardArrival`), with a space and without."""
    words = [_WORDS.findall(name) for name in names]
    flat = [text for found in words for word in found for text in (space + word for space in prompt.spaces)]
    tokens = iter(_tokens_after(tokenizer, prompt.ending, flat))
    return [plain.only([token for _ in range(2 * len(found)) for token in next(tokens)[:1]]) for found in words]


class _PlainTokens:
    """Tokens that can stand for a label: they have a letter or digit, and are neither special nor unknown."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special}
        self.barred = special | set(tokenizer.all_special_ids) | {tokenizer.unk_token_id}

    def text(self, token: int) -> str:
        """What the token says, with the space that many tokenizers put before a word."""
        name = _names(self.tokenizer, [token])[0]
        return " " * (name[:1] in "Ġ▁" and bool(name)) + str(self.tokenizer.decode([token])).strip()

    def only(self, tokens: Sequence[int]) -> list[int]:
        """Those that can be used, each once."""
        return [token for token in dict.fromkeys(tokens) if self._usable(token)]

    def _usable(self, token: int) -> bool:
        return token not in self.barred and any(sign.isalnum() for sign in str(self.tokenizer.decode([token])))

    def reserve(self, taken: set[int]) -> Iterator[int]:
        """Further tokens, in the order of the vocabulary, which in most puts the frequent ones first."""
        return (token for token in range(len(self.tokenizer)) if token not in taken and self._usable(token))
