"""`DAPPrConfig`: `TrainingArguments` and what reading answer choices adds to them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainingArguments

from ..core.errors import UserError
from ..core.schemas import check
from ..core.schemas.train_section import OwnArguments
from ..evaluation.metric_columns import LOWER_IS_BETTER

if TYPE_CHECKING:
    from .callbacks.interrupt import InterruptCallback
    from .callbacks.method_hooks import MethodHooks
    from .callbacks.nonfinite_guard import NonFiniteGuard
    from .trainer import DAPPrTrainer

_TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}


@dataclass
class DAPPrConfig(TrainingArguments):
    """
    `TrainingArguments` and what reading answer choices adds to them.

    Args:
        max_length (`int`, *optional*, defaults to 300):
            Tokens of a prompt at the most; longer ones lose words of their question, never options or ending.
        truncation (`str`, *optional*):
            Which words they lose: those at the `"start"`, at the `"end"`, or in the middle (`"head_tail"`). By default
            at the end of texts that a head classifies, else at the start.
        num_choices (`int`, *optional*):
            K, the answer letters trained on; by default the most options of any training row.
        evidence_offset (`float` or `"auto"`, *optional*):
            Added to every answer logit before the method sees it, and stored with the checkpoint. `"auto"` puts the
            mean logit of the first training rows at 1, where evidence is neither dead nor already large. By default
            what the adapter that training starts from learnt evidence with, and for text models without one the same
            as `"auto"` where the mean logit is not between -2 and 4 anyway; 0 for images.
        head_init (`str`, *optional*, defaults to `"auto"`):
            Where a new classification head starts: at `"random"`, or at the `"probe"`, a logistic regression on the
            frozen model's features of the training rows. `"auto"`: the probe, fitted to 64 rows per label at most.
        prompt (`dict`, *optional*):
            Fields of `dappr_llm.text.prompt.Prompt` that differ from its defaults. `{"chat": True, "system": "…"}`
            puts the prompt into the tokenizer's own chat template.
        on_nonfinite (`str`, *optional*, defaults to `"stop"`):
            What to do when a loss or gradient is NaN or infinite: `"stop"` with an error that names rows and terms, or
            `"skip"` that step, with a warning; no weight changes in it, in any process.
        epoch_rows (`int`, *optional*):
            Training from a stream: how many rows count as an epoch for schedules of coefficients.
        monitor_ood_rows (`int`, *optional*, defaults to 0):
            At each evaluation, read this many rows of every OOD set too and log their mean epistemic uncertainty and
            evidence beside those of the validation rows.
        packing (`bool`, *optional*, defaults to `True`):
            Compute batches without padding where the model allows it; the same numbers, sooner.
        share_prefix (`bool`, *optional*, defaults to `True`):
            In packed batches, compute the beginning that prompts share once per batch. The same numbers; with LoRA
            dropout the rows of a batch then also share the dropout of that beginning, and the expected gradient is
            the same.
        eval_tokens (`int`, *optional*, defaults to 4096):
            Prompt tokens of a prediction batch, at most `per_device_eval_batch_size * max_length`; 0: batches of
            `per_device_eval_batch_size` prompts. Changes speed only.
        trunk_cache (`str`, *optional*):
            A folder for what the frozen layers below an adapter on the top layers (`lora.layers_to_transform`) make of
            each prompt: computed once, used by all epochs, seeds and methods. Needs `dataloader_num_workers: 0`.
        torch_compile (`bool`, *optional*, defaults to `False`):
            As Trainer's. A model that is read in packed batches is not compiled as a whole, which would have to be
            done anew for nearly every batch: its norms and feed-forward blocks are, once for any number of tokens.
        gradient_checkpointing (`bool` or `"auto"`, *optional*, defaults to `False`):
            `"auto"`: only if a batch of the longest rows would otherwise not fit into the memory that is free; always
            with FSDP and DeepSpeed, where no device holds the model to try it.
        metric_for_best_model (`str`, *optional*):
            `"nll"`, `"accuracy"`, `"ece"`, `"brier"` or `"loss"`; the direction follows from the name.
        class_weights (`str` or `dict`, *optional*):
            Weights of rows in the loss by their label, which divide the sum of a whole step: a number by label, 1 for
            those left out, or `"balanced"`, `n / (K * n_k)` for a label with `n_k` of the `n` training rows.
        label_smoothing_factor (`float`, *optional*, defaults to 0.0):
            Share of each label that is spread evenly over all labels. Evaluation uses neither weights nor smoothing.
        epoch_schedule (`dict`, *optional*):
            A learning rate that changes by whole epochs, instead of `lr_scheduler_type`; see
            `dappr_llm.training.epoch_schedules.learning_rate`.
        eval_every_epochs (`int`, *optional*):
            With strategies of `"epoch"`: evaluate and save only every so many epochs, and after the last.
    """

    max_length: int = field(default=300, metadata={"help": "Tokens of a prompt at the most."})
    truncation: str | None = field(
        default=None, metadata={"help": "What a longer prompt loses: start, end, head_tail."}
    )
    num_choices: int | None = field(default=None, metadata={"help": "K, the answer letters trained on."})
    evidence_offset: str | None = field(
        default=None, metadata={"help": "A number added to every answer logit, or 'auto'."}
    )
    head_init: str = field(default="auto", metadata={"help": "Where a new head starts: auto, random or probe."})
    prompt: dict | str | None = field(default=None, metadata={"help": "Fields of Prompt that differ."})
    on_nonfinite: str = field(default="stop", metadata={"help": "'stop' or 'skip' when a loss is NaN or infinite."})
    epoch_rows: int | None = field(default=None, metadata={"help": "Rows of a stream that count as an epoch."})
    monitor_ood_rows: int = field(default=0, metadata={"help": "Rows of each OOD set read at every evaluation."})
    packing: bool = field(default=True, metadata={"help": "Compute batches without padding."})
    share_prefix: bool = field(default=True, metadata={"help": "Compute what prompts share once per batch."})
    eval_tokens: int = field(default=4096, metadata={"help": "Prompt tokens of a prediction batch; 0: by prompts."})
    trunk_cache: str | None = field(default=None, metadata={"help": "A folder for states below the adapter."})
    gradient_checkpointing: bool | str = field(  # type: ignore[assignment]
        default=False, metadata={"help": "Compute activations again in the backward pass; 'auto': if memory asks."}
    )
    # If on, Trainer synchronises with the device at every step to look for NaN, and leaves NaN losses out of the log.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Leave NaN losses out of the log."})
    class_weights: dict | str | None = field(default=None, metadata={"help": "'balanced', or a weight by label."})
    epoch_schedule: dict | str | None = field(default=None, metadata={"help": "A learning rate by whole epochs."})
    eval_every_epochs: int | None = field(default=None, metadata={"help": "Evaluate every so many epochs."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Our collator picks the columns itself."})

    _VALID_DICT_FIELDS = [
        *getattr(TrainingArguments, "_VALID_DICT_FIELDS", []), "prompt", "epoch_schedule", "class_weights"
    ]  # fmt: skip

    def __post_init__(self) -> None:
        metric = self.metric_for_best_model
        if metric is not None and self.greater_is_better is None:  # type: ignore[has-type]
            self.greater_is_better = metric.removeprefix("eval_") not in {"loss", *LOWER_IS_BETTER}
        # Texts on HfArgumentParser's command line.
        for name in ("prompt", "epoch_schedule", "evidence_offset", "class_weights"):
            setattr(self, name, _parsed(getattr(self, name)))
        check(OwnArguments, {name: getattr(self, name) for name in OwnArguments.__annotations__}, "DAPPrConfig")
        self.checkpoint_if_needed = self.gradient_checkpointing == "auto"  # settled when training starts
        if self.checkpoint_if_needed:
            self.gradient_checkpointing = False
        # Every trained parameter gets a gradient; searching for unused ones costs time in each step.
        if self.ddp_find_unused_parameters is None:  # type: ignore[has-type]
            self.ddp_find_unused_parameters = False
        for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context"):
            if getattr(self, f"dataloader_{name}", None) and not self.dataloader_num_workers:
                raise UserError(f"train.dataloader_{name} is for worker processes: set dataloader_num_workers too")
        if self.trunk_cache and self.dataloader_num_workers:
            raise UserError("trunk_cache is filled by the process that trains: set dataloader_num_workers: 0")
        if not torch.accelerator.is_available():
            # Without this, accelerate does not set up a process group for a launch on CPUs.
            self.use_cpu = True
            self.dataloader_pin_memory = False  # there is no device to copy to, and torch would warn
        super().__post_init__()
        if self.accelerator_config.dispatch_batches is None:
            # Batches hold a packed layout besides tensors, so rank 0 must not collate and split them for the others.
            self.accelerator_config.dispatch_batches = False
        for name in self.report_to if isinstance(self.report_to, list) else [self.report_to]:
            if name in _TRACKERS and all(importlib.util.find_spec(module) is None for module in _TRACKERS[name]):
                raise UserError(f"train.report_to: {name} needs its package: pip install {_TRACKERS[name][0]}")

    @property
    def compile_options(self) -> dict[str, Any]:
        """What `torch.compile` is given."""
        mode = {"mode": self.torch_compile_mode} if self.torch_compile_mode else {}
        return {"backend": self.torch_compile_backend, **mode}

    def install_callbacks(
        self, trainer: DAPPrTrainer, ood_datasets: Mapping[str, Any] | None = None
    ) -> tuple[InterruptCallback, NonFiniteGuard, MethodHooks | None]:
        """
        Add the callbacks that these arguments, and the trainer's method, ask for.

        Args:
            trainer (`DAPPrTrainer`):
                The trainer.
            ood_datasets (`Mapping[str, Dataset]`, *optional*):
                What `monitor_ood_rows` watches.

        Returns:
            `tuple`: Those that the trainer talks to itself.
        """
        from .callbacks.interrupt import InterruptCallback
        from .callbacks.nonfinite_guard import NonFiniteGuard
        from .callbacks.progress_lines import replace_progress
        from .callbacks.train_log import TrainLog
        from .chance import ChanceMonitor

        replace_progress(trainer)
        trainer.add_callback(TrainLog())
        trainer.step_log.chance = ChanceMonitor(trainer)
        trainer.add_callback(trainer.step_log.chance)
        interrupt, guard, hooks = InterruptCallback(), NonFiniteGuard(trainer), None
        trainer.add_callback(interrupt)
        trainer.add_callback(guard)
        if trainer.method.needs or trainer.backend.has_head:
            from .callbacks.method_hooks import MethodHooks

            hooks = MethodHooks(trainer)
            trainer.add_callback(hooks)
        if self.eval_every_epochs:
            from .callbacks.every_epochs import EveryEpochs

            trainer.add_callback(EveryEpochs(self.eval_every_epochs))
        if self.monitor_ood_rows:
            from .callbacks.ood_monitor import OODMonitor

            trainer.add_callback(OODMonitor(trainer, ood_datasets or {}, self.monitor_ood_rows))
        return interrupt, guard, hooks


def _parsed(value: Any) -> Any:
    """The value of a text in JSON; other values and texts as they are, for the schema to judge."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
