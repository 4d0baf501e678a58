"""
Reading whole datasets with a model: batches of joined rows, shared out over processes, outputs in the order of rows.

[`TablePredictor`] makes tables of what is read here.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ..core.backend import Backend, Batch, evaluating, to_device
from ..core.errors import UserError
from ..core.outputs import LOGITS, Gathered, map_values
from ..core.terminal import printable
from ..methods import Method
from .batching import JoinedRows, token_batches
from .gathering import as_numpy, gather, in_order
from .stochastic_passes import read_passes, seeded

if TYPE_CHECKING:
    from accelerate import Accelerator
    from typing_extensions import Self

    from .gate import GateScorer

FEATURES, DENSITY = "hidden_states", "density"


@dataclass(frozen=True)
class PredictionSettings:
    """
    How rows are batched; changes speed only.

    Args:
        batch_size (`int`, *optional*, defaults to 16):
            Rows of a batch, where rows have no length.
        max_tokens (`int`, *optional*, defaults to 4096):
            Tokens of a batch; 0: batches of `batch_size` rows, the longest first.
        num_workers (`int`, *optional*, defaults to 0):
            Processes of the data loader.
        pin_memory (`bool`, *optional*, defaults to `False`):
            Of the data loader.
        seed (`int`, *optional*, defaults to 0):
            Of stochastic passes; each rank adds its number.
        progress (`bool`, *optional*):
            Show a bar; by default in a terminal.
    """

    batch_size: int = 16
    max_tokens: int = 4096
    num_workers: int = 0
    pin_memory: bool = False
    seed: int = 0
    progress: bool | None = None


class BatchReader:
    """
    Reads batches with a model; its arguments are those of [`TablePredictor`].
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        backend: Backend,
        accelerator: Accelerator | None = None,
        settings: PredictionSettings | None = None,
        method_name: str | None = None,
        gate: GateScorer | None = None,
    ):
        self.model, self.method, self.backend = model, method, backend
        self.accelerator = accelerator
        self.settings = settings or PredictionSettings()
        self.method_name = method_name
        self.gate = gate

    def with_gate(self, gate: GateScorer | None) -> Self:
        """The same predictor with another gate, or none."""
        other = copy.copy(self)
        other.gate = gate
        return other

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self.accelerator.device if self.accelerator is not None else next(self.model.parameters()).device

    def read_sets(
        self, prepared: list[Any], width: int, description: str, only: str | None = None
    ) -> list[dict[str, np.ndarray] | np.ndarray]:
        """
        Outputs of the rows of each dataset, in their order.

        Args:
            prepared (`list`):
                Prepared datasets.
            width (`int`):
                How many options are read.
            description (`str`):
                What the progress bar says.
            only (`str`, *optional*):
                `FEATURES` or `DENSITY`: nothing else, from one pass without dropout.
        """
        keys = [self.backend.row_keys(rows) for rows in prepared]
        if any(part is None for part in keys):
            return [self._read(rows, None, width, description, only) for rows in prepared]
        lengths = [list(rows["length"]) for rows in prepared]
        several = self.method.passes > 1 and only is None  # stochastic passes of equal rows differ, and share nothing
        joined = JoinedRows(
            prepared,
            keys,  # type: ignore[arg-type]
            lengths,
            join=not several,
            longest_first=several or not self.backend.packs or not self.settings.max_tokens,
        )
        everything = self._read(joined, joined.lengths, width, description, only)
        places = np.split(np.asarray(joined.inverse), np.cumsum([len(rows) for rows in prepared])[:-1])
        return [map_values(everything, operator.itemgetter(own)) for own in places]

    def _batches(self, count: int, lengths: Sequence[int] | None) -> list[list[int]]:
        settings = self.settings
        if lengths is not None and settings.max_tokens:
            longest = settings.batch_size * (self.backend.max_length or max(lengths))
            return token_batches(lengths, min(settings.max_tokens, longest))
        return [list(range(i, min(i + settings.batch_size, count))) for i in range(0, count, settings.batch_size)]

    def _read(self, rows: Any, lengths: Sequence[int] | None, width: int, description: str, only: str | None) -> Any:
        """Outputs of every row as arrays, in order; each rank computes its share and gets all of them."""
        passes = self.method.passes if only is None else 1

        def read(batch: Batch) -> Any:
            found = self.outputs(batch, passes, width) if only is None else self._part(batch, width, only)
            return map_values(found, as_numpy)

        own, parts = [], []
        with seeded(self.settings.seed + self._rank) if passes > 1 else nullcontext():
            gate = self.gate is not None and only != FEATURES
            for numbers, output in self._each_batch(rows, lengths, description, read, gate, passes):
                own.append(numbers)
                parts.append(output)
        return in_order(gather((own, parts), self._world), len(rows))

    def pooled_states(
        self, rows: Any, lengths: Sequence[int] | None, description: str
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """
        What the backend pools for a gate `[B, G, D]`, batch by batch with the numbers of their rows; of each process
        its own batches, none of them twice.

        Args:
            rows:
                Prepared rows.
            lengths (`Sequence[int]`, *optional*):
                Their tokens.
            description (`str`):
                What the progress bar says.
        """
        width = self.backend.num_choices or 2

        def read(batch: Batch) -> np.ndarray:
            found = self.backend.read(self.model, batch, width, gate=True).gate
            assert found is not None
            return as_numpy(found)

        last = len(self._batches(len(rows), lengths)[self._rank :: self._world])
        for number, (own, found) in enumerate(self._each_batch(rows, lengths, description, read, gate=True)):
            if number < last:
                yield own, found

    @property
    def _rank(self) -> int:
        return self.accelerator.process_index if self.accelerator else 0

    @property
    def _world(self) -> int:
        return self.accelerator.num_processes if self.accelerator else 1

    def _each_batch(
        self,
        rows: Any,
        lengths: Sequence[int] | None,
        description: str,
        read: Callable[[Batch], Any],
        gate: bool = False,
        passes: int = 1,
    ) -> Iterator[tuple[list[int], Any]]:
        """What `read` makes of this rank's batches, each with its rows; the last one may be of another rank too."""
        batches = self._batches(len(rows), lengths)
        own = batches[self._rank :: self._world]
        if len(own) < -(-len(batches) // self._world):  # sharded models need as many forward passes on every rank
            own.append(batches[0])
        loader = DataLoader(
            rows,
            batch_sampler=own,  # type: ignore[arg-type]
            collate_fn=partial(self.backend.collate, gate=True) if gate else self.backend.collate,
            num_workers=self.settings.num_workers,
            pin_memory=self.settings.pin_memory,
            # A loader draws a seed for its workers: without one of its own, training would notice.
            generator=torch.Generator() if passes == 1 else None,
        )
        with self._evaluating():
            for numbers, batch in zip(own, self._with_progress(loader, description), strict=True):
                with torch.no_grad(), self.accelerator.autocast() if self.accelerator is not None else nullcontext():
                    found = read(to_device(batch, self.device))
                yield numbers, found

    def outputs(self, batch: Batch, passes: int, width: int) -> Gathered:
        """What the method reads of a batch, and the density where there is a gate."""
        if self.gate is None:
            return read_passes(self.backend, self.model, batch, passes, width)
        # Dropout would move the states of a row: densities are those of the model without it.
        out = self.backend.read(self.model, batch, width, gate=True)
        found = out.gathered() if passes == 1 else read_passes(self.backend, self.model, batch, passes, width)
        assert out.gate is not None
        return {**(found if isinstance(found, Mapping) else {LOGITS: found}), DENSITY: self.gate(out.gate)}

    def _part(self, batch: Batch, width: int, only: str) -> Gathered:
        """The states that answers are read from, or the density, from one forward pass."""
        found = self.backend.read(self.model, batch, width, hidden_states=only == FEATURES, gate=only == DENSITY)
        if only == DENSITY and self.gate is not None and found.gate is not None:
            return {DENSITY: self.gate(found.gate)}
        if only == DENSITY or found.features is None:
            raise UserError(f"{type(self.model).__name__} gives no hidden states")
        return {FEATURES: found.features}

    def _evaluating(self) -> Any:
        return evaluating(self.model) if self.model.training else nullcontext()

    def _with_progress(self, loader: DataLoader, description: str) -> Iterator[Any]:
        from tqdm.auto import tqdm

        shown = self.settings.progress
        main = self.accelerator is None or self.accelerator.is_main_process
        disable = True if shown is False or not main or len(loader) < 2 else (None if shown is None else False)
        named = printable(f"Predicting {description}".strip(), one_line=True)
        return iter(tqdm(loader, desc=named, unit="batch", disable=disable))


def without_density(found: Any) -> tuple[Any, Any]:
    """Gathered outputs as the method reads them, and the gate's density, if there is any."""
    if not isinstance(found, Mapping) or DENSITY not in found:
        return found, None
    rest = {key: value for key, value in found.items() if key != DENSITY}
    return rest[LOGITS] if set(rest) == {LOGITS} else rest, found[DENSITY]
