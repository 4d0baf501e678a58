"""A method's loss terms per row, the loss weights of a padded batch, and how far training has progressed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.backend import is_stream
from ..core.errors import UserError
from ..core.outputs import Outputs
from ..methods import Method, Progress
from ..methods.base import Scheduled

if TYPE_CHECKING:
    from accelerate.state import GradientState
    from transformers import Trainer, TrainingArguments

Terms = dict[str, Tensor]  # one value per row, by name


def row_losses(
    method: Method,
    num_choices: int,
    outputs: Outputs,
    labels: Tensor,
    groups: Mapping[int, Tensor],
    progress: Progress,
    smoothing: float = 0.0,
) -> tuple[Terms, Terms]:
    """
    Loss terms per row, and values that are only logged.

    Rows are grouped by their number of options, so that no method has to handle masks.

    Args:
        method (`Method`):
            Whose loss it is.
        num_choices (`int`):
            K, how many options were read of every row.
        outputs (`Outputs`):
            Of the whole batch.
        labels (`Tensor`):
            `[B]`.
        groups (`Mapping[int, Tensor]`):
            Row numbers by number of options, from the collator.
        progress (`Progress`):
            Where training stands.
        smoothing (`float`, *optional*, defaults to 0.0):
            Share of each label that is spread over all options of its row.
    """
    terms: Terms = {}
    logged: Terms = {}
    for count, rows in groups.items():
        index = None if len(groups) == 1 else rows.to(labels.device)
        part = outputs if index is None else outputs.select(index)
        part = part.narrow(num_choices, count)
        part_labels = labels if index is None else labels[index]
        if smoothing:
            part_labels = smooth_labels(part_labels, count, smoothing, part.logits.dtype)
        found = method.loss(part, part_labels, progress)
        with torch.no_grad():
            watched = method.monitor(part, part_labels, progress)
        for target, values in ((terms, found), (logged, watched)):
            for key, value in values.items():
                if index is None:
                    target[key] = value
                else:
                    target[key] = target.get(key, value.new_zeros(len(labels))).index_put((index,), value)
    return terms, logged


def smooth_labels(labels: Tensor, classes: int, smoothing: float, dtype: torch.dtype) -> Tensor:
    """Soft labels `[B, K]`: `1 - smoothing` on the label and `smoothing / K` on every class; 0 for auxiliary rows."""
    dtype = torch.promote_types(dtype, torch.float32)
    hard = torch.nn.functional.one_hot(labels.clamp_min(0), classes).to(dtype)
    return ((1 - smoothing) * hard + smoothing / classes) * (labels >= 0).unsqueeze(-1)


def last_batch_weights(size: int, real: int, world_size: int, rank: int) -> Tensor:
    """
    Loss weights for the padded last batch of an epoch; repeated rows get 0.

    Where rows do not divide by the ranks, accelerate fills the last global batch up with rows from the start.
    Gradients are averaged over ranks, hence the factor: with 10 real rows, 2 ranks and batches of 8, rank 1 has 2 of
    them, and each of the 10 weighs 2/10 on its rank.

    Args:
        size (`int`):
            Rows of this rank's batch.
        real (`int`):
            Rows of the global batch that are not repeats; they come first.
        world_size, rank (`int`):
            Number of ranks, and this one.
    """
    own = min(max(real - rank * size, 0), size)
    return torch.cat([torch.full((own,), world_size / real), torch.zeros(size - own)])


def weigh_last_batch(batches: list[dict[str, Any]], state: GradientState, args: TrainingArguments) -> None:
    """Give the rows of the last batch of an epoch their loss weights, where accelerate padded it with repeats."""
    if args.world_size > 1 and batches and state.end_of_dataloader and state.remainder > 0:
        size = len(batches[-1]["labels"])
        batches[-1]["loss_weights"] = last_batch_weights(size, state.remainder, args.world_size, args.process_index)


def training_progress(trainer: Trainer) -> Progress:
    """Where training stands; schedules of coefficients count whole epochs from 0, of `epoch_rows` rows on a stream."""
    args, state = trainer.args, trainer.state
    if not is_stream(trainer.train_dataset):
        epochs = state.num_train_epochs or math.ceil(args.num_train_epochs)
        return Progress(epoch=state.epoch or 0.0, epochs=epochs)
    if not args.epoch_rows:
        return Progress(epoch=0.0, epochs=1.0)
    batch = trainer.get_total_train_batch_size(args)
    return Progress(epoch=state.global_step * batch / args.epoch_rows, epochs=args.max_steps * batch / args.epoch_rows)


def check_stream(dataset: Any, args: Any, method: Method) -> None:
    """Refuse what training from a stream cannot do, before anything is trained."""
    if not is_stream(dataset):
        return
    if args.max_steps <= 0:
        raise UserError("Training from a stream needs train.max_steps, since its length is not known")
    if (
        isinstance(method, Scheduled)
        and method.regularised
        and method.schedule != "constant"
        and "schedule" in method.given  # otherwise one is chosen that needs no epochs
        and not args.epoch_rows
    ):
        raise UserError(
            f"method.schedule: {method.schedule} counts epochs, and a stream has none: set train.epoch_rows (rows "
            "that count as one), or schedule: constant"
        )
