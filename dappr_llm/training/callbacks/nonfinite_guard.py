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
        self._seen: list[tuple[dict[str, Tensor], Tensor | None, Callable[[Tensor | None], list[str]]]] = []

    def see(
        self, terms: Mapping[str, Tensor], rows: Tensor | None, names: Callable[[Tensor | None], list[str]]
    ) -> None:
        """
        Keep the terms of one micro-batch until the optimizer step; waits for nothing.

        Args:
            terms (`Mapping[str, Tensor]`):
                Loss terms, one value per row.
            rows (`Tensor`, *optional*):
                The rows' numbers in the training set.
            names (`Callable`):
                Turns such numbers into ids.
        """
        self._seen.append(({key: value.detach() for key, value in terms.items()}, rows, names))

    @property
    def bad(self) -> bool:
        """Whether a row seen since the last step is not finite: the one look at the device in a step."""
        looks = [torch.isfinite(value).all() for terms, _, _ in self._seen for value in terms.values()]
        return bool(looks) and not bool(torch.stack(looks).all())

    def _found(self) -> list[str]:
        found = []
        for terms, rows, names in self._seen:
            good = {key: torch.isfinite(value) for key, value in terms.items()}
            places = (~torch.stack(list(good.values())).all(0)).nonzero().squeeze(-1)
            if not len(places):
                continue
            ids = names(None if rows is None else rows[places.to(rows.device)])
            for name, place in zip(ids or [f"#{int(i)} of its batch" for i in places], places.tolist(), strict=True):
                values = [f"{key} {terms[key][place].item():g}" for key in terms if not bool(good[key][place])]
                found.append(f"{name} ({', '.join(values)})")
        return found

    def report(self, world_size: int, step: int) -> str:
        """What was found, over all processes; every one of them must call it."""
        found = self._found()
        if world_size > 1:
            parts: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(parts, found)
            found = [text for part in parts for text in part]
        if not found:
            return f"Step {step}: the gradient is not finite although every row's loss is"
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f"Step {step}: the loss is not finite for rows {', '.join(found[:_SHOWN])}{more}"
