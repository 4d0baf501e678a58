"""Writes everything that is logged into `train_log.jsonl` of the output folder."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ...core.checkpoint import TRAIN_LOG
from ...core.errors import UserError
from ...core.files import write_text

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from ..config import DAPPrConfig

logger = logging.getLogger(__name__)


class TrainLog(TrainerCallback):
    """
    One JSON line per log entry, with its step; a resumed training goes on below the checkpoint's entries.

    A log that cannot be written is said once and stops no training.
    """

    def __init__(self) -> None:
        self._path: Path | None = None

    def on_train_begin(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and args.output_dir:
            self._path = Path(args.output_dir, TRAIN_LOG)
            try:
                write_text(self._path, "".join(map(_line, state.log_history)))
            except UserError as error:
                self._give_up(str(error))

    def on_log(self, args: DAPPrConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._path is not None and state.log_history:
            try:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(_line(state.log_history[-1]))
            except OSError as error:
                self._give_up(f"Cannot write {self._path}: {error.strerror or error}.")

    def _give_up(self, reason: str) -> None:
        logger.warning(f"{reason} Training goes on without this log.")
        self._path = None


def _line(entry: Mapping[str, Any]) -> str:
    values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
    return json.dumps(values, default=str, allow_nan=False) + "\n"
