"""Writes a run's recipe, with what the run chose for itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ...core.files import is_main_process, write_text

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from ...core.recipe import Recipe
    from ..config import DAPPrConfig
    from ..trainer import DAPPrTrainer


class RecordChosen(TrainerCallback):
    """
    Writes the recipe, and again when training begins, with the settings that nobody gave.

    Args:
        trainer (`DAPPrTrainer`):
            The trainer that chooses.
        recipe (`Recipe`):
            What was given.
        path (`Path`):
            The `recipe.yaml` of the run's folder.
    """

    def __init__(self, trainer: DAPPrTrainer, recipe: Recipe, path: Path):
        self.trainer, self.recipe, self.path = trainer, recipe, path
        self._write()

    def _write(self) -> None:
        if is_main_process():
            write_text(self.path, self.recipe.with_chosen(self.trainer.chosen).to_yaml())

    def on_train_begin(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.trainer.chosen:
            self._write()
