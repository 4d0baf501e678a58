"""The part of `DAPPrTrainer` that predicts: what a forward pass gives is gathered, then read once by the method."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction

from ..core import checkpoint
from ..core.outputs import Outputs, Prediction, option_rows
from ..evaluation.evaluators import evaluate_id
from ..evaluation.prediction_table import PredictionTable
from ..inference.batching import JoinedRows, RowSet, token_batches
from ..inference.passes import Gathered, as_outputs, pick, read_rows, seeded
from ..methods import Method, Progress
from .evidence import evidence_summary
from .publishing import PublishingTrainer
from .samplers import FixedOrder


class PredictingTrainer(PublishingTrainer):
    """A `Trainer` that makes prediction tables."""

    backend: Any
    method: Method
    method_name: str
    compute_metrics: Any

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, Gathered, Tensor]:
        """Raw outputs and (label, row, option count) of a batch; what they mean is worked out once all are there."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            found = read_rows(self.backend, model, inputs, self.method.passes)
        labels = inputs["labels"]
        options = inputs.get("num_options")
        options = torch.full_like(labels, self.backend.num_choices) if options is None else options
        return None, found, torch.stack([labels, inputs["row"], options], dim=-1)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, with stochastic passes seeded: by the process too, so that no two rows share their masks."""
        if self.method.passes == 1:
            return super().evaluation_loop(*args, **kwargs)
        with seeded(self.args.seed + self.args.process_index):
            return super().evaluation_loop(*args, **kwargs)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        if "length" not in getattr(eval_dataset, "column_names", ()):
            return super()._get_eval_sampler(eval_dataset)
        # Longest first: hardly any padding, and a batch that does not fit fails at once. Rows are put back in order.
        lengths = np.asarray(eval_dataset["length"])
        return FixedOrder(np.argsort(-lengths, kind="stable").tolist())

    def _metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Evaluation during training: the same figures from the same tables as everywhere else."""
        found, labels, num_options, _ = _in_order(prediction.predictions, prediction.label_ids)
        # Each of several passes counts as a row of its own: the loss is their mean.
        repeats = self.method.passes
        each = found if repeats == 1 else pick(found, lambda value: value.reshape(-1, *value.shape[2:]))
        rows = [torch.from_numpy(values).repeat_interleave(repeats) for values in (labels, num_options)]
        with seeded(0):  # a loss that draws noise must not depend on when it is evaluated, nor disturb training
            groups, final = option_rows(rows[1].tolist()), Progress.final(self.progress().epochs)
            terms, extra = self._loss_terms(as_outputs(each), rows[0], groups, final)
        losses = {f"loss/{key}": value.mean().item() for key, value in terms.items()}
        metrics = {"loss": sum(losses.values()), **losses}
        metrics |= {key: value.mean().item() for key, value in extra.items()}
        table = self._table(found, labels, num_options, [str(i) for i in range(len(labels))], {})
        return metrics | evidence_summary(table, as_outputs(found)) | evaluate_id(table)

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
        Tables of several sets from one pass: rows that say the same are computed once, similar ones side by side.

        Args:
            sets (`Sequence[RowSet]`):
                The rows, and what their tables are called.
        """
        if not sets:
            return []
        prepared = [self.backend.prepare(each.rows, labelled=False, name=each.task or "dataset") for each in sets]
        most = [int(np.max(rows["num_options"])) for rows in prepared]
        asked = [each.meta.get("task_num_choices") or count for each, count in zip(sets, most, strict=True)]
        widths = [max(self.backend.num_choices, *pair) for pair in zip(asked, most, strict=True)]
        with self.backend.reading(max(widths)):
            found = self._found(prepared, [each.task for each in sets])
        tables = []
        for each, rows, part, width, choices in zip(sets, prepared, found, widths, asked, strict=True):
            meta = {"task": each.task, "split": each.split, "seed": self.args.seed, **each.meta}
            labels, counts = np.asarray(rows["labels"]), np.asarray(rows["num_options"])
            meta["task_num_choices"] = choices
            outputs = as_outputs(part).narrow(max(widths), width)
            tables.append(self._table(outputs, labels, counts, list(rows["id"]), meta))
        return tables

    def _found(self, prepared: list[Any], names: list[str]) -> list[Any]:
        """What the model says of the rows of each set, in their order."""
        if not hasattr(self.backend, "row_keys"):  # nothing to gain: each set by itself
            return [self._run(rows, name) for rows, name in zip(prepared, names, strict=True)]
        keys, lengths = ([list(values(rows)) for rows in prepared] for values in (self.backend.row_keys, _lengths))
        if self.method.passes > 1:  # passes of equal rows differ, and share nothing
            joined = JoinedRows(prepared, keys, lengths, join=False, longest_first=True)
        else:
            joined = JoinedRows(prepared, keys, lengths, longest_first=not self.backend.packing.wanted)
        everything = self._run(joined, ", ".join(names))
        places = np.split(np.asarray(joined.inverse), np.cumsum([len(rows) for rows in prepared])[:-1])
        return [pick(everything, operator.itemgetter(own)) for own in places]

    def _run(self, rows: Any, names: str) -> Any:
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        loader = self._loader(rows)
        if type(loader) is DataLoader:
            # accelerate does not know this loader: it would drop rows as repeats by the size of the last one it knew.
            self.gather_function = self.accelerator.gather
        try:
            loop = self.evaluation_loop(loader, description=f"Prediction {names}", prediction_loss_only=False)
        finally:
            self.compute_metrics = compute_metrics
            # A finished bar must not swallow the next one.
            self.callback_handler.on_predict(self.args, self.state, self.control, {})
        return _in_order(loop.predictions, loop.label_ids)[0]

    def _loader(self, rows: Any) -> Any:
        """Batches by tokens; by rows where several processes must get equally many, or rows have no length."""
        args = self.args
        if args.world_size > 1 or not args.eval_tokens or not isinstance(rows, JoinedRows):
            return self.get_test_dataloader(rows)
        most = min(args.eval_tokens, args.per_device_eval_batch_size * args.max_length)
        batches = token_batches(rows.lengths, most)
        return DataLoader(
            rows,  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
        )

    def _table(
        self, found: Any, labels: np.ndarray, num_options: np.ndarray, ids: list[str], meta: dict[str, Any]
    ) -> PredictionTable:
        prediction = self.method.predict(found if isinstance(found, Outputs) else as_outputs(found))
        meta = {
            "modality": self.backend.modality,
            "method": self.method_name,
            "options": self.method.options(),
            "num_choices": self.backend.num_choices,
            "task_num_choices": self.backend.num_choices,
            "epistemic_scale": self.method.epistemic_scale,
            "versions": checkpoint.versions(),
            **self.backend.table_facts,
            **meta,
        }
        table = PredictionTable.from_arrays(
            ids=ids,
            labels=labels,
            num_options=num_options,
            probs=prediction.probs.numpy(),
            alpha=None if prediction.alpha is None else prediction.alpha.numpy(),
            members=None if prediction.members is None else prediction.members.numpy(),
            meta=meta,
        )
        return _with_own_uncertainties(table, prediction)


def _lengths(prepared: Any) -> Sequence[int]:
    return prepared["length"]


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


def _in_order(found: Any, keys: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """Gathered rows in dataset order, each once: processes may have padded their last batch with repeats."""
    rows, first = np.unique(keys[:, 1], return_index=True)
    return pick(found, lambda value: value[first]), keys[first, 0], keys[first, 2], rows
