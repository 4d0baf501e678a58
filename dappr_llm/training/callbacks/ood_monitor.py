"""Logs epistemic uncertainty and evidence on out-of-distribution rows at each evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ...core.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from ..config import DAPPrConfig
    from ..trainer import DAPPrTrainer

logger = logging.getLogger(__name__)


class OODMonitor(TrainerCallback):
    """
    At each evaluation, reads a few rows of every OOD set and logs `ood/NAME/epistemic` and `ood/NAME/alpha0`.

    For watching only: nothing is chosen by these figures, and the rows are the first of each set, always the same.

    Args:
        trainer (`DAPPrTrainer`):
            The trainer it is added to.
        sets (`Mapping[str, Dataset]`):
            Rows by name.
        rows (`int`):
            How many of each.
    """

    def __init__(self, trainer: DAPPrTrainer, sets: Mapping[str, Any], rows: int):
        if rows < 1:
            raise UserError(f"monitor_ood_rows must be at least 1, got {rows}")
        if not sets:
            logger.warning("monitor_ood_rows is set without OOD rows: give data.ood (ood_datasets in Python)")
        self.trainer = trainer
        self.sets = {name: _first(dataset, rows) for name, dataset in sets.items()}

    def on_evaluate(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        values: dict[str, float] = {}
        for name, rows in self.sets.items():
            table = self.trainer.predict_table(rows, name, "monitor")
            values[f"ood/{name}/epistemic"] = float(table.epistemic.mean())
            if table.alpha is not None:
                values[f"ood/{name}/alpha0"] = float(table.alpha.sum(-1).mean())
        if values:
            self.trainer.log(values)


def _first(dataset: Any, rows: int) -> Any:
    return dataset[:rows] if isinstance(dataset, list) else dataset.select(range(min(rows, len(dataset))))
