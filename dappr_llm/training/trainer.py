"""`DAPPrTrainer`: a `transformers.Trainer` that trains any method. Names no method or dataset."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core import checkpoint
from ..core.errors import UserError
from ..core.files import write_text
from ..core.outputs import Outputs, option_rows
from ..inference.batching import is_stream
from ..inference.card import save_card
from ..methods import Method, Progress, get_method, name_of
from .auxiliary_rows import MixedRows, check_auxiliary, split_stats
from .callbacks.interrupt import InterruptCallback
from .callbacks.method_hooks import HeadCallback, check_arguments
from .config import DAPPrConfig
from .epoch_schedules import EveryEpochs, epoch_schedule
from .evidence import DEAD, ChanceMonitor, Tally, common_mode_share, evidence_stats
from .predicting import PredictingTrainer
from .samplers import LengthGrouped

logger = logging.getLogger(__name__)

_PROBE_ROWS = 64  # training rows read once to know where the logits start


class DAPPrTrainer(PredictingTrainer):
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
        auxiliary_dataset (`Dataset` or `list[dict]`, *optional*):
            Rows whose labels do not matter, for methods that learn from auxiliary rows.
        auxiliary_share (`float`, *optional*, defaults to 0.5):
            Their share of an epoch.

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
        auxiliary_dataset: Any = None,
        auxiliary_share: float = 0.5,
        **kwargs: Any,
    ):
        args = args or DAPPrConfig("dappr_output")
        self.method = get_method(method)
        self.method_name = method if isinstance(method, str) else name_of(method)
        if backend is None:
            from ..inference.loading import build_backend  # the only place that chooses text or vision

            model, backend = build_backend(
                model, processing_class, args, self.method, peft_config, quantization_config
            )
        self.backend = backend
        if train_dataset is not None:
            check_auxiliary(self.method, self.method_name, auxiliary_dataset is not None)
            check_arguments(self.method, args)
            self.labelled_rows = self._prepare(train_dataset, "train_dataset")
            train_dataset = backend.augmented(self.labelled_rows)
        if auxiliary_dataset is not None:
            auxiliary = backend.augmented(self._prepare(auxiliary_dataset, "auxiliary_dataset", labelled=False))
            train_dataset = MixedRows(train_dataset, auxiliary, auxiliary_share, args.data_seed or args.seed)
        if isinstance(eval_dataset, dict):
            eval_dataset = {key: self._prepare(rows, key) for key, rows in eval_dataset.items()}
        elif eval_dataset is not None:
            eval_dataset = self._prepare(eval_dataset, "eval_dataset")
        self._tally = Tally()
        self._chance = ChanceMonitor()
        self.interrupt = InterruptCallback()
        self.heads = HeadCallback(self)
        super().__init__(
            model=model,
            args=args,
            data_collator=backend.collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=backend.tokenizer,
            compute_metrics=self._metrics,
            callbacks=[self.interrupt, self.heads, *(callbacks or [])],
            **kwargs,
        )
        self.label_names = ["labels"]
        self._take_up(args)

    def _take_up(self, args: DAPPrConfig) -> None:
        """What arguments of our own ask for once the model is in place."""
        self.compile_blocks()
        if args.trunk_cache:
            if not hasattr(self.backend, "use_trunk"):
                raise UserError("train.trunk_cache is for text models; leave it out")
            self.backend.use_trunk(self.model, args.trunk_cache)
        if args.eval_every_epochs:
            self.add_callback(EveryEpochs(args.eval_every_epochs))

    def _prepare(self, rows: Any, name: str, labelled: bool = True) -> Any:
        prepared = self.backend.prepare(rows, labelled=labelled, name=name)
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
        wanted = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        self.check_stream(self.method)
        resume = self.resume_folder(wanted)
        if resume:
            _, config = checkpoint.load_sidecar(str(resume))
            self.backend.evidence_offset = config["evidence_offset"]
            logger.info(f"Resuming from {resume}")
        else:
            self._settle_offset()
        self.settle_checkpointing()
        try:
            return super().train(resume_from_checkpoint=resume or None, **kwargs)
        finally:
            self.interrupt.restore()

    def _settle_offset(self) -> None:
        """Fix the evidence offset from where the answer logits start, and say where that is."""
        wanted = self.args.evidence_offset
        if wanted is not None and wanted != "auto":
            self.backend.evidence_offset = wanted
        if self.backend.has_head:  # it reads the model's own logits, if there are any
            if wanted not in (None, 0.0):
                raise UserError("train.evidence_offset is for methods that read logits alone; leave it out")
            return
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
        if mean < DEAD:
            logger.warning(
                f"Answer logits start at {mean:.1f} on average: evidence is dead there and its gradient vanishes; set "
                "train.evidence_offset: auto"
            )

    @torch.no_grad()
    def _probe(self) -> Tensor:
        """Answer logits of the first training rows, before the model is wrapped for training."""
        training = self.model.training
        self.model.eval()
        rows = list(islice(iter(self.train_dataset), _PROBE_ROWS))
        size = self.args.per_device_eval_batch_size
        chunks = [self.backend.collate(rows[i : i + size]) for i in range(0, len(rows), size)]
        logits = [self.backend.read(self.model, self._prepare_inputs(chunk)).logits for chunk in chunks]
        self.model.train(training)
        return torch.cat(logits)[:, : self.backend.num_choices].float().cpu()

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        grouped = self.args.train_sampling_strategy == "group_by_length"
        if not grouped or "length" not in getattr(dataset, "column_names", ()):
            return super()._get_train_sampler(train_dataset)
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return LengthGrouped(batch, dataset["length"], self.args.data_seed or self.args.seed, lambda: self.state.epoch)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.args.epoch_schedule and self.lr_scheduler is None:  # type: ignore[has-type]
            steps = num_training_steps / math.ceil(self.args.num_train_epochs)
            self.lr_scheduler = epoch_schedule(self.args, optimizer or self.optimizer, steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def progress(self) -> Progress:
        """Where training stands; schedules count whole epochs from 0."""
        if is_stream(self.train_dataset):
            return self.stream_progress()
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
        num_options = inputs.get("num_options")  # None: every row has K options
        groups = inputs.get("option_rows") or option_rows([self.backend.num_choices] * len(labels))
        terms, extra = self._loss_terms(outputs, labels, groups, progress)
        shares = inputs.get("shares")  # each row's part of the loss, where the last batch was filled up with repeats
        per_row: Any = sum(terms.values())
        loss = per_row.mean() if shares is None else (per_row * shares).sum()
        if model.training:
            self.heads.remember(outputs, labels)
            self.watch.see(terms, inputs.get("row"), self.row_names)
            self._record(terms, extra, outputs, labels, num_options, progress, shares)
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
        num_options: Tensor | None,
        progress: Progress,
        shares: Tensor | None = None,
    ) -> None:
        """Sum up what the next `log` reports; stays on the device, so a step waits for nothing."""
        if num_options is None:
            num_options = torch.full_like(labels, self.backend.num_choices)
        values = extra | evidence_stats(self.method, outputs, labels, num_options)
        if "ood_rows" in self.method.needs:
            values = split_stats(values, labels)
        values |= {f"loss/{key}": value for key, value in terms.items()}
        if self.state.global_step < 20 and not self.backend.has_head:
            share = common_mode_share(self.method, outputs, labels, progress)
            values["grad/common_mode"] = share.masked_fill(num_options != self.backend.num_choices, math.nan)
        self._tally.add(values, None if shares is None else shares > 0)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._tally:
            means, rows = self._tally.drain(self.args.world_size)
            chance = means.pop("chance", math.nan)
            logs.update(means)
            warning = self._chance.update(rows, means.get("accuracy", math.nan), chance, means.get("alpha0"))
            if warning and self.is_world_process_zero():
                logger.warning(warning)
        super().log(logs, start_time)

    # --- saving -------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """
        PEFT's or transformers' own files and our sidecar.

        `save_embedding_layers=False`: with LoRA on the output head PEFT would also write the frozen head itself
        (250 MiB for Mistral-7B). Trainer's pickled `training_args.bin` is written as JSON instead.
        """
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        extra = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
        model.save_pretrained(folder, state_dict=state_dict, **extra)
        self.backend.save_processor(folder)
        write_text(folder / "training_args.json", self.args.to_json_string())
        config = self.sidecar()
        checkpoint.save_sidecar(folder, config)
        save_card(folder, config)
        self.save_fingerprints(folder)

    def sidecar(self) -> dict[str, Any]:
        """Everything needed to read this model's logits again."""
        method = {"name": self.method_name, "options": self.method.options()}
        return {"method": method, **self.backend.config()}
