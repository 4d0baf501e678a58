"""
Packed batches with shared prefixes: no padding, and no prefix of a prompt computed twice.

The rows of a batch are sorted and concatenated into one sequence; each row keeps only the tokens after the prefix that
it shares with the row before it. An instruction common to all prompts, a question asked with several options, or a
repeated prompt is then computed once. Token-wise layers, nearly all of a model's work, process just these tokens. In
attention, the queries are a row's own tokens and the keys its whole prompt, gathered by index; autograd sums the
gradients of shared tokens.

`layout` makes the index tensors on the host; the model passes them on to its attention function as one more keyword
argument, and the functions of `attention.py` read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

# Padding inside attention, in scores per head, that costs about as much as one more group of rows.
_WASTE = {"cpu": 1 << 13, "cuda": 1 << 20}


def layout(
    rows: Sequence[Sequence[int]],
    share: bool = True,
    waste: int | None = None,
    chosen: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """
    Where each token of a batch is computed, and what it attends to.

    Args:
        rows (`Sequence[Sequence[int]]`):
            Token ids of each row, none of them empty.
        share (`bool`, *optional*, defaults to `True`):
            Compute common beginnings once. Without it rows are only freed of padding, which is what several
            stochastic passes need: their dropout masks must not be the same in all rows.
        waste (`int`, *optional*):
            Padding inside attention that is accepted before rows are split into groups of similar length.
        chosen (`Sequence[Sequence[int]]`, *optional*):
            Numbers of some tokens of each row, whose packed places are asked for.

    Returns:
        `dict`: `input_ids` and `position_ids` `[1, N]`, `last` `[B]` (where each row's answer is read; `ends`:
        each place once), `put` `[N]` and `groups`, what attention needs, and `owners`, from which row and which of its
        tokens each stretch is. With `chosen` also `content`: their packed places (`tokens`), and each row's `offsets`.
    """
    tokens, positions, paths, segments, owners = _merge(rows, share)
    last = [path[-1] for path in paths]
    groups = []
    placed: list[int] = []  # packed index of every slot of all groups, in their order; -1 for padding
    for group in _group(segments, _default_waste() if waste is None else waste):
        width = max(len(new) for new, _ in group)
        longest = max(len(path) for _, path in group)
        take = [[*new, *[0] * (width - len(new))] for new, _ in group]
        keys = [[*path, *[0] * (longest - len(path))] for _, path in group]
        # Padding queries attend to all keys: their outputs are dropped, and a softmax over no key would be NaN.
        seen = [[*range(len(p) - len(n), len(p)), *[longest - 1] * (width - len(n))] for n, p in group]
        for new, _ in group:
            placed += [*new, *[-1] * (width - len(new))]
        groups.append(
            {
                "take": torch.tensor(take),
                "keys": torch.tensor(keys),
                "seen": torch.tensor(seen),
                "lengths": [(len(new), len(path)) for new, path in group],
            }
        )
    put = [0] * len(tokens)
    for slot, token in enumerate(placed):
        if token >= 0:
            put[token] = slot
    return {
        "input_ids": torch.tensor([tokens]),
        "position_ids": torch.tensor([positions]),
        "last": torch.tensor(last),
        "ends": torch.tensor(sorted(set(last))),
        "put": torch.tensor(put),
        "groups": groups,
        "owners": owners,
        **({} if chosen is None else {"content": flat_index(paths, chosen)}),
    }


def flat_index(places: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """
    Some tokens of each row in a flattened batch, as `embedding_bag` takes them.

    Args:
        places (`Sequence[Sequence[int]]`):
            Where each token of each row is.
        chosen (`Sequence[Sequence[int]]`):
            Numbers of the tokens that are meant.
    """
    tokens = [path[token] for path, own in zip(places, chosen, strict=True) for token in own]
    starts = [0, *itertools.accumulate(map(len, chosen))][:-1]
    return {"tokens": torch.tensor(tokens), "offsets": torch.tensor(starts)}


def _default_waste() -> int:
    return _WASTE["cuda" if torch.accelerator.is_available() else "cpu"]


_Segment = tuple[list[int], list[int]]  # packed indices of a row's own tokens, and of all tokens up to its end


def _merge(rows: Sequence[Sequence[int]], share: bool) -> tuple[Any, ...]:
    """
    Tokens without repeats, their positions, where each token of each row is, the segments that attention works on, and
    from where in which row each segment is.
    """
    lists = [list(row) for row in rows]
    order = sorted(range(len(rows)), key=lists.__getitem__) if share else list(range(len(rows)))
    common = _common(lists[order[0]], lists[order[-1]]) if share and len(rows) > 1 else 0
    tokens: list[int] = []
    positions: list[int] = []
    paths: list[list[int]] = [[]] * len(rows)
    segments: list[_Segment] = []
    owners: list[tuple[int, int, int]] = []
    path: list[int] = []
    before: list[int] = []

    def add(number: int, start: int, end: int) -> None:
        nonlocal path
        row = lists[number]
        new = list(range(len(tokens), len(tokens) + end - start))
        tokens.extend(row[start:end])
        positions.extend(range(start, end))
        path = path[:start] + new
        segments.append((new, path))
        owners.append((number, start, end))

    if common:  # its own segment; within the first row it would make that row longer than the others
        add(order[0], 0, common)
        before = lists[order[0]][:common]
    for number in order:
        row = lists[number]
        start = _common(before, row) if share else 0
        if start < len(row):
            add(number, start, len(row))
        paths[number] = path[: len(row)]
        before = row
    return tokens, positions, paths, segments, owners


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two rows begin with alike."""
    for count, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return count
    return min(len(one), len(other))


def _group(segments: list[_Segment], waste: int) -> list[list[_Segment]]:
    """Segments of similar size together: attention pads within a group only."""
    ordered = sorted(segments, key=lambda segment: (len(segment[0]), len(segment[1])), reverse=True)
    groups: list[list[_Segment]] = []
    left = width = longest = 0
    for segment in ordered:
        size = len(segment[0]) * len(segment[1])
        grown = max(longest, len(segment[1]))
        extra = width * grown - size + (grown - longest) * width * len(groups[-1] if groups else ())
        if not groups or extra > left:
            groups.append([])
            left, width, longest = waste, len(segment[0]), len(segment[1])
            grown, extra = longest, 0
        left, longest = left - extra, grown
        groups[-1].append(segment)
    return groups
