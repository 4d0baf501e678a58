"""`DAPPrTrainer`: a `transformers.Trainer` that trains any method. Names no method, no dataset and no modality."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from ..core.backend import Backend, option_rows
from ..core.errors import explained
from ..core.outputs import Gathered
from ..evaluation.prediction_table import PredictionTable
from ..inference.batching import RowSet
from ..inference.stochastic_passes import read_passes, seeded
from ..methods import Method, get_method, name_of
from .atomic_checkpoints import AtomicCheckpoints
from .class_weights import find_class_weights, weigh_rows
from .config import DAPPrConfig
from .epoch_schedules import epoch_schedule
from .eval_metrics import build_predictor, eval_metrics, in_order
from .evidence import StepLog, settle_start
from .losses import check_stream, row_losses, training_progress
from .samplers import eval_sampler, train_sampler
from .saving import restore_settings, write_checkpoint

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig, EvalPrediction, PreTrainedTokenizerBase
    from transformers.trainer_utils import PredictionOutput

    from ..inference.table_predictor import TablePredictor

logger = logging.getLogger(__name__)


class DAPPrTrainer(AtomicCheckpoints, Trainer):
    """
    Trains an uncertainty-aware adapter or classifier.

    Args:
        model (`str` or `PreTrainedModel` or `PeftModel`):
            Hub id, folder or `"smollm2-135m"`, or a loaded causal LM or sequence classifier, or an `ImageClassifier`.
        args (`DAPPrConfig`, *optional*):
            Training arguments.
        train_dataset, eval_dataset (`Dataset`, `DataFrame` or `list[dict]`, *optional*):
            Raw rows (question, choices, answer), items from `load_task`, or prepared rows.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer; loaded with the model when left out.
        peft_config (`LoraConfig`, *optional*):
            The adapter to train. Without it a model given as `str` gets LoRA of rank 8 on all linear layers.
        quantization_config (`BitsAndBytesConfig`, *optional*):
            For a model given as `str`: load the frozen base in 4 or 8 bits.
        method (`str` or `Method`, *optional*, defaults to `"dappr"`):
            A name of `METHODS`, or a method object with its own hyperparameters.
        backend (`Backend`, *optional*):
            What surrounds the model; built from `model` and `processing_class` when left out.
        auxiliary_dataset (`Dataset` or `list[dict]`, *optional*):
            Rows whose labels do not matter, for methods that learn from auxiliary rows.
        auxiliary_share (`float`, *optional*, defaults to 0.5):
            Their share of an epoch.
        ood_datasets (`Mapping[str, Dataset]`, *optional*):
            Out-of-distribution rows by name, watched at each evaluation if `args.monitor_ood_rows` is set.

    Example:

    ```python
    >>> trainer = DAPPrTrainer("smollm2-135m", DAPPrConfig("runs/mine"), train_dataset=rows, method="dappr")
    >>> trainer.train()
    ```
    """

    # Our loss is a mean over the rows of a micro-batch: Trainer must divide it by the accumulation steps.
    loss_is_scaled_for_ga = False
    args: DAPPrConfig

    def __init__(
        self,
        model: str | nn.Module,
        args: DAPPrConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: LoraConfig | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        method: str | Method = "dappr",
        backend: Backend | None = None,
        callbacks: list[TrainerCallback] | None = None,
        auxiliary_dataset: Any = None,
        auxiliary_share: float = 0.5,
        ood_datasets: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        args = args or DAPPrConfig("dappr_output")
        self.method = get_method(method)
        self.method_name = method if isinstance(method, str) else name_of(method)
        if backend is None:
            from .build import from_objects  # chooses between text and vision

            options = (peft_config, quantization_config, train_dataset)
            model, backend = from_objects(model, processing_class, args, self.method, *options)
        self.backend = backend
        self.labelled_rows: Any = None  # training rows without auxiliary ones
        self.fingerprints: list[str] | None = None
        self.chosen: dict[str, Any] = {}  # settings that were not given, by their names in a recipe
        self.head_is_settled = False  # whether the start of a new head was chosen
        if train_dataset is not None:
            self.labelled_rows = self.prepare(train_dataset, "train_dataset")
            train_dataset = backend.augmented(self.labelled_rows)
            if auxiliary_dataset is not None or "auxiliary_rows" in self.method.needs:
                from .auxiliary_rows import mixed_rows

                train_dataset = mixed_rows(self, train_dataset, auxiliary_dataset, auxiliary_share, args)
        self.class_weights = find_class_weights(args, backend, self.method, self.labelled_rows)  # [K]
        self.step_log = StepLog(self.method, backend)
        super().__init__(
            model=model,
            args=args,
            data_collator=backend.collate,
            train_dataset=train_dataset,
            eval_dataset=None if eval_dataset is None else self._prepare_eval(eval_dataset, "eval_dataset"),
            processing_class=backend.processing_class,
            compute_metrics=self._metrics,
            callbacks=callbacks,
            **kwargs,
        )
        self.label_names = ["labels"]
        self.interrupt, self.guard, self.hooks = args.install_callbacks(self, ood_datasets)
        if self._compiles_blocks:
            backend.compile_blocks(self.model, **args.compile_options)
        if args.trunk_cache:
            backend.use_frozen_layers_cache(self.model, args.trunk_cache)

    def use_method(self, method: Method) -> None:
        """Take the same method with other coefficients."""
        self.method = self.backend.method = self.step_log.method = method

    # --- rows -----------------------------------------------------------------------------------------------------

    def prepare(self, rows: Any, name: str, labelled: bool = True) -> Any:
        """Rows of any accepted layout, prepared and checked."""
        prepared = self.backend.prepare(rows, labelled=labelled, name=name)
        self.backend.check_options(prepared, name)
        return prepared

    def _prepare_eval(self, rows: Any, name: str, labelled: bool = True) -> Any:
        if isinstance(rows, dict):
            return {key: self.prepare(part, key, labelled) for key, part in rows.items()}
        return self.prepare(rows, name, labelled)

    # --- training -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """
        Train, or resume an interrupted run.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint folder; `True`: the last one in `output_dir`; `"auto"`: the same if there is one, else a
                fresh start. Defaults to `args.resume_from_checkpoint`.
        """
        wanted = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        check_stream(self.train_dataset, self.args, self.method)
        resume = self.resume_folder(wanted)
        if resume:
            restore_settings(self, str(resume))
            logger.info(f"Resuming from {resume}")
        else:
            settle_start(self)
        if self.args.checkpoint_if_needed:
            from .memory import settle_gradient_checkpointing

            settle_gradient_checkpointing(self)
        try:
            return super().train(resume_from_checkpoint=resume or None, **kwargs)
        finally:
            self.interrupt.restore()

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = self.backend.read(model, inputs)
        progress = training_progress(self)
        num_choices = self.backend.num_choices or 0  # settled by the first rows
        groups = inputs.get("option_rows") or option_rows([num_choices] * len(labels))
        smoothing = self.args.label_smoothing_factor
        terms, logged = row_losses(self.method, num_choices, outputs, labels, groups, progress, smoothing)
        weights = inputs.get("loss_weights")  # of each row, where they are not all alike
        per_row: Any = sum(terms.values())
        loss = per_row.mean() if weights is None else (per_row * weights).sum()
        if model.training:
            self.guard.see(terms, inputs.get("row"))
            if self.hooks is not None:
                self.hooks.remember(outputs, labels)
            options, first_steps = inputs.get("num_options"), self.state.global_step < 20
            self.step_log.add(terms, logged, outputs, labels, options, progress, weights, first_steps)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.step_log:
            self.step_log.drain_into(logs, self.args.world_size)
        super().log(logs, start_time)

    create_optimizer = explained("train.optim cannot be used")(Trainer.create_optimizer)

    @explained("train.lr_scheduler_type cannot be used")
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.args.epoch_schedule and self.lr_scheduler is None:  # type: ignore[has-type]
            steps = num_training_steps / math.ceil(self.args.num_train_epochs)
            self.lr_scheduler = epoch_schedule(self.args, optimizer or self.optimizer, steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """As Trainer's; rows get the weight of their class, and those that only pad the last batch a weight of 0."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        weigh_rows(self, batches)
        return batches, items

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; then each rank draws its own noise and dropout. The order of rows has a seed of its own."""
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.args.world_size > 1:
            torch.manual_seed(self.args.seed + self.args.process_index)
        return prepared

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return train_sampler(dataset, self.args, lambda: self.state.epoch) or super()._get_train_sampler(train_dataset)

    @property
    def _compiles_blocks(self) -> bool:
        return bool(self.args.torch_compile and self.backend.packs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """As Trainer's; a model whose blocks we compile ourselves is not compiled once more as a whole."""
        found = super()._build_accelerator_args(**kwargs)
        if self._compiles_blocks:
            from accelerate.utils import TorchDynamoPlugin

            found["dynamo_plugin"] = TorchDynamoPlugin(backend="no")
        return found

    # --- evaluating and predicting --------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As Trainer's; `eval_dataset` may hold raw rows, as `train_dataset` may."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._prepare_eval(eval_dataset, "eval_dataset")
        return super().evaluate(eval_dataset, *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> PredictionOutput:
        """As Trainer's, with raw outputs in the order of the rows; rows may be raw, and without labels."""
        found = super().predict(self.prepare(test_dataset, "test_dataset", labelled=False), *args, **kwargs)
        predictions, labels, _ = in_order(found.predictions, found.label_ids)
        return found._replace(predictions=predictions, label_ids=labels)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, Gathered, Tensor]:
        """Raw outputs and (label, row, option count) of a batch; the method reads them once all are gathered."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            found = read_passes(self.backend, model, inputs, self.method.passes)
        labels, options = inputs["labels"], inputs.get("num_options")
        options = torch.full_like(labels, self.backend.num_choices or 0) if options is None else options
        return None, found, torch.stack([labels, inputs["row"], options], dim=-1)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, with stochastic passes seeded: by the rank too, so that no two rows share their masks."""
        if self.method.passes == 1:
            return super().evaluation_loop(*args, **kwargs)
        with seeded(self.args.seed + self.args.process_index):
            return super().evaluation_loop(*args, **kwargs)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return eval_sampler(eval_dataset) or super()._get_eval_sampler(eval_dataset)

    def _metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        return eval_metrics(self.predictor, prediction, training_progress(self).epochs)

    @property
    def predictor(self) -> TablePredictor:
        """What predicts with this trainer's model, method and batch sizes."""
        return build_predictor(self)

    def predict_table(self, dataset: Any, task: str = "", split: str = "", **meta: Any) -> PredictionTable:
        """Predictions for every row of a dataset; see [`TablePredictor.predict_table`]."""
        return self.predictor.predict_table(dataset, task, split, **meta)

    def predict_tables(self, sets: Sequence[RowSet]) -> list[PredictionTable]:
        """Tables of several datasets from one pass; see [`TablePredictor.predict_tables`]."""
        return self.predictor.predict_tables(sets)

    # --- saving ---------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None) -> None:
        write_checkpoint(self, Path(output_dir or self.args.output_dir), state_dict)
