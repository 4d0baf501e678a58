"""`DAPPrTrainer`: a `transformers.Trainer` that trains any method. Names no method or dataset."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction

from . import checkpoint
from .config import DAPPrConfig
from .errors import UserError
from .evaluators import evaluate_id
from .files import write_text
from .interrupt import InterruptCallback
from .methods import Method, Progress, get_method, name_of
from .monitor import ChanceMonitor, common_mode_share, evidence_stats
from .outputs import Outputs, option_rows
from .passes import read_logits, seeded
from .predictions import PredictionTable
from .publishing import PublishingTrainer
from .samplers import FixedOrder, LengthGrouped

logger = logging.getLogger(__name__)

_PROBE_ROWS = 64  # training rows read once to know where the logits start
_DEAD = -5.0  # start logits below this carry almost no gradient


class DAPPrTrainer(PublishingTrainer):
    """
    Trains an uncertainty-aware adapter.

    Args:
        model (`str` or `PreTrainedModel` or `PeftModel`):
            Hub id, folder or `"smollm2-135m"`, or a loaded causal LM, with or without an adapter.
        args (`DAPPrConfig`, *optional*):
            Training arguments.
        train_dataset, eval_dataset (`Dataset` or `list[dict]`, *optional*):
            Raw rows (question, choices, answer), items from `load_task`, or prepared rows.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer; loaded with the model when left out.
        peft_config (`LoraConfig`, *optional*):
            The adapter to train. Without it a model given as `str` gets LoRA of rank 8 on all linear layers.
        quantization_config (`BitsAndBytesConfig`, *optional*):
            For a model given as `str`: load the frozen base in 4 or 8 bits.
        method (`str` or `Method`, *optional*, defaults to `"dappr"`):
            A name of `METHODS`, or a method object with its own hyperparameters.
        backend (*optional*):
            What surrounds the model; built from `model` and `processing_class` when left out.

    Example:

    ```python
    >>> trainer = DAPPrTrainer("smollm2-135m", DAPPrConfig("runs/mine"), train_dataset=rows, method="dappr")
    >>> trainer.train()
    ```
    """

    # Our loss is a mean over the rows of a micro-batch: Trainer must divide it by the accumulation steps.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: Any,
        args: DAPPrConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        method: str | Method = "dappr",
        backend: Any = None,
        callbacks: list[Any] | None = None,
        **kwargs: Any,
    ):
        args = args or DAPPrConfig("dappr_output")
        self.method = get_method(method)
        self.method_name = method if isinstance(method, str) else name_of(method)
        if backend is None:
            from .run import build_backend  # the only place that chooses text or vision

            model, backend = build_backend(
                model, processing_class, args, self.method, peft_config, quantization_config
            )
        self.backend = backend
        if train_dataset is not None:
            train_dataset = self._prepare(train_dataset, "train_dataset")
        if isinstance(eval_dataset, dict):
            eval_dataset = {key: self._prepare(rows, key) for key, rows in eval_dataset.items()}
        elif eval_dataset is not None:
            eval_dataset = self._prepare(eval_dataset, "eval_dataset")
        self._terms: dict[str, Tensor] = {}
        self._chance = ChanceMonitor()
        self.interrupt = InterruptCallback()
        super().__init__(
            model=model,
            args=args,
            data_collator=backend.collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=backend.tokenizer,
            compute_metrics=self._metrics,
            callbacks=[self.interrupt, *(callbacks or [])],
            **kwargs,
        )
        self.label_names = ["labels"]

    def _prepare(self, rows: Any, name: str) -> Any:
        prepared = self.backend.prepare(rows, name=name)
        self.backend.check_options(prepared, name)
        return prepared

    # --- training -----------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """
        Train, or go on with an interrupted run.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint folder; `True`: the last one in `output_dir`; `"auto"`: the same if there is one, else a
                fresh start. Defaults to `args.resume_from_checkpoint`.
        """
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        if resume in ("auto", "true", True):
            last = checkpoint.last_checkpoint(self.args.output_dir)
            if last is None and resume != "auto":
                raise UserError(f"{self.args.output_dir} holds no checkpoint to resume from")
            resume = last
        if resume:
            _, config = checkpoint.load_sidecar(str(resume))
            self.backend.evidence_offset = config["evidence_offset"]
            logger.info(f"Resuming from {resume}")
        else:
            self._settle_offset()
        try:
            return super().train(resume_from_checkpoint=resume or None, **kwargs)
        finally:
            self.interrupt.restore()

    def _settle_offset(self) -> None:
        """Fix the evidence offset from where the answer logits start, and say where that is."""
        wanted = self.args.evidence_offset
        if wanted is not None and wanted != "auto":
            self.backend.evidence_offset = wanted
        zeros = torch.zeros(1, self.method.num_outputs(self.backend.num_choices))
        if wanted != "auto" and self.method.predict(Outputs(logits=zeros)).alpha is None:
            return
        if wanted == "auto":
            self.backend.evidence_offset = 0.0
        start = self._probe()
        if wanted == "auto":
            self.backend.evidence_offset = round(1.0 - start.mean().item(), 2)
        start = start + self.backend.evidence_offset
        low, mean, high = start.min().item(), start.mean().item(), start.max().item()
        logger.info(
            f"Answer logits start at {mean:.2f} (from {low:.2f} to {high:.2f}), evidence offset "
            f"{self.backend.evidence_offset:g}"
        )
        if mean < _DEAD:
            logger.warning(
                f"Answer logits start at {mean:.1f} on average: evidence is dead there and its gradient vanishes; set "
                "train.evidence_offset: auto"
            )

    @torch.no_grad()
    def _probe(self) -> Tensor:
        """Answer logits of the first training rows, before the model is wrapped for training."""
        count = min(_PROBE_ROWS, len(self.train_dataset))
        training = self.model.training
        self.model.eval()
        rows = [self.train_dataset[i] for i in range(count)]
        size = self.args.per_device_eval_batch_size
        chunks = [self.backend.collate(rows[i : i + size]) for i in range(0, count, size)]
        logits = [self.backend.read(self.model, self._prepare_inputs(chunk)).logits for chunk in chunks]
        self.model.train(training)
        return torch.cat(logits)[:, : self.backend.num_choices].float().cpu()

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        grouped = self.args.train_sampling_strategy == "group_by_length"
        if not grouped or "length" not in getattr(dataset, "column_names", ()):
            return super()._get_train_sampler(train_dataset)
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGrouped(batch, dataset["length"], self.args.data_seed or self.args.seed, lambda: self.state.epoch)

    def progress(self) -> Progress:
        """Where training stands; schedules count whole epochs from 0."""
        epochs = self.state.num_train_epochs or math.ceil(self.args.num_train_epochs)
        return Progress(epoch=self.state.epoch or 0.0, epochs=epochs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = self.backend.read(model, inputs)
        progress = self.progress()
        num_options = inputs.get("num_options")
        if num_options is None:
            num_options = torch.full_like(labels, self.backend.num_choices)
        groups = inputs.get("option_rows") or option_rows([self.backend.num_choices] * len(labels))
        terms, extra = self._loss_terms(outputs, labels, groups, progress)
        loss = sum(terms.values()).mean()  # type: ignore[union-attr]
        if model.training:
            whole = min(groups) == self.backend.num_choices
            self._record(terms, extra, outputs, labels, num_options, progress, whole)
        return (loss, outputs) if return_outputs else loss

    def _loss_terms(
        self, outputs: Outputs, labels: Tensor, groups: Mapping[int, Tensor], progress: Progress
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Per-row terms and logged-only values; rows are grouped by option count, so no method needs a mask."""
        terms: dict[str, Tensor] = {}
        extra: dict[str, Tensor] = {}
        for count, rows in groups.items():
            index = None if len(groups) == 1 else rows.to(labels.device)
            part = outputs if index is None else outputs.select(index)
            part = part.narrow(self.backend.num_choices, count)
            part_labels = labels if index is None else labels[index]
            found = self.method.loss(part, part_labels, progress)
            with torch.no_grad():
                watched = self.method.monitor(part, part_labels, progress)
            for target, values in ((terms, found), (extra, watched)):
                for key, value in values.items():
                    if index is None:
                        target[key] = value
                    else:
                        target[key] = target.get(key, value.new_zeros(len(labels))).index_put((index,), value)
        return terms, extra

    @torch.no_grad()
    def _record(
        self,
        terms: dict[str, Tensor],
        extra: dict[str, Tensor],
        outputs: Outputs,
        labels: Tensor,
        num_options: Tensor,
        progress: Progress,
        whole: bool,
    ) -> None:
        """Sum up what the next `log` reports; stays on the device, so a step waits for nothing."""
        values = {f"loss/{key}": value for key, value in terms.items()} | extra
        values |= evidence_stats(self.method, outputs, labels, num_options)
        if self.state.global_step < 20 and whole:  # every row offers all the letters
            values["grad/common_mode"] = common_mode_share(self.method, outputs, labels, progress)
        for key, value in values.items():
            total = value.detach().double().sum()
            pair = torch.stack([total, torch.full_like(total, len(value))])
            self._terms[key] = self._terms.get(key, 0) + pair

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._terms:
            keys = sorted(self._terms)
            sums = self.accelerator.reduce(torch.stack([self._terms[key] for key in keys]), reduction="sum")
            means = dict(zip(keys, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))
            rows = int(sums[keys.index("accuracy"), 1])
            self._terms = {}
            chance = means.pop("chance")
            logs.update(means)
            warning = self._chance.update(rows, means["accuracy"], chance, means.get("alpha0"))
            if warning and self.is_world_process_zero():
                logger.warning(warning)
        super().log(logs, start_time)

    # --- prediction ---------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, Tensor, Tensor]:
        """Raw logits and (label, row, option count) of a batch; what they mean is worked out once all are gathered."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = read_logits(self.backend, model, inputs, self.method.passes)
        keys = torch.stack([inputs["labels"], inputs["row"], inputs["num_options"]], dim=-1)
        return None, logits, keys

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
        logits, labels, num_options, _ = _in_order(prediction.predictions, prediction.label_ids)
        # Each of several passes counts as a row of its own: the loss is their mean.
        repeats = logits.shape[1] if logits.ndim == 3 else 1
        outputs = Outputs(logits=torch.from_numpy(logits).flatten(0, -2))
        rows = [torch.from_numpy(values).repeat_interleave(repeats) for values in (labels, num_options)]
        with seeded(0):  # a loss that draws noise must not depend on when it is evaluated, nor disturb training
            terms, extra = self._loss_terms(
                outputs, rows[0], option_rows(rows[1].tolist()), Progress.final(self.progress().epochs)
            )
        losses = {f"loss/{key}": value.mean().item() for key, value in terms.items()}
        metrics = {"loss": sum(losses.values()), **losses}
        metrics |= {key: value.mean().item() for key, value in extra.items()}
        table = self._table(logits, labels, num_options, [str(i) for i in range(len(labels))], {})
        return metrics | evaluate_id(table)

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
        prepared = self.backend.prepare(dataset, labelled=False, name=task or "dataset")
        task_choices = meta.get("task_num_choices") or max(prepared["num_options"])
        width = max(self.backend.num_choices, task_choices, max(prepared["num_options"]))
        compute_metrics, self.compute_metrics = self.compute_metrics, None  # type: ignore[has-type]
        try:
            with self.backend.reading(width):
                loop = self.evaluation_loop(
                    self.get_test_dataloader(prepared), description=f"Prediction {task}", prediction_loss_only=False
                )
        finally:
            self.compute_metrics = compute_metrics
            # A finished bar must not swallow the next one.
            self.callback_handler.on_predict(self.args, self.state, self.control, {})
        logits, labels, num_options, rows = _in_order(loop.predictions, loop.label_ids)
        ids = [prepared["id"][row] for row in rows] if len(rows) != len(prepared) else list(prepared["id"])
        meta = {"task": task, "split": split, "seed": self.args.seed, **meta, "task_num_choices": task_choices}
        return self._table(logits, labels, num_options, ids, meta)

    def _table(
        self, logits: np.ndarray, labels: np.ndarray, num_options: np.ndarray, ids: list[str], meta: dict[str, Any]
    ) -> PredictionTable:
        prediction = self.method.predict(Outputs(logits=torch.from_numpy(logits)))
        meta = {
            "method": self.method_name,
            "options": self.method.options(),
            "num_choices": self.backend.num_choices,
            "task_num_choices": self.backend.num_choices,
            "epistemic_scale": self.method.epistemic_scale,
            "versions": checkpoint.versions(),
            **meta,
        }
        return PredictionTable.from_arrays(
            ids=ids,
            labels=labels,
            num_options=num_options,
            probs=prediction.probs.numpy(),
            alpha=None if prediction.alpha is None else prediction.alpha.numpy(),
            members=None if prediction.members is None else prediction.members.numpy(),
            meta=meta,
        )

    # --- saving -------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """
        PEFT's own files and our sidecar.

        `save_embedding_layers=False`: with LoRA on the output head PEFT would also write the frozen head itself
        (250 MiB for Mistral-7B). Trainer's pickled `training_args.bin` is written as JSON instead.
        """
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        extra = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
        model.save_pretrained(folder, state_dict=state_dict, **extra)
        self.backend.tokenizer.save_pretrained(folder)
        write_text(folder / "training_args.json", self.args.to_json_string())
        config = self.sidecar()
        checkpoint.save_sidecar(folder, config)
        checkpoint.save_readme(folder, config, self.backend.hub_base)
        self.save_fingerprints(folder)

    def sidecar(self) -> dict[str, Any]:
        """Everything needed to read this model's logits again."""
        method = {"name": self.method_name, "options": self.method.options()}
        return {"method": method, **self.backend.config()}


def _in_order(logits: Any, keys: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Gathered rows in dataset order, each once: processes may have padded their last batch with repeats."""
    rows, first = np.unique(keys[:, 1], return_index=True)
    return logits[first], keys[first, 0], keys[first, 2], rows
