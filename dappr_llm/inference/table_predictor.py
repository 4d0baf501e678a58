"""
The one engine that predicts: rows in, prediction tables (or predictions of a batch) out.

Trainer, pipeline, ensemble, audit and commands share it. It needs a model, a method and a backend; no `Trainer`, no
output folder. With an `Accelerator` of several processes, batches are shared out over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import checkpoint
from ..core.backend import Batch, Row, to_device
from ..core.outputs import Outputs, Prediction, as_outputs, map_values
from ..evaluation.prediction_table import PredictionTable
from ..methods import name_of
from .batch_reader import DENSITY, FEATURES, BatchReader, PredictionSettings, without_density
from .batching import RowSet
from .finite_predictions import finite_prediction
from .stochastic_passes import seeded

__all__ = ["PredictionSettings", "TablePredictor"]

MOST_LOGITS = 100_000_000  # values of a table, 400 MB; larger tables are written without logits


class TablePredictor(BatchReader):
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
        gate (`GateScorer`, *optional*):
            Adds density and familiarity, from the same forward passes (of MC dropout from one more, without dropout).

    Example:

    ```python
    >>> run = load_checkpoint("runs/quickstart")
    >>> table = TablePredictor(run.model, run.method, run.backend).predict_table(rows, task="mine")
    ```
    """

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
        batch: Batch = self.backend.collate(rows, pack=len(rows) > 1, gate=self.gate is not None)
        if self.device.type != "cpu":
            batch = to_device(batch, self.device)
        with seeded(0) if self.method.passes > 1 else nullcontext():
            found = self.outputs(batch, self.method.passes, width)
        found, density = without_density(map_values(found, lambda value: value.cpu()))
        names = ids or [row.get("id", i) for i, row in enumerate(rows)]
        prediction = finite_prediction(self.method, as_outputs(found), names)
        if self.gate is not None:
            prediction.density = density
            known = self.gate.gate.p_values(density.numpy(), np.asarray(self.backend.content_lengths(list(rows))))
            prediction.familiarity = None if known is None else torch.from_numpy(known)
        return prediction

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
        found = self.read_sets(prepared, max(widths), ", ".join(each.task for each in sets))
        tables = []
        for each, rows, part, width, choices in zip(sets, prepared, found, widths, asked, strict=True):
            meta = {"task": each.task, "split": each.split, "seed": self.settings.seed, **each.meta}
            meta["task_num_choices"] = choices
            part, density = without_density(part)
            outputs = as_outputs(part).narrow(max(widths), width)
            labels, counts = np.asarray(rows["labels"]), np.asarray(rows["num_options"])
            tables.append(
                self.table(
                    outputs, labels, counts, list(rows["id"]), meta, {**_lengths(rows), **self._typical(density, rows)}
                )
            )
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
        (found,) = self.read_sets([prepared], self.backend.num_choices or 2, name, FEATURES)
        return torch.as_tensor(found[FEATURES]), torch.as_tensor(np.asarray(prepared["labels"]))

    def densities(self, prepared: Any, name: str = "dataset") -> np.ndarray:
        """The gate's density `[N]` of prepared rows."""
        (found,) = self.read_sets([prepared], self.backend.num_choices or 2, name, DENSITY)
        return np.asarray(found[DENSITY])  # type: ignore[call-overload]

    def _typical(self, density: Any, rows: Any) -> dict[str, np.ndarray]:
        """Density and familiarity, as arrays of a table."""
        if self.gate is None:
            return {}
        known = self.gate.gate.p_values(density, np.asarray(self.backend.content_lengths(rows)))
        return {"density": density} | ({} if known is None else {"familiarity": known})

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


# --- tables ----------------------------------------------------------------------------------------------------------


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
