"""A method's loss terms for a batch whose rows offer different numbers of options."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..core.outputs import Outputs
from ..methods import Method, Progress

Terms = dict[str, Tensor]  # one value per row, by name


def row_losses(
    method: Method,
    num_choices: int,
    outputs: Outputs,
    labels: Tensor,
    groups: Mapping[int, Tensor],
    progress: Progress,
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
    """
    terms: Terms = {}
    logged: Terms = {}
    for count, rows in groups.items():
        index = None if len(groups) == 1 else rows.to(labels.device)
        part = outputs if index is None else outputs.select(index)
        part = part.narrow(num_choices, count)
        part_labels = labels if index is None else labels[index]
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
