"""Callbacks that every `DAPPrTrainer` installs, as its arguments and its method ask for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.errors import UserError
from ...methods import Method
from .interrupt import InterruptCallback
from .nonfinite_guard import NonFiniteGuard

if TYPE_CHECKING:
    from ..trainer import DAPPrTrainer
    from .method_hooks import MethodHooks

logger = logging.getLogger(__name__)

_SINGLE_BACKWARD = ("fp16", "bf16", "gradient_checkpointing", "torch_compile")


def install_callbacks(
    trainer: DAPPrTrainer, ood_datasets: Mapping[str, Any] | None = None
) -> tuple[InterruptCallback, NonFiniteGuard, MethodHooks | None]:
    """
    Add the callbacks of a trainer; those that it talks to itself are returned.

    Args:
        trainer (`DAPPrTrainer`):
            Its arguments and its method decide which.
        ood_datasets (`Mapping[str, Dataset]`, *optional*):
            What `args.monitor_ood_rows` watches.
    """
    args = trainer.args
    check_arguments(trainer.method, args)
    interrupt, guard, hooks = InterruptCallback(), NonFiniteGuard(trainer), None
    trainer.add_callback(interrupt)
    trainer.add_callback(guard)
    if trainer.backend.has_head or trainer.method.needs & {"fit_before", "fit_after", "after_step"}:
        from .method_hooks import MethodHooks

        hooks = MethodHooks(trainer)
        trainer.add_callback(hooks)
    if args.eval_every_epochs:
        from .every_epochs import EveryEpochs

        trainer.add_callback(EveryEpochs(args.eval_every_epochs))
    if args.monitor_ood_rows:
        from .ood_monitor import OODMonitor

        if not ood_datasets:
            logger.warning(
                "monitor_ood_rows is set, but there are no OOD rows: give data.ood (ood_datasets in Python)"
            )
        trainer.add_callback(OODMonitor(trainer, ood_datasets or {}, args.monitor_ood_rows))
    return interrupt, guard, hooks


def check_arguments(method: Method, args: Any) -> None:
    """Refuse training arguments under which a loss cannot be differentiated twice."""
    if "input_grad" not in method.needs:
        return
    for name in _SINGLE_BACKWARD:
        if getattr(args, name, False):
            raise UserError(
                f"{type(method).__name__} differentiates its loss twice, and train.{name} forbids that; leave it out"
            )
