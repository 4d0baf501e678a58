"""
Padding-free forward passes in which no prompt token is computed twice.

The rows of a batch are laid into one row of tokens without padding, in lexicographic order, and each keeps only the
tokens that it does not share with the rows before it: the instruction that all prompts begin with, a question that is
asked with several options, a prompt that occurs twice are there once. Every token-wise layer, which is nearly all of
a model's work, sees just these tokens. Only attention has to know who belongs to whom: there each row's own tokens
look at its whole path, and gradients of shared tokens add up by themselves.

Nothing is cached or changed in the model: `layout` makes index tensors on the host, the model gets them as one more
keyword, and the attention functions registered in transformers (`sdpa` and the flash family) are extended to read it.
Called without that keyword they are what they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

KEYWORD = "packed"
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# Padding inside attention, in scores per head, that costs about as much as one more group of rows.
_WASTE = {"cpu": 1 << 13, "cuda": 1 << 20}


def layout(rows: Sequence[Sequence[int]], share: bool = True, waste: int | None = None) -> dict[str, Any]:
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

    Returns:
        `dict`: `input_ids` and `position_ids` `[1, N]`, `last` `[B]` (where each row's answer is read; `ends`:
        each place once), `put` `[N]` and `groups`, what attention needs, and `owners`, from which row and which of its
        tokens each stretch is.
    """
    tokens, positions, last, segments, owners = _merge(rows, share)
    groups = []
    placed: list[int] = []  # packed index of every slot of all groups, in their order; -1 for padding
    for group in _group(segments, _default_waste() if waste is None else waste):
        width = max(len(new) for new, _ in group)
        longest = max(len(path) for _, path in group)
        take = [[*new, *[0] * (width - len(new))] for new, _ in group]
        keys = [[*path, *[0] * (longest - len(path))] for _, path in group]
        # Padding queries look at everything: their results are dropped, and a softmax over nothing would be NaN.
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
    }


def _default_waste() -> int:
    return _WASTE["cuda" if torch.accelerator.is_available() else "cpu"]


_Segment = tuple[list[int], list[int]]  # packed indices of a row's own tokens, and of all tokens up to its end


def _merge(rows: Sequence[Sequence[int]], share: bool) -> tuple[Any, ...]:
    """
    Tokens without repeats, their positions, where each row ends, the segments that attention works on, and from
    where in which row each segment is.
    """
    lists = [list(row) for row in rows]
    order = sorted(range(len(rows)), key=lists.__getitem__) if share else list(range(len(rows)))
    common = _common(lists[order[0]], lists[order[-1]]) if share and len(rows) > 1 else 0
    tokens: list[int] = []
    positions: list[int] = []
    last = [0] * len(rows)
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

    if common:  # a segment of its own: as part of the first row it would make that one longer than the others
        add(order[0], 0, common)
        before = lists[order[0]][:common]
    for number in order:
        row = lists[number]
        start = _common(before, row) if share else 0
        if start < len(row):
            add(number, start, len(row))
        last[number] = path[len(row) - 1]
        before = row
    return tokens, positions, last, segments, owners


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


# --- attention ----------------------------------------------------------------------------------------------------


