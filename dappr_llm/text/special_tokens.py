"""
Token ids of prompts in which a user's text is text: a question that says `<|im_start|>` gives no control token.

The prompt template's own special tokens stay what they are. A prompt whose question and options contain none has the
ids that the tokenizer gives it as it is.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Piece = tuple[str, bool]  # a text, and whether it is the user's


class Encoded(NamedTuple):
    """Token ids of a prompt, and the characters that each is made of; `None` from tokenizers that do not say."""

    ids: list[int]
    offsets: list[tuple[int, int]] | None


# Tokenizers hold `split_special_tokens` as their state, which threads of a pipeline would change under each other.
_LOCK = threading.Lock()


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Piece]],
    names: Sequence[str],
    add_special_tokens: bool = True,
) -> list[Encoded]:
    """
    Token ids of prompts, with their places in the text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's tokenizer.
        prompts (`Sequence`):
            The pieces of each prompt in order: a text, and whether it is the user's.
        names (`Sequence[str]`):
            What each prompt is called in error messages.
        add_special_tokens (`bool`, *optional*, defaults to `True`):
            Whether the tokenizer puts its own tokens around a prompt; a chat template has written them already.
    """
    special, around = _special_tokens(tokenizer), {"add_special_tokens": add_special_tokens}
    found = _encode(tokenizer, ["".join(text for text, _ in pieces) for pieces in prompts], **around)
    own: dict[str, Counter[int]] = {}
    for i, pieces in enumerate(prompts):
        template = "\0".join(text for text, users in pieces if not users)
        if template not in own:  # equal for all prompts with as many options
            own[template] = _controls(tokenizer, special, _own_ids(tokenizer, pieces, **around))
        said = "\0".join(text for text, users in pieces if users)
        if (
            not any(token in said for token in special)
            and _controls(tokenizer, special, found[i].ids) == own[template]
        ):
            continue
        found[i] = _encode_plainly(tokenizer, pieces, special, **around)
        if _controls(tokenizer, special, found[i].ids) != own[template]:
            raise UserError(
                f"Item {names[i]!r} contains a control token of the model, such as {min(special)!r}, which this "
                f"tokenizer ({type(tokenizer).__name__}) cannot read as plain text; remove it from the item"
            )
    return found


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str], plain: bool = False, **how: Any) -> list[Any]:
    """What the tokenizer makes of texts; `plain` reads special tokens as the characters they are written with."""
    if not texts:
        return []
    if plain:
        how["split_special_tokens"] = True
    with _LOCK:
        return tokenizer(texts, **how)["input_ids"]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], plain: bool = False, **how: Any) -> list[Encoded]:
    if not texts:
        return []
    if plain:
        how["split_special_tokens"] = True
    with _LOCK:
        found = tokenizer(texts, return_offsets_mapping=bool(tokenizer.is_fast), **how)
    places = found.get("offset_mapping") or [None] * len(texts)
    return [Encoded(ids, own) for ids, own in zip(found["input_ids"], places, strict=True)]


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Id of every special token, by its text."""
    found: dict[str, int] = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=False))
    added = tokenizer.added_tokens_decoder.items()
    return {text: i for text, i in (found | {t.content: i for i, t in added if t.special}).items() if text}


def _controls(tokenizer: PreTrainedTokenizerBase, special: dict[str, int], ids: Iterable[int]) -> Counter[int]:
    """How often each control token occurs; unknown words are none."""
    controls = set(special.values()) - {tokenizer.unk_token_id}
    return Counter(i for i in ids if i in controls)


def _own_ids(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[Piece], **around: bool) -> list[int]:
    """Token ids of a prompt without the user's words; a letter takes their place, so that nothing grows together."""
    (ids,) = encode_texts(tokenizer, ["".join("x" if users else text for text, users in pieces)], **around)
    return ids


def _encode_plainly(
    tokenizer: PreTrainedTokenizerBase, pieces: Sequence[Piece], special: dict[str, int], add_special_tokens: bool
) -> Encoded:
    """A prompt cut at the template's own special tokens; all between them is read as plain text."""
    pattern = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
    chunks: list[tuple[int, str | int]] = [(0, "")]  # where each begins, and its text or token
    place = 0
    for text, users in pieces:
        for part in [text] if users else pattern.split(text):
            if not users and part in special:
                chunks += [(place, special[part]), (place + len(part), "")]
            else:
                chunks[-1] = (chunks[-1][0], str(chunks[-1][1]) + part)
            place += len(part)
    try:
        if len(chunks) == 1:
            return _encode(tokenizer, [str(chunks[0][1])], plain=True, add_special_tokens=add_special_tokens)[0]
        parts = [_encode_chunk(tokenizer, start, chunk) for start, chunk in chunks if chunk != ""]
    except ValueError:  # a tokenizer that cannot; the caller refuses what is left
        whole = "".join(text for text, _ in pieces)
        return _encode(tokenizer, [whole], add_special_tokens=add_special_tokens)[0]
    before, after = _around(tokenizer) if add_special_tokens else ([], [])
    parts = [Encoded(before, [(0, 0)] * len(before)), *parts, Encoded(after, [(0, 0)] * len(after))]
    known = all(part.offsets is not None for part in parts)
    return Encoded(
        [token for part in parts for token in part.ids],
        [each for part in parts for each in part.offsets or ()] if known else None,
    )


def _encode_chunk(tokenizer: PreTrainedTokenizerBase, start: int, chunk: str | int) -> Encoded:
    if isinstance(chunk, int):
        return Encoded([chunk], [(0, 0)])
    (found,) = _encode(tokenizer, [chunk], plain=True, add_special_tokens=False)
    if found.offsets is None:
        return found
    return Encoded(found.ids, [(start + first, start + last) for first, last in found.offsets])


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after every text, such as a token that begins it."""
    (bare,) = encode_texts(tokenizer, ["x"], add_special_tokens=False)
    (whole,) = encode_texts(tokenizer, ["x"])
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []
