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
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Piece = tuple[str, bool]  # a text, and whether it is the user's
# Tokenizers hold `split_special_tokens` as their state, which threads of a pipeline would change under each other.
_LOCK = threading.Lock()


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Piece]],
    names: Sequence[str],
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """
    Token ids of prompts.

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
    found = encode_texts(tokenizer, ["".join(text for text, _ in pieces) for pieces in prompts], **around)
    own: dict[str, Counter[int]] = {}
    for i, pieces in enumerate(prompts):
        template = "\0".join(text for text, users in pieces if not users)
        if template not in own:  # equal for all prompts with as many options
            own[template] = _controls(tokenizer, special, _own_ids(tokenizer, pieces, **around))
        said = "\0".join(text for text, users in pieces if users)
        if not any(token in said for token in special) and _controls(tokenizer, special, found[i]) == own[template]:
            continue
        found[i] = _encode_plainly(tokenizer, pieces, special, **around)
        if _controls(tokenizer, special, found[i]) != own[template]:
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
) -> list[int]:
    """Token ids of a prompt, cut at the template's own special tokens; all between them is read as plain text."""
    pattern = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
    chunks: list[str | int] = [""]
    for text, users in pieces:
        for part in [text] if users else pattern.split(text):
            if not users and part in special:
                chunks += [special[part], ""]
            else:
                chunks[-1] = str(chunks[-1]) + part
    try:
        if len(chunks) == 1:
            return encode_texts(tokenizer, [str(chunks[0])], plain=True, add_special_tokens=add_special_tokens)[0]
        ids: list[int] = []
        for chunk in chunks:
            if isinstance(chunk, int):
                ids.append(chunk)
            elif chunk:
                ids += encode_texts(tokenizer, [chunk], plain=True, add_special_tokens=False)[0]
    except ValueError:  # a tokenizer that cannot; the caller refuses what is left
        whole = "".join(text for text, _ in pieces)
        return encode_texts(tokenizer, [whole], add_special_tokens=add_special_tokens)[0]
    if not add_special_tokens:
        return ids
    before, after = _around(tokenizer)
    return before + ids + after


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after every text, such as a token that begins it."""
    (bare,) = encode_texts(tokenizer, ["x"], add_special_tokens=False)
    (whole,) = encode_texts(tokenizer, ["x"])
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []
