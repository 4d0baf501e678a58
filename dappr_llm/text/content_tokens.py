"""
Which tokens of a prompt say what was asked: the question and its options, or the text to classify.

The template's constant words, instructions, chat templates and letters are the same in every prompt and say nothing of
a row. Neither does the first token of a row, whatever it is: models use it as an attention sink, and its state is many
times larger than any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from .special_tokens import Encoded, Piece


def content_spans(encoded: Encoded, pieces: Sequence[Piece], content: Sequence[bool]) -> list[int]:
    """
    Stretches of tokens as a flat list `[start, end, start, end, …]`.

    A token counts if one of its characters does. Where nothing does, and where the tokenizer does not say which
    characters a token is made of, it is every token but the first.

    Args:
        encoded ([`Encoded`]):
            The prompt's tokens.
        pieces (`Sequence`):
            Its pieces, in order.
        content (`Sequence[bool]`):
            Which of the pieces count, from `Prompt.content`.
    """
    if encoded.offsets is None:
        return every_token(len(encoded.ids))
    stretches: list[tuple[int, int]] = []
    place = 0
    for (text, _), counts in zip(pieces, content, strict=True):
        if counts and text:
            stretches.append((place, place + len(text)))
        place += len(text)
    spans: list[int] = []
    current = 0
    for token, (start, end) in enumerate(encoded.offsets):
        while current < len(stretches) and stretches[current][1] <= start:
            current += 1
        if token == 0 or end <= start or current == len(stretches) or end <= stretches[current][0]:
            continue
        if spans and spans[-1] == token:
            spans[-1] = token + 1
        else:
            spans += [token, token + 1]
    return spans or every_token(len(encoded.ids))


def every_token(count: int) -> list[int]:
    """Every token of a row but the first; of a row of one token this one."""
    return [min(1, count - 1), count]


def count_tokens(spans: Sequence[int]) -> int:
    """How many tokens spans hold."""
    return sum(spans[1::2]) - sum(spans[::2])


def positions(spans: Sequence[int]) -> list[int]:
    """The token numbers of spans."""
    return [token for start, end in zip(spans[::2], spans[1::2], strict=True) for token in range(start, end)]
