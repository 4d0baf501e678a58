"""
Attention over packed batches, under names of our own.

`dappr_packed_sdpa` and `dappr_packed_flash_attention_*` are registered beside transformers' functions, which stay what
they are. A model of ours is given one of these names in a config of its own; no other model in the process is touched.
Called without a layout, as for padded batches, they hand over to the function they were made from. Whether a model
understands packed batches is tried once, with the model itself (`prepare_packing`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.backend import evaluating
from .layers import LastLayer, find_last_layer, unwrapped

logger = logging.getLogger(__name__)

Rows = list[list[int]]  # token ids

KEYWORD = "packed"
PREFIX = "dappr_packed_"
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_FORMS = ("sdpa", *_FLASH)


def prepare_packing(
    model: nn.Module,
    padded: Callable[[Rows], Tensor],
    packed: Callable[[Rows], Tensor],
    tokens: Sequence[int],
) -> bool:
    """
    Switch a model to packed attention, if packed batches then give what padded ones give.

    Which models do cannot be read off their names: custom attention, recurrent layers, prompt tuning and wrappers that
    split batches all stand in the way. So four tiny rows are read both ways; where the logits differ, or the model
    raises, it is switched back, every batch is computed with padding, and the log says why.

    Args:
        model (`nn.Module`):
            The model, wrapped or not.
        padded, packed (`Callable`):
            Logits of rows of token ids, computed either way.
        tokens (`Sequence[int]`):
            Two or more token ids to make rows of.
    """
    reason = _switch(model, padded, packed, tokens)
    if reason is not None:
        logger.info(f"{type(model).__name__} is computed with padding: {reason}")
    return reason is None


def _switch(
    model: nn.Module,
    padded: Callable[[Rows], Tensor],
    packed: Callable[[Rows], Tensor],
    tokens: Sequence[int],
) -> str | None:
    """Why the model was not switched; `None` if it was."""
    if isinstance(model, nn.DataParallel):
        return "DataParallel would split packed batches; start one process per device instead"
    a, b = tokens[0], tokens[1]
    rows = [[a, b, a, b, b], [a, b, a], [a, b, b, a], [a, b, a, b, b]]
    with torch.no_grad(), evaluating(model):
        wanted = padded(rows)
        undo = use_packed_attention(model)
        if undo is None:
            return "its attention function has no packed form"
        layer = find_last_layer(model)
        reason: str | None = ""
        if layer is not None:
            hooks = LastLayer(layer)
            reason = _difference(model, wanted, lambda: packed(rows))
            if reason is not None:
                hooks.remove()
        if reason is not None:  # once more with the whole last layer
            reason = _difference(model, wanted, lambda: packed(rows))
    if reason is not None:
        undo()
    return reason


def _difference(model: nn.Module, wanted: Tensor, read: Callable[[], Tensor]) -> str | None:
    """Why packed rows are not what they should be; `None` if they are."""
    try:
        found = read()
    except Exception as error:  # whatever a model does with a keyword it does not know
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if found.shape != wanted.shape:
        return f"it returned logits of shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    precise = next(model.parameters()).dtype in (torch.float32, torch.float64)
    allowed = (1e-3 if precise else 5e-2) * (1 + wanted.abs().max())
    apart = (found - wanted).abs().max()
    if not apart <= allowed:  # NaN too
        return f"packed rows came out different by {apart.item():.2g}"
    return None


def use_packed_attention(model: nn.Module) -> Callable[[], None] | None:
    """
    Switch a causal LM to the packed form of its attention function.

    The model's config is copied first: configs may be shared between models, and only this one is to change.

    Args:
        model (`nn.Module`):
            A causal LM, wrapped or with an adapter or not.

    Returns:
        `Callable`: Switches back; `None` if its attention function has no packed form.
    """
    base = unwrapped(model)
    shared = getattr(base, "config", None)
    name = getattr(shared, "_attn_implementation", None)
    if shared is None or name is None:
        return None
    if name.startswith(PREFIX):  # another backend of ours was here first
        return lambda: None
    if name not in _FORMS:
        return None
    _register(name)
    own = copy.deepcopy(shared)
    copies = {id(shared): own, id(shared.get_text_config()): own.get_text_config()}
    for config in copies.values():
        config._attn_implementation_internal = PREFIX + name
    for module in model.modules():
        config = vars(module).get("config")
        if id(config) in copies:
            module.config = copies[id(config)]

    def undo() -> None:
        for config in copies.values():
            config._attn_implementation_internal = name

    return undo


def _register(name: str) -> None:
    """Add the packed form of one attention function, and its way to make masks, to transformers' registries."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if PREFIX + name not in ALL_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
        AttentionInterface.register(PREFIX + name, _packed_form(name, ALL_ATTENTION_FUNCTIONS[name]))


def _packed_form(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    packed = packed_flash if name in _FLASH else packed_sdpa

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        plan = kwargs.pop(KEYWORD, None)
        # The flash functions look up their kernel by the name in the module's config.
        named: Any = _Renamed(module, name) if name in _FLASH else module
        if plan is None:
            return original(named, query, key, value, mask, **kwargs)
        return packed(original, named, query, key, value, plan, **kwargs)

    return attention


class _Renamed:
    """An attention module as its own attention function expects it: under transformers' name."""

    def __init__(self, wrapped: Any, name: str):
        self._wrapped, self._name = wrapped, name

    def __getattr__(self, key: str) -> Any:
        value = getattr(self._wrapped, key)
        return _RenamedConfig(value, self._name) if key == "config" else value


class _RenamedConfig:
    def __init__(self, wrapped: Any, name: str):
        self._wrapped, self._attn_implementation = wrapped, name

    def __getattr__(self, key: str) -> Any:
        return getattr(self._wrapped, key)


def packed_sdpa(
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
    """Scaled dot-product attention of a packed batch, group by group; `[1, N, heads, D]`."""
    if softcap is not None or position_bias is not None or s_aux is not None:
        raise NotImplementedError("soft-capping, position biases and attention sinks are not read from packed rows")
    q, k, v = (states.transpose(1, 2)[0] for states in (query, key, value))  # [N, heads, D]
    found = []
    for group in plan["groups"]:
        parts = (_rows(q, group["take"]), _rows(k, group["keys"]), _rows(v, group["keys"]))
        bias = _bias(group, q.dtype, sliding_window)
        found.append(attend(*parts, bias, dropout, scaling).flatten(0, 1))
    joined = found[0] if len(found) == 1 else torch.cat(found)
    return joined.index_select(0, plan["put"]).unsqueeze(0), None  # [1, N, heads, D]


def _rows(states: Tensor, index: Tensor) -> Tensor:
    return states.index_select(0, index.flatten()).unflatten(0, index.shape)


def attend(
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


def packed_flash(
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
