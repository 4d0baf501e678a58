"""Calls the hooks of methods with a head of their own: fitting it, updating it after a step, training it in phases."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ...core.backend import without_wrapper
from ...core.errors import UserError
from ...core.outputs import Outputs
from ...inference.stochastic_passes import seeded
from ...methods import Method
from ..losses import training_progress

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from ..config import DAPPrConfig
    from ..trainer import DAPPrTrainer

logger = logging.getLogger(__name__)

_SINGLE_BACKWARD = ("fp16", "bf16", "gradient_checkpointing", "torch_compile")


def check_arguments(method: Method, args: Any) -> None:
    """Raise a `UserError` for training arguments under which a loss cannot be differentiated twice."""
    if "input_grad" not in method.needs:
        return
    for name in _SINGLE_BACKWARD:
        if getattr(args, name, False):
            raise UserError(
                f"{type(method).__name__} differentiates its loss twice, and train.{name} forbids that; leave it out"
            )


def head_of(model: nn.Module) -> nn.Module | None:
    """The method's own head in a model, however it is wrapped."""
    return getattr(without_wrapper(model), "method_head", None)


def fit_head(trainer: DAPPrTrainer) -> None:
    """
    Let the method fit its head to the training rows as they are, without augmentation.

    Every process fits, so that bad data fail everywhere alike; then all take over what the first one found.
    """
    head = head_of(trainer.model)
    features, labels = trainer.predictor.hidden_states(trainer.backend.plain(trainer.labelled_rows), "train_dataset")
    features, labels = features[labels >= 0], labels[labels >= 0]
    logger.info(f"Fitting {type(head).__name__} to the features of {len(labels)} training rows")
    with seeded(trainer.args.seed):
        trainer.method.fit_head(head, features, labels)
    if trainer.args.world_size > 1:
        for value in head.state_dict().values():  # type: ignore[union-attr]
            torch.distributed.broadcast(value, 0)


class MethodHooks(TrainerCallback):
    """
    Calls a method's hooks when their time has come.

    What is fitted before training is saved in every checkpoint and found there again when a run is resumed. What is
    fitted after training belongs to the final weights: a resumed run fits it at its own end.

    Args:
        trainer (`DAPPrTrainer`):
            The trainer; its `method` says what it needs.
    """

    def __init__(self, trainer: DAPPrTrainer):
        check_arguments(trainer.method, trainer.args)
        self.trainer = trainer
        self.needs: frozenset[str] = trainer.method.needs
        self._seen: list[tuple[Outputs, Tensor]] = []

    def remember(self, outputs: Outputs, labels: Tensor) -> None:
        """Keep the outputs of a micro-batch for `on_optimizer_step`."""
        if "after_step" in self.needs:
            self._seen.append((outputs.detach(), labels.detach()))

    def on_train_begin(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._seen = []
        if "fit_before" in self.needs and state.global_step == 0:
            fit_head(self.trainer)

    def on_pre_optimizer_step(
        self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Drop gradients of parameters outside the current phase: the optimizer then skips them entirely."""
        head = head_of(self.trainer.model)
        if head is None:
            return
        trained = self.trainer.method.trained(head, training_progress(self.trainer))
        if trained is not None:
            kept = set(map(id, trained))
            for parameter in self.trainer.model.parameters():
                if id(parameter) not in kept:
                    parameter.grad = None

    def on_optimizer_step(
        self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._seen:
            return
        gather = self.trainer.accelerator.gather
        labels = gather(torch.cat([labels for _, labels in self._seen]))
        outputs = [out for out, _ in self._seen]
        self._seen = []

        def joined(parts: list[Any]) -> Any:
            return None if parts[0] is None else gather(torch.cat(parts))

        heads = [out.head or {} for out in outputs]
        step = Outputs(
            logits=joined([out.logits for out in outputs]),
            features=joined([out.features for out in outputs]),
            head={key: joined([head[key] for head in heads]) for key in heads[0]},
        )
        self.trainer.method.after_step(head_of(self.trainer.model), step, labels)

    def on_train_end(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if "fit_after" in self.needs and not self.trainer.interrupt.stopped:
            fit_head(self.trainer)
