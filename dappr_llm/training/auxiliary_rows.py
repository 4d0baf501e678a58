"""Auxiliary rows: training rows without a label, mixed among the labelled ones, for methods that learn from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import UserError
from ..methods import Method, served_by

if TYPE_CHECKING:
    from .config import DAPPrConfig
    from .trainer import DAPPrTrainer

UNLABELLED = -1


def check_auxiliary(method: Method, name: str, given: bool) -> None:
    """Raise a `UserError` if a method that needs auxiliary rows has none, or if any other method is given some."""
    wanted = "auxiliary_rows" in method.needs
    if wanted and not given:
        raise UserError(
            f"Method {name!r} learns from auxiliary rows beside the labelled ones: name a task in data.auxiliary "
            "(auxiliary_dataset in Python), one that no OOD test uses"
        )
    if given and not wanted:
        plain = set(served_by(frozenset()))
        users = [other for other in served_by(frozenset({"auxiliary_rows"})) if other not in plain]
        raise UserError(
            f"Method {name!r} has no use for auxiliary rows: leave data.auxiliary out, or choose {' or '.join(users)}"
        )


def check_names(recipe_name: str, auxiliary: str, train: str, ood: Sequence[str]) -> None:
    """Raise a `UserError` if the auxiliary task is also the training task or an OOD test task."""
    if auxiliary in (train, *ood):
        role = "the training task" if auxiliary == train else "an OOD test task"
        raise UserError(
            f"{recipe_name}: data.auxiliary is {auxiliary!r}, which is also {role}; results on it would mean nothing"
        )


class MixedRows:
    """
    Labelled rows, and after them auxiliary rows with label -1; a shuffling sampler mixes them.

    Args:
        labelled:
            Prepared training rows: items by number, columns by name.
        auxiliary:
            Prepared auxiliary rows, whatever their labels say.
        share (`float`, *optional*, defaults to 0.5):
            Share of auxiliary rows in an epoch. They are repeated where there are too few, and drawn where there are
            too many.
        seed (`int`, *optional*, defaults to 0):
            Which are drawn.
    """

    def __init__(self, labelled: Any, auxiliary: Any, share: float = 0.5, seed: int = 0):
        if not 0 < share < 1:
            raise UserError(f"data.auxiliary_share must be above 0 and below 1, got {share}")
        self.labelled, self.auxiliary = labelled, auxiliary
        count = max(round(len(labelled) * share / (1 - share)), 1)
        order = np.random.default_rng(seed).permutation(len(auxiliary))
        self.picks = np.resize(order, count)  # repeats the order as often as needed
        shared = set(getattr(auxiliary, "column_names", ()))
        self.column_names = [name for name in getattr(labelled, "column_names", ()) if name in shared]

    def __len__(self) -> int:
        return len(self.labelled) + len(self.picks)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._column(key)
        return self.__getitems__([key])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """A batch of rows in the order of `indices`; each source dataset is read once."""
        size = len(self.labelled)
        own = [int(i) for i in indices if i < size]
        other = [int(self.picks[i - size]) for i in indices if i >= size]
        fetched = iter(_rows(self.labelled, own)), iter(_rows(self.auxiliary, other))
        found = []
        for i in indices:
            row = dict(next(fetched[i >= size]))
            found.append({**row, "row": int(i), **({"labels": UNLABELLED} if i >= size else {})})
        return found

    def _column(self, name: str) -> list[Any]:
        if name not in self.column_names:
            raise KeyError(name)
        own = list(self.labelled[name])
        if name == "row":
            return list(range(len(self)))
        if name == "labels":
            return own + [UNLABELLED] * len(self.picks)
        other = self.auxiliary[name]
        return own + [other[i] for i in self.picks.tolist()]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of both datasets, on which random augmentation depends."""
        for rows in (self.labelled, self.auxiliary):
            if hasattr(rows, "set_epoch"):
                rows.set_epoch(epoch)


def _rows(rows: Any, indices: list[int]) -> Sequence[Any]:
    if not indices:
        return []
    return rows.__getitems__(indices) if hasattr(rows, "__getitems__") else [rows[i] for i in indices]


def mixed_rows(trainer: DAPPrTrainer, labelled: Any, auxiliary: Any, share: float, args: DAPPrConfig) -> MixedRows:
    """
    The training set of a trainer whose method learns from auxiliary rows.

    Args:
        trainer (`DAPPrTrainer`):
            Prepares the auxiliary rows; its method must want them.
        labelled:
            Prepared labelled rows.
        auxiliary:
            Auxiliary rows of any layout; a missing set is an error.
        share (`float`):
            Share of auxiliary rows in an epoch.
        args (`DAPPrConfig`):
            The seed.
    """
    check_auxiliary(trainer.method, trainer.method_name, auxiliary is not None)
    prepared = trainer.backend.augmented(trainer.prepare(auxiliary, "auxiliary_dataset", labelled=False))
    return MixedRows(labelled, prepared, share, args.data_seed or args.seed)
