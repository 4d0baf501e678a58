"""Rows of tokens → tensors → answer logits: what a text backend asks of the model, with padding and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.errors import UserError
from ..core.outputs import Outputs, evaluating, option_rows, repeat_rows, to_device
from ..methods import Method
from .packing import layout as packing
from .packing.decoder_layers import compile_blocks, unwrapped
from .packing.frozen_layers import TrunkCache
from .packing.self_check import PackedReading, read_packed


class PromptReader:
    """The part of `TextBackend` that meets the model."""

    tokenizer: Any
    method: Method
    packing: PackedReading
    trunk: TrunkCache | None = None
    width: int
    evidence_offset: float
    _takes_positions: bool

    def _token_ids(self, width: int) -> list[int]:
        raise NotImplementedError

    def read(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Outputs:
        """One forward pass; logits are `[B, method.num_outputs(width)]` in float32, the answers' with the offset."""
        if "packed" in inputs and self.packing.works(model, self._padded_rows(model), self._token_ids(2)):
            logits = self._read_packed(model, inputs["packed"]).float()
        else:
            logits = read_padded(model, inputs).float()
        if logits.shape[-1] == self.width:
            return Outputs(logits=logits + self.evidence_offset)
        answers, rest = logits.split([self.width, logits.shape[-1] - self.width], dim=-1)
        return Outputs(logits=torch.cat([answers + self.evidence_offset, rest], dim=-1))

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """
        Left-padded tensors of prepared rows, and how to compute them without padding (`packed`).

        `option_rows` says which rows offer how many options: known here on the host, so that no step has to wait for
        the device to tell.
        """
        longest = max(len(row["input_ids"]) for row in rows)
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.full((len(rows), longest), pad, dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for i, row in enumerate(rows):
            tokens = torch.as_tensor(row["input_ids"], dtype=torch.long)
            ids[i, longest - len(tokens) :] = tokens
            mask[i, longest - len(tokens) :] = 1
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if self._takes_positions:  # a padded row must start at 0, or models with absolute positions see it shifted
            batch["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
        for key in ("labels", "num_options", "row"):
            if key in rows[0]:
                batch[key] = torch.as_tensor([row[key] for row in rows])
        if "num_options" in rows[0]:
            batch["option_rows"] = option_rows([row["num_options"] for row in rows])
        if self.packing.wanted:
            batch["packed"] = self._layout([row["input_ids"] for row in rows], self.packing.share)
            if self.method.passes > 1:
                batch["packed"]["rows"] = [list(row["input_ids"]) for row in rows]
        return batch

    def repeated(self, inputs: Mapping[str, Any], times: int) -> dict[str, Any]:
        """A batch several times over, for stochastic passes: rows that shared tokens would share dropout masks."""
        found = repeat_rows({key: value for key, value in inputs.items() if key != "packed"}, times)
        rows = inputs.get("packed", {}).get("rows")
        if rows is not None:
            found["packed"] = to_device(self._layout(rows * times, share=False), inputs["input_ids"].device)
        return found

    def _layout(self, rows: Sequence[Sequence[int]], share: bool) -> dict[str, Any]:
        plan = packing.layout(rows, share)
        if self.trunk is not None:
            plan["trunk"] = self.trunk.states(rows, plan)
        return plan

    def row_keys(self, prepared: Any) -> list[bytes]:
        """What each prepared row says; sorted, rows with the same beginning are neighbours."""
        return [np.asarray(ids, dtype=">u4").tobytes() for ids in prepared["input_ids"]]

    def use_trunk(self, model: nn.Module, folder: str) -> None:
        """Keep what the frozen lower layers make of each prompt in a folder, and start above them from now on."""
        if not self.packing.works(model, self._padded_rows(model), self._token_ids(2)):
            raise UserError("train.trunk_cache: this model cannot be read in packed batches, which the cache needs")
        self.trunk = TrunkCache(model, folder)
        a, b = self._token_ids(2)
        rows = [[a, b, b, a], [a, b, a]]
        with torch.no_grad(), evaluating(model):
            batch = to_device(self.collate([{"input_ids": row} for row in rows]), next(model.parameters()).device)
            whole, started = read_packed(model, batch["packed"]), self._read_packed(model, batch["packed"])
        if not torch.allclose(whole, started, rtol=1e-3, atol=1e-3 * (1 + whole.abs().max().item())):
            raise UserError(f"train.trunk_cache: {type(unwrapped(model)).__name__} does not work from its middle")

    @property
    def compiles_blocks(self) -> bool:
        """Whether packed batches are read, which a model compiled as a whole would be compiled for again and again."""
        return self.packing.wanted

    def compile_blocks(self, model: nn.Module, **options: Any) -> None:
        """Compile the parts of a model that packed batches leave alone; see [`layers.compile_blocks`]."""
        if not compile_blocks(model, **options):
            raise UserError(
                f"train.torch_compile: {type(unwrapped(model)).__name__} has no norms or feed-forward blocks that can "
                "be found; with train.packing: false it is compiled as a whole"
            )

    def _read_packed(self, model: nn.Module, plan: Mapping[str, Any]) -> Tensor:
        if self.trunk is None or "trunk" not in plan:
            return self.packing.read(model, plan)
        with self.trunk.feeding(plan["trunk"]):
            return self.packing.read(model, plan)

    def _padded_rows(self, model: nn.Module) -> Callable[[list[list[int]]], Tensor]:
        def read(rows: list[list[int]]) -> Tensor:
            batch = self.collate([{"input_ids": row} for row in rows])
            return read_padded(model, to_device(batch, next(model.parameters()).device))

        return read


def read_padded(model: nn.Module, inputs: Mapping[str, Tensor], **kwargs: Any) -> Tensor:
    """Logits `[B, C]` of a left-padded batch; `kwargs` are the model's own."""
    model_inputs = {key: inputs[key] for key in ("input_ids", "attention_mask", "position_ids") if key in inputs}
    return model(**model_inputs, logits_to_keep=1, use_cache=False, **kwargs).logits[:, -1]
