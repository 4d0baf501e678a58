"""Rows whose loss is NaN or infinite: which they are, and which terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_SHOWN = 5


class NonFiniteWatch:
    """
    Remembers, between two optimizer steps, the rows whose loss is not finite and every row that was seen.

    In each process on its own; `report` brings together what all of them saw.
    """

    remedy = (
        "Look at those rows, lower train.learning_rate or train.max_grad_norm, or set train.on_nonfinite: skip to "
        "leave out such steps"
    )

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin with the next step."""
        self.found: list[str] = []
        self.bad = False

    def see(
        self, terms: Mapping[str, Tensor], rows: Tensor | None, names: Callable[[Tensor | None], list[str]]
    ) -> bool:
        """
        Look at the terms of one micro-batch; returns whether all of them are finite.

        Args:
            terms (`Mapping[str, Tensor]`):
                Loss terms, one value per row.
            rows (`Tensor`, *optional*):
                The rows' numbers in the training set.
            names (`Callable`):
                Turns such numbers into ids.
        """
        good = {key: torch.isfinite(value.detach()) for key, value in terms.items()}
        # Trainer waits for each step's loss anyway: one more look costs nothing.
        if bool(torch.stack([value.all() for value in good.values()]).all()):
            return True
        self.bad = True
        bad_rows = ~torch.stack(list(good.values())).all(0)
        places = bad_rows.nonzero().squeeze(-1)
        ids = names(None if rows is None else rows[places.to(rows.device)]) or [
            f"#{int(i)} of its batch" for i in places
        ]
        for name, place in zip(ids, places.tolist(), strict=True):
            values = [f"{key} {terms[key][place].item():g}" for key in terms if not bool(good[key][place])]
            self.found.append(f"{name} ({', '.join(values)})")
        return False

    def report(self, world_size: int, step: int) -> str:
        """What was found, over all processes; every one of them must call it."""
        found = self.found
        if world_size > 1:
            parts: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(parts, self.found)
            found = [text for part in parts for text in part]
        if not found:
            return f"Step {step}: the gradient is not finite although every row's loss is"
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f"Step {step}: the loss is not finite for rows {', '.join(found[:_SHOWN])}{more}"
