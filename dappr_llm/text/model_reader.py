"""Rows of tokens → tensors → answer logits: the one place where a text batch meets the model."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.backend import evaluating, option_rows, repeat_rows, to_device
from ..core.errors import UserError
from .content_tokens import every_token, positions
from .forward_call import CURRENT, ForwardCall
from .packing.attention import KEYWORD, prepare_packing
from .packing.frozen_layers import FrozenLayers
from .packing.layers import compile_blocks, unwrapped
from .packing.layout import flat_index, layout
from .pooled_states import Pooling, watch_layers

_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")


class ModelReader:
    """
    Collates token rows and reads the logits of each, with padding or packed.

    Args:
        model (`nn.Module`):
            A causal LM or sequence classifier, with an adapter or not.
        pad_token_id (`int`):
            For padded batches, whose result does not depend on it.
        check_tokens (`Sequence[int]`):
            Two token ids from which the packing check makes its rows.
        check_call (`Callable[[torch.device], ForwardCall]`):
            A fresh call that reads whatever the readout does, for that check.
        causal (`bool`, *optional*, defaults to `True`):
            Whether rows are padded on the left and read at their last token, packed if possible; otherwise they are
            padded on the right, and the model pools them.
        packing (`bool`, *optional*, defaults to `True`):
            Compute batches without padding, where the model allows it.
        share_prefix (`bool`, *optional*, defaults to `True`):
            In packed batches, compute common prefixes once.
    """

    def __init__(
        self,
        model: nn.Module,
        pad_token_id: int,
        check_tokens: Sequence[int],
        check_call: Callable[[torch.device], ForwardCall],
        causal: bool = True,
        packing: bool = True,
        share_prefix: bool = True,
    ):
        forward = model.get_base_model().forward if hasattr(model, "get_base_model") else model.forward
        # Encoders count positions by themselves, from the left, and each in a way of its own.
        self.takes_positions = causal and "position_ids" in inspect.signature(forward).parameters
        self.pad_token_id = pad_token_id
        self.check_tokens = list(check_tokens)
        self.causal, self._check_call = causal, check_call
        self.share_prefix = share_prefix
        self.packing = packing and self.takes_positions  # until the check says that this model cannot be packed
        self._checked = self._watches = False
        self._lock = threading.Lock()
        self.frozen: FrozenLayers | None = None

    # --- collating ------------------------------------------------------------------------------------------------

    def collate(
        self, rows: Sequence[Mapping[str, Any]], pack: bool = True, keep_rows: bool = False, gate: bool = False
    ) -> dict[str, Any]:
        """
        Padded tensors of prepared rows and, if asked, the layout of the packed batch (`packed`).

        `option_rows`, which training needs, says which rows offer how many options. It is made here on the host, so
        that no step has to wait for the device.

        Args:
            rows (`Sequence[Mapping]`):
                With `input_ids`, and where they are known `labels`, `num_options` and `row`.
            pack (`bool`, *optional*, defaults to `True`):
                Whether to lay out a packed batch; `False` for a single prompt, which has nothing to pad or share.
            keep_rows (`bool`, *optional*, defaults to `False`):
                Keep the token rows, from which `repeated` lays out several stochastic passes.
            gate (`bool`, *optional*, defaults to `False`):
                Say where the content tokens are, whose states are pooled.
        """
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), longest), self.pad_token_id, dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for i, row in enumerate(rows):
            tokens = torch.as_tensor(row["input_ids"], dtype=torch.long)
            place = slice(longest - len(tokens), longest) if self.causal else slice(len(tokens))
            ids[i, place] = tokens
            mask[i, place] = 1
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if self.takes_positions:  # a padded row must start at 0, or models with absolute positions see it shifted
            batch["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
        for key in ("labels", "num_options", "row"):
            if key in rows[0]:
                batch[key] = torch.as_tensor([row[key] for row in rows])
        if "num_options" in rows[0] and pack:
            batch["option_rows"] = option_rows([row["num_options"] for row in rows])
        content = (
            [positions(row.get("content") or every_token(len(row["input_ids"]))) for row in rows] if gate else None
        )
        if content is not None:
            starts = [i * longest for i in range(len(rows))]
            if self.causal:  # padded on the left
                starts = [start + longest - len(row["input_ids"]) for start, row in zip(starts, rows, strict=True)]
            batch["content"] = flat_index([range(start, start + longest) for start in starts], content)
        if self.packing and (pack or (self.frozen is not None and not gate)):
            batch["packed"] = self._layout([row["input_ids"] for row in rows], self.share_prefix, content)
            if keep_rows:
                batch["packed"]["rows"] = [list(row["input_ids"]) for row in rows]
        return batch

    def repeated(self, inputs: Mapping[str, Any], times: int) -> dict[str, Any]:
        """A batch several times over, for stochastic passes: rows that shared tokens would share dropout masks."""
        found = repeat_rows({key: value for key, value in inputs.items() if key not in ("packed", "content")}, times)
        rows = inputs.get("packed", {}).get("rows")
        if rows is not None:
            found["packed"] = to_device(self._layout(rows * times, share=False), inputs["input_ids"].device)
        return found

    def _layout(
        self, rows: Sequence[Sequence[int]], share: bool, content: Sequence[Sequence[int]] | None = None
    ) -> dict[str, Any]:
        plan = layout(rows, share, chosen=content)
        if self.frozen is not None and content is None:  # the cache holds no states of lower layers to pool
            plan["trunk"] = self.frozen.states(rows, plan)
        return plan

    # --- reading --------------------------------------------------------------------------------------------------

    def read(self, model: nn.Module, inputs: Mapping[str, Any], call: ForwardCall, gate: bool = False) -> Tensor:
        """
        Logits `[B, C]` after the last token of each row; `call.hidden` then holds the states `[B, D]` behind them.

        Args:
            model (`nn.Module`):
                The model, wrapped or not.
            inputs (`Mapping`):
                From `collate`, on the model's device.
            call (`ForwardCall`):
                Which vocabulary rows to read, and with which adapters.
            gate (`bool`, *optional*, defaults to `False`):
                Pool hidden states into `call.pooling`; the batch must have been collated for it.
        """
        plan = None if call.adapters is not None else inputs.get("packed")
        packed = plan is not None and self._packs(model)
        if gate:
            with self._lock:
                if not self._watches:
                    watch_layers(model)
                    self._watches = True
            call.pooling = self._pooling(plan if packed else inputs, packed)  # type: ignore[arg-type]
        if packed:
            assert plan is not None
            return read_packed(model, plan, call)
        return read_padded(model, inputs, call)

    def _pooling(self, batch: Mapping[str, Any], packed: bool) -> Pooling:
        rows, longest = batch["input_ids"].shape
        last = None
        if self.causal:
            last = (
                batch["last"] if packed else torch.arange(1, rows + 1, device=batch["input_ids"].device) * longest - 1
            )
        return Pooling(**batch["content"], last=last)

    def _packs(self, model: nn.Module) -> bool:
        """Whether packed batches work with this model; tried once, with a few tiny rows."""
        if self._checked or not self.packing:
            return self.packing
        device = next(model.parameters()).device

        def padded(rows: list[list[int]]) -> Tensor:
            batch = self.collate([{"input_ids": row} for row in rows], pack=False)
            return read_padded(model, to_device(batch, device), self._check_call(device))

        def packed(rows: list[list[int]]) -> Tensor:
            return read_packed(model, to_device(layout(rows), device), self._check_call(device))

        with self._lock:
            if not self._checked:
                self.packing = prepare_packing(model, padded, packed, self.check_tokens)
                self._checked = True
        return self.packing

    # --- what training arguments ask for --------------------------------------------------------------------------

    def use_frozen_layers_cache(self, model: nn.Module, folder: str) -> None:
        """Keep what the frozen lower layers make of each prompt in a folder, and start above them from now on."""
        if not self._packs(model):
            raise UserError("train.trunk_cache: this model cannot be read in packed batches, which the cache needs")
        device = next(model.parameters()).device

        def read_below(plan: Mapping[str, Any]) -> Any:
            call = self._check_call(device)
            call.stop_below = True
            return read_packed(model, plan, call)

        self.frozen = FrozenLayers(model, folder, read_below)
        a, b = self.check_tokens
        rows = [[a, b, b, a], [a, b, a]]
        with torch.no_grad(), evaluating(model):
            plan = to_device(self._layout(rows, self.share_prefix), device)
            started = read_packed(model, plan, self._check_call(device))
            whole = read_packed(model, {**plan, "trunk": None}, self._check_call(device))
        if not torch.allclose(whole, started, rtol=1e-3, atol=1e-3 * (1 + whole.abs().max().item())):
            raise UserError(f"train.trunk_cache: {type(unwrapped(model)).__name__} does not work from its middle")

    def compile_blocks(self, model: nn.Module, **options: Any) -> None:
        """Compile the parts of a model that packed batches leave alone; see [`layers.compile_blocks`]."""
        if not compile_blocks(model, **options):
            raise UserError(
                f"train.torch_compile: {type(unwrapped(model)).__name__} has no norms or feed-forward blocks that can "
                "be found; with train.packing: false it is compiled as a whole"
            )


def read_padded(model: nn.Module, inputs: Mapping[str, Any], call: ForwardCall) -> Tensor:
    """Logits `[B, C]` of a padded batch."""
    given: dict[str, Any] = {key: inputs[key] for key in _MODEL_INPUTS if key in inputs}
    if call.adapters is not None:
        given["adapter_names"] = list(call.adapters)
    if call.token_ids is None:
        return _forward(model, call, **given)
    logits = _forward(model, call, **given, use_cache=False, logits_to_keep=1)[:, -1]
    call.hidden = None if call.hidden is None else call.hidden[:, -1]
    return logits


def read_packed(model: nn.Module, plan: Mapping[str, Any], call: ForwardCall) -> Tensor:
    """Logits `[B, C]` of each row of a packed batch."""
    call.positions, call.length = plan["ends"], plan["input_ids"].shape[1]
    call.states = plan.get("trunk")
    # Four dimensions: taken as a finished mask and passed on as it is. What may be seen is in the layout.
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=plan["input_ids"].device)
    given = {"input_ids": plan["input_ids"], "position_ids": plan["position_ids"], "attention_mask": mask}
    given |= {"use_cache": False, KEYWORD: plan}
    if call.token_ids is None:
        call.last = plan["last"]
        return _forward(model, call, **given)
    logits = _forward(model, call, **given, logits_to_keep=plan["last"])[0]
    call.hidden = None if call.hidden is None else call.hidden[0]
    return logits


def _forward(model: nn.Module, call: ForwardCall, **inputs: Any) -> Tensor:
    token = CURRENT.set(call)
    try:
        logits = model(**inputs).logits
    finally:
        CURRENT.reset(token)
    # `nn.DataParallel` runs the model in other threads, whose hooks see no call.
    if call.hidden is None and call.token_ids is not None:
        logits = logits[..., call.token_ids]
    return logits.float()
