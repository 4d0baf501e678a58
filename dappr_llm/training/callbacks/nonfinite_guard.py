"""Losses, gradients and weights that are NaN or infinite: stop and name the rows, or skip the step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ...core.backend import is_stream
from ...core.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from ..config import DAPPrConfig
    from ..trainer import DAPPrTrainer

logger = logging.getLogger(__name__)

_SHOWN = 5
_REMEDY = (
    "Look at those rows, lower train.learning_rate or train.max_grad_norm, or set train.on_nonfinite: skip to "
    "leave out such steps"
)

_MOST_IN_A_ROW = 50  # a gradient scaler that starts high needs about 16 steps to settle
_DIVERGED = (
    "The model has diverged, and the run is not finished: lower train.learning_rate, then train again with "
    "--overwrite, or go on from an earlier checkpoint with --resume FOLDER"
)


class NonFiniteGuard(TrainerCallback):
    """
    Looks at every optimizer step for losses and gradients that are not finite; see `DAPPrConfig.on_nonfinite`.

    All ranks decide alike: a bad row on one of them stops or skips the step on all.

    Args:
        trainer (`DAPPrTrainer`):
            The trainer it is added to.
    """

    def __init__(self, trainer: DAPPrTrainer):
        self.trainer = trainer
        self._seen: list[tuple[dict[str, Tensor], Tensor | None]] = []
        self._steps = self._skipped = self._in_a_row = 0
        self._skips = ""  # why this step is skipped

    def see(self, terms: Mapping[str, Tensor], rows: Tensor | None) -> None:
        """
        Keep the loss terms of one micro-batch until the optimizer step; does not wait for the device.

        Args:
            terms (`Mapping[str, Tensor]`):
                Loss terms, one value per row.
            rows (`Tensor`, *optional*):
                The rows' numbers in the training set.
        """
        self._seen.append(({key: value.detach() for key, value in terms.items()}, rows))

    def on_train_begin(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._seen = []
        self._steps = self._skipped = self._in_a_row = 0
        if args.on_nonfinite == "skip" and self.trainer.is_deepspeed_enabled:
            raise UserError("on_nonfinite: skip does not work with DeepSpeed, which steps by itself; use stop")

    def on_pre_optimizer_step(
        self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A gradient scaler meets infinite gradients regularly, and handles them itself.
        scaled = getattr(self.trainer.accelerator, "scaler", None) is not None
        bad = self._bad_losses() or not (scaled or _finite_gradients(self.trainer.model))
        self._skips = ""
        if self.trainer.any_rank(bad):
            report = self._report(args.world_size, state.global_step + 1)
            if args.on_nonfinite == "stop":
                raise UserError(f"{report}. {_REMEDY}")
            self._skips = report
            self.trainer.model.zero_grad(set_to_none=True)  # the optimizer skips parameters without a gradient
            if state.is_world_process_zero:
                logger.warning(f"{report}; this step changes no weight")
        self._seen = []

    def on_optimizer_step(
        self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count skipped steps, ours and those of a gradient scaler: skipping helps against a bad row, not for long."""
        self._steps += 1
        if not self._skips and not self.trainer.accelerator.optimizer_step_was_skipped:
            self._in_a_row = 0
            return
        self._skipped += 1
        self._in_a_row += 1
        why = self._skips or f"Step {state.global_step + 1}: the gradient is not finite"
        if self._skips:
            self._refuse_weights(f"{why}, and weights are not finite either")
        if self._in_a_row >= _MOST_IN_A_ROW:
            raise UserError(f"{why}; {self._in_a_row} steps in a row changed no weight. {_DIVERGED}")

    def on_train_end(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._refuse_weights("Training ended with weights that are not finite")
        if self._steps and self._skipped == self._steps and not self.trainer.interrupt.stopped:
            raise UserError(f"All {self._steps} steps were skipped, so nothing was trained. {_DIVERGED}")

    def _refuse_weights(self, text: str) -> None:
        if self.trainer.any_rank(not _finite_weights(self.trainer.model)):
            raise UserError(f"{text}. {_DIVERGED}")

    def _bad_losses(self) -> bool:
        """Whether a loss since the last step is not finite: the only wait for the device in a step."""
        checks = [torch.isfinite(value).all() for terms, _ in self._seen for value in terms.values()]
        return bool(checks) and not bool(torch.stack(checks).all())

    def _found(self) -> list[str]:
        found = []
        for terms, rows in self._seen:
            good = {key: torch.isfinite(value) for key, value in terms.items()}
            places = (~torch.stack(list(good.values())).all(0)).nonzero().squeeze(-1)
            if not len(places):
                continue
            ids = _row_names(self.trainer.train_dataset, None if rows is None else rows[places.to(rows.device)])
            for name, place in zip(ids or [f"#{int(i)} of its batch" for i in places], places.tolist(), strict=True):
                values = [f"{key} {terms[key][place].item():g}" for key in terms if not bool(good[key][place])]
                found.append(f"{name} ({', '.join(values)})")
        return found

    def _report(self, world_size: int, step: int) -> str:
        """The bad rows of all ranks; a collective call."""
        found = self._found()
        if world_size > 1:
            parts: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(parts, found)
            found = [text for part in parts for text in part]
        if not found:
            return f"Step {step}: the gradient is not finite although every row's loss is"
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f"Step {step}: the loss is not finite for rows {', '.join(found[:_SHOWN])}{more}"


def _finite_weights(model: nn.Module) -> bool:
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters() if p.requires_grad]
    return all(bool(torch.isfinite(part.detach()).all()) for part in parts)


def _finite_gradients(model: nn.Module) -> bool:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        return True
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    return bool(torch.isfinite(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))


def _row_names(dataset: Any, rows: Tensor | None) -> list[str]:
    """Ids of rows of the training set, given their numbers."""
    if rows is None or is_stream(dataset):
        return []
    ids = getattr(dataset, "ids", None)
    if ids is not None:  # images: a row itself would have to be decoded
        return [str(ids[int(row)]) for row in rows]
    return [str(dataset[int(row)].get("id", int(row))) for row in rows]