def register() -> None:
    """Extend transformers' attention functions so that they understand a layout; done once, harmless otherwise."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in ("sdpa", *_FLASH):
        function = ALL_ATTENTION_FUNCTIONS.get(name)
        if function is not None and not hasattr(function, "packs"):
            AttentionInterface.register(name, _extended(function, _flash if name in _FLASH else _sdpa))


def _extended(original: Callable[..., Any], packed_form: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        plan = kwargs.pop(KEYWORD, None)
        if plan is None:
            return original(module, query, key, value, mask, **kwargs)
        return packed_form(original, module, query, key, value, plan, **kwargs)

    attention.packs = True  # type: ignore[attr-defined]
    return attention


def _sdpa(
    original: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Mapping[str, Any],
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if softcap is not None or position_bias is not None or s_aux is not None:
        raise NotImplementedError("soft-capping, position biases and attention sinks are not read from packed rows")
    q, k, v = (states.transpose(1, 2)[0] for states in (query, key, value))  # [N, heads, D]
    found = []
    for group in plan["groups"]:
        parts = (_rows(q, group["take"]), _rows(k, group["keys"]), _rows(v, group["keys"]))
        bias = _bias(group, q.dtype, sliding_window)
        found.append(_attend(*parts, bias, dropout, scaling).flatten(0, 1))
    joined = found[0] if len(found) == 1 else torch.cat(found)
    return joined.index_select(0, plan["put"]).unsqueeze(0), None  # [1, N, heads, D]


def _rows(states: Tensor, index: Tensor) -> Tensor:
    return states.index_select(0, index.flatten()).unflatten(0, index.shape)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    dropout: float,
    scaling: float | None,
    native: bool | None = None,
) -> Tensor:
    """`[B, S, heads, D]` of queries that see `[B, L, key heads, D]`."""
    times = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
    if times == 1 or (q.device.type == "cpu" if native is None else native):
        out = nn.functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=times > 1, **options)
        return out.transpose(1, 2)
    # GPU kernels take no mask together with shared key heads: queries of one key head become one long row instead.
    width = q.shape[2]
    q = q.unflatten(1, (-1, times)).flatten(2, 3)  # [B, key heads, times * S, D]
    out = nn.functional.scaled_dot_product_attention(q, k, v, bias.repeat(1, 1, times, 1), **options)
    return out.unflatten(2, (times, width)).flatten(1, 2).transpose(1, 2)


def _bias(group: dict[str, Any], dtype: torch.dtype, window: int | None) -> Tensor:
    """What is added to the scores, `[B, 1, S, L]`; made by the first layer that asks, the same for all others."""
    key = f"bias {dtype} {window}"
    if key not in group:
        seen = group["seen"].unsqueeze(-1)  # [B, S, 1]
        place = torch.arange(group["keys"].shape[1], device=seen.device)
        hidden = place > seen
        if window is not None:
            hidden = hidden | (place <= seen - window)
        group[key] = torch.zeros(hidden.shape, dtype=dtype, device=seen.device).masked_fill_(
            hidden, torch.finfo(dtype).min
        ).unsqueeze(1)  # fmt: skip
    return group[key]


def _flash(
    original: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: dict[str, Any],
    **kwargs: Any,
) -> Any:
    """The flash family reads rows of any length end to end; queries shorter than their keys are the last ones."""
    if "flash" not in plan:
        plan["flash"] = _flash_plan(plan["groups"], query.device)
    flash = plan["flash"]
    q = query.index_select(2, flash["take"])
    k, v = (states.index_select(2, flash["keys"]) for states in (key, value))
    sizes = {name: flash[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")}
    out, weights = original(module, q, k, v, None, **{**kwargs, **sizes, "position_ids": None, "is_causal": True})
    return out.index_select(1, flash["put"]), weights


def _flash_plan(groups: Sequence[Mapping[str, Any]], device: torch.device) -> dict[str, Any]:
    lengths = [pair for group in groups for pair in group["lengths"]]
    take, keys = [], []
    for group in groups:
        for row, (new, path) in enumerate(group["lengths"]):
            take.append(group["take"][row, :new])
            keys.append(group["keys"][row, :path])
    order = torch.cat(take)

    def ends(which: int) -> Tensor:
        counts = torch.tensor([0, *(pair[which] for pair in lengths)], device=device)
        return counts.cumsum(0).to(torch.int32)

    return {
        "take": order,
        "put": torch.argsort(order),
        "keys": torch.cat(keys),
        "cu_seq_lens_q": ends(0),
        "cu_seq_lens_k": ends(1),
        "max_length_q": max(new for new, _ in lengths),
        "max_length_k": max(path for _, path in lengths),
    }
