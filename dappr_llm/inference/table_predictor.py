"""
The one engine that predicts: rows in, prediction tables (or predictions of a batch) out.

Trainer, pipeline, ensemble, audit and commands share it. It needs a model, a method and a backend; no `Trainer`, no
output folder. With an `Accelerator` of several processes, batches are shared out over the ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..core import checkpoint
from ..core.backend import Backend, Batch, Row, evaluating, to_device
from ..core.errors import UserError
from ..core.outputs import Gathered, Outputs, Prediction, as_outputs, map_values
from ..core.terminal import printable
from ..evaluation.prediction_table import PredictionTable
from ..methods import Method, name_of
from .batching import JoinedRows, RowSet, token_batches
from .finite_predictions import finite_prediction
from .stochastic_passes import read_passes, seeded

if TYPE_CHECKING:
    from accelerate import Accelerator

_FEATURES = "hidden_states"
MOST_LOGITS = 100_000_000  # values of a table, 400 MB; larger tables are written without logits


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


class TablePredictor:
    """
    Predicts rows with a model.

    Args:
        model (`nn.Module`):
            The model, on its device.
        method (`Method`):
            What its outputs mean.
        backend (`Backend`):
            What turns rows into batches and batches into outputs.
        accelerator (`Accelerator`, *optional*):
            Shares batches out over its processes and applies its mixed precision.
        settings (`PredictionSettings`, *optional*):
            Batch sizes and seed.
        method_name (`str`, *optional*):
            What tables call the method; by default its name in `METHODS`.

    Example:

    ```python
    >>> run = load_checkpoint("runs/quickstart")
    >>> table = TablePredictor(run.model, run.method, run.backend).predict_table(rows, task="mine")
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        backend: Backend,
        accelerator: Accelerator | None = None,
        settings: PredictionSettings | None = None,
        method_name: str | None = None,
    ):
        self.model, self.method, self.backend = model, method, backend
        self.accelerator = accelerator
        self.settings = settings or PredictionSettings()
        self.method_name = method_name

    # --- one batch ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict_batch(self, rows: Sequence[Row], width: int, ids: Sequence[str] | None = None) -> Prediction:
        """
        What the method says about one batch of encoded rows, on the CPU. Safe to call from several threads.

        Args:
            rows (`Sequence[Mapping]`):
                From the backend's `encode` or `prepare`.
            width (`int`):
                How many options each of them offers.
            ids (`Sequence[str]`, *optional*):
                What errors call the rows; by default their `id`, or their number in the batch.
        """
        # A single row has nothing to pad and nothing to share.
        batch: Batch = self.backend.collate(rows, pack=len(rows) > 1)
        if self.device.type != "cpu":
            batch = to_device(batch, self.device)
        if self.method.passes == 1:
            found = self.backend.read(self.model, batch, width).gathered()
        else:
            with seeded(0):
                found = read_passes(self.backend, self.model, batch, self.method.passes, width)
        outputs = as_outputs(map_values(found, lambda value: value.cpu()))
        return finite_prediction(self.method, outputs, ids or [row.get("id", i) for i, row in enumerate(rows)])

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self.accelerator.device if self.accelerator is not None else next(self.model.parameters()).device

    # --- whole datasets -------------------------------------------------------------------------------------------

    def predict_table(self, dataset: Any, task: str = "", split: str = "", **meta: Any) -> PredictionTable:
        """
        Predictions for every row of a dataset; never computes a loss, so labels may be missing or out of range.

        Args:
            dataset (`Dataset` or `list[dict]`):
                Rows of any layout that training accepts.
            task, split (`str`, *optional*):
                Written into the table.
            meta:
                More entries for the table's meta data.
        """
        return self.predict_tables([RowSet(dataset, task, split, meta)])[0]

    def predict_tables(self, sets: Sequence[RowSet]) -> list[PredictionTable]:
        """
        Tables of several datasets from one pass: equal rows are computed once, rows with a common prefix together.

        Args:
            sets (`Sequence[RowSet]`):
                The rows, and the names of their tables.
        """
        if not sets:
            return []
        prepared = [self.backend.prepare(each.rows, labelled=False, name=each.task or "dataset") for each in sets]
        most = [int(np.max(rows["num_options"])) for rows in prepared]
        asked = [each.meta.get("task_num_choices") or count for each, count in zip(sets, most, strict=True)]
        trained = self.backend.num_choices or 0
        widths = [max(trained, *pair) for pair in zip(asked, most, strict=True)]
        found = self._read_sets(prepared, max(widths), ", ".join(each.task for each in sets))
        tables = []
        for each, rows, part, width, choices in zip(sets, prepared, found, widths, asked, strict=True):
            meta = {"task": each.task, "split": each.split, "seed": self.settings.seed, **each.meta}
            meta["task_num_choices"] = choices
            outputs = as_outputs(part).narrow(max(widths), width)
            labels, counts = np.asarray(rows["labels"]), np.asarray(rows["num_options"])
            tables.append(self.table(outputs, labels, counts, list(rows["id"]), meta, _lengths(rows)))
        return tables

    def hidden_states(self, dataset: Any, name: str = "dataset") -> tuple[Tensor, Tensor]:
        """
        The states `[N, D]` that each row's answer is read from, and the labels `[N]`, on the CPU.

        Args:
            dataset (`Dataset` or `list[dict]`):
                Rows of any layout that training accepts, or prepared ones.
            name (`str`, *optional*, defaults to `"dataset"`):
                What error messages call it.
        """
        prepared = self.backend.prepare(dataset, labelled=False, name=name)
        (found,) = self._read_sets([prepared], self.backend.num_choices or 2, name, hidden_states=True)
        return torch.as_tensor(found[_FEATURES]), torch.as_tensor(np.asarray(prepared["labels"]))

    def table(
        self,
        found: Outputs,
        labels: np.ndarray,
        num_options: np.ndarray,
        ids: Sequence[str],
        meta: Mapping[str, Any] | None = None,
        arrays: Mapping[str, Any] | None = None,
    ) -> PredictionTable:
        """
        A prediction table from outputs that were gathered before.

        Args:
            found (`Outputs`):
                Of all rows, on the CPU.
            labels, num_options (`np.ndarray` of shape `[N]`):
                Label (-1: unknown) and number of options of each row.
            ids (`Sequence[str]`):
                The rows' ids.
            meta (`Mapping`, *optional*):
                More entries for the table's meta data.
            arrays (`Mapping[str, np.ndarray]`, *optional*):
                More of the table's arrays, by name, such as `lengths` and `density`.
        """
        prediction = finite_prediction(self.method, found, ids)
        facts = {
            "modality": self.backend.modality,
            "method": self.method_name or name_of(self.method),
            "options": self.method.options(),
            "num_choices": self.backend.num_choices,
            "task_num_choices": self.backend.num_choices,
            "epistemic_scale": self.method.epistemic_scale,
            "versions": checkpoint.versions(),
            **self.backend.table_facts,
            **(meta or {}),
        }
        table = PredictionTable.from_arrays(
            ids=list(ids),
            labels=labels,
            num_options=num_options,
            probs=prediction.probs.numpy(),
            alpha=None if prediction.alpha is None else prediction.alpha.numpy(),
            members=None if prediction.members is None else prediction.members.numpy(),
            meta=facts,
            logits=_class_logits(found, *prediction.probs.shape),
            **(arrays or {}),
        )
        return _with_own_uncertainties(table, prediction)

    # --- batches --------------------------------------------------------------------------------------------------

    def _read_sets(
        self, prepared: list[Any], width: int, description: str, hidden_states: bool = False
    ) -> list[dict[str, np.ndarray] | np.ndarray]:
        """Outputs of the rows of each dataset, in their order."""
        keys = [self.backend.row_keys(rows) for rows in prepared]
        if any(part is None for part in keys):
            return [self._read(rows, None, width, description, hidden_states) for rows in prepared]
        lengths = [list(rows["length"]) for rows in prepared]
        several = self.method.passes > 1  # stochastic passes of equal rows differ, and share nothing
        joined = JoinedRows(
            prepared,
            keys,  # type: ignore[arg-type]
            lengths,
            join=not several,
            longest_first=several or not self.backend.packs or not self.settings.max_tokens,
        )
        everything = self._read(joined, joined.lengths, width, description, hidden_states)
        places = np.split(np.asarray(joined.inverse), np.cumsum([len(rows) for rows in prepared])[:-1])
        return [map_values(everything, operator.itemgetter(own)) for own in places]

    def _batches(self, count: int, lengths: Sequence[int] | None) -> list[list[int]]:
        settings = self.settings
        if lengths is not None and settings.max_tokens:
            longest = settings.batch_size * (self.backend.max_length or max(lengths))
            return token_batches(lengths, min(settings.max_tokens, longest))
        return [list(range(i, min(i + settings.batch_size, count))) for i in range(0, count, settings.batch_size)]

    def _read(
        self, rows: Any, lengths: Sequence[int] | None, width: int, description: str, hidden_states: bool
    ) -> Any:
        """Outputs of every row as arrays, in order; each rank computes its share and gets all of them."""
        rank, world = (self.accelerator.process_index, self.accelerator.num_processes) if self.accelerator else (0, 1)
        batches = self._batches(len(rows), lengths)
        own = batches[rank::world]
        if len(own) < -(-len(batches) // world):  # sharded models need as many forward passes on every rank
            own.append(batches[0])
        passes = 1 if hidden_states else self.method.passes
        loader = DataLoader(
            rows,
            batch_sampler=own,  # type: ignore[arg-type]
            collate_fn=self.backend.collate,
            num_workers=self.settings.num_workers,
            pin_memory=self.settings.pin_memory,
            # A loader draws a seed for its workers: without one of its own, training would notice.
            generator=torch.Generator() if passes == 1 else None,
        )
        with seeded(self.settings.seed + rank) if passes > 1 else nullcontext(), self._evaluating():
            parts = [
                map_values(self._read_batch(batch, passes, width, hidden_states), _numpy)
                for batch in self._with_progress(loader, description)
            ]
        return _in_order(_gather((own, parts), world), len(rows))

    @torch.no_grad()
    def _read_batch(self, batch: Batch, passes: int, width: int, hidden_states: bool) -> Gathered:
        with self.accelerator.autocast() if self.accelerator is not None else nullcontext():
            batch = to_device(batch, self.device)
            if not hidden_states:
                return read_passes(self.backend, self.model, batch, passes, width)
            found = self.backend.read(self.model, batch, width, hidden_states=True)
        if found.features is None:
            raise UserError(f"{type(self.model).__name__} gives no hidden states")
        return {_FEATURES: found.features}

    def _evaluating(self) -> Any:
        return evaluating(self.model) if self.model.training else nullcontext()

    def _with_progress(self, loader: DataLoader, description: str) -> Iterator[Any]:
        from tqdm.auto import tqdm

        shown = self.settings.progress
        main = self.accelerator is None or self.accelerator.is_main_process
        disable = True if shown is False or not main or len(loader) < 2 else (None if shown is None else False)
        named = printable(f"Predicting {description}".strip(), one_line=True)
        return iter(tqdm(loader, desc=named, unit="batch", disable=disable))


# --- gathering -----------------------------------------------------------------------------------------------------


def _numpy(value: Tensor) -> np.ndarray:
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).cpu().numpy()


def _gather(part: tuple[list[list[int]], list[Any]], world: int) -> list[tuple[list[list[int]], list[Any]]]:
    """Row numbers and outputs of every rank."""
    if world == 1:
        return [part]
    parts: list[Any] = [None] * world
    torch.distributed.all_gather_object(parts, part)
    return parts


def _in_order(parts: list[tuple[list[list[int]], list[Any]]], count: int) -> Any:
    """Outputs of all batches joined, in the order of the rows; repeated batches count once."""
    rows = np.concatenate([row for own, _ in parts for row in own])
    outputs = [output for _, found in parts for output in found]
    order = np.unique(rows, return_index=True)[1]
    assert len(order) == count, "every row is in a batch"
    if isinstance(outputs[0], Mapping):
        return {key: np.concatenate([each[key] for each in outputs])[order] for key in outputs[0]}
    return np.concatenate(outputs)[order]


def _lengths(prepared: Any) -> dict[str, np.ndarray]:
    """Tokens of each row's question and options, where the backend counted them."""
    names = {"lengths": "text_length", "option_lengths": "option_length"}
    columns = set(getattr(prepared, "column_names", ()))
    if not columns.issuperset(names.values()):
        return {}
    return {name: np.asarray(prepared[column], dtype=np.int64) for name, column in names.items()}


def _class_logits(found: Outputs, rows: int, width: int) -> np.ndarray | None:
    """Logits `[N, W]` of the classes, of several passes their mean; `None` without logits, or if they are too many."""
    if found.logits is None or found.logits.shape[-1] < width or rows * width > MOST_LOGITS:
        return None
    logits = found.logits[..., :width]
    return (logits if logits.dim() == 2 else logits.mean(1)).numpy()


def _with_own_uncertainties(table: PredictionTable, prediction: Prediction) -> PredictionTable:
    """
    Keep what a table cannot work out from probabilities and alpha, DUQ's distance for one.

    What it can, it does better: in float64, where 1 - max p still tells confident rows apart.
    """
    if (table.num_options != table.width).any():  # read on fewer letters than the prediction was
        return table
    for name in ("aleatoric", "epistemic"):
        own = prediction[name].numpy()  # type: ignore[union-attr]
        if not np.allclose(own, getattr(table, name), rtol=1e-3, atol=1e-4, equal_nan=True):
            setattr(table, name, own.astype(np.float32))
    return table
