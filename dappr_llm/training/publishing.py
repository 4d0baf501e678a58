"""What `DAPPrTrainer` does with the Hub, and what it leaves in a checkpoint for those who calibrate it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..core import checkpoint
from ..core.errors import UserError
from ..inference import hub
from ..inference.batching import is_stream
from .memory import SteppingTrainer

logger = logging.getLogger(__name__)

_TRAINERS_OWN = ("blocking", "model_name", "language", "tags", "finetuned_from", "tasks", "dataset_tags", "dataset",
                 "dataset_args")  # fmt: skip


class PublishingTrainer(SteppingTrainer):
    """
    A `Trainer` that publishes through `dappr_llm.inference.hub`.

    Trainer's own way would write its arguments as a pickle, replace our card by a draft that PEFT then edits, and
    commit a folder in several steps. Here `push_to_hub=True` gives one commit with our card each time.
    """

    backend: Any
    labelled_rows: Any = None  # training rows without auxiliary ones
    _fingerprints: list[str] | None = None

    def init_hf_repo(self, token: str | None = None) -> None:
        try:
            super().init_hf_repo(token)
        except Exception as error:
            name = self.args.hub_model_id or Path(self.args.output_dir).name
            raise UserError(f"push_to_hub is set, but {checkpoint.hub_problem(error, name)}") from None

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the card is rendered from the checkpoint's files when it is pushed."""

    def push_to_hub(self, commit_message: str | None = "End of training", **kwargs: Any) -> Any:
        """
        Save and upload the model with its card, in one commit.

        Args:
            commit_message (`str`, *optional*, defaults to `"End of training"`):
                Message of the commit.
            kwargs:
                `token`, `revision`, `tables` and `license` as in `dappr_llm.push`.

        Returns:
            `Pushed`: Repository, page and commit; `None` in all processes but the first.
        """
        self.save_model(_internal_call=True)
        return self._push(Path(self.args.output_dir), commit_message or "End of training", **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.args.hub_strategy == "end":
            return
        try:
            self._push(Path(checkpoint_folder), f"Training in progress, step {self.state.global_step}")
        except UserError as error:  # hours of training are worth more than one upload; the last one must succeed
            logger.warning(str(error))

    def _push(self, folder: Path, message: str, **kwargs: Any) -> Any:
        if not self.is_world_process_zero():
            return None
        if self.hub_model_id is None:
            self.init_hf_repo(kwargs.get("token"))
        args = self.args
        defaults = {"private": args.hub_private_repo, "revision": args.hub_revision, "token": args.hub_token}
        given = {key: value for key, value in kwargs.items() if key not in _TRAINERS_OWN}
        return hub.push(folder, str(self.hub_model_id), message=message, **{**defaults, **given})

    def save_fingerprints(self, folder: Path) -> None:
        """Which rows were trained on, so that calibration can refuse them."""
        rows = self.labelled_rows
        if rows is not None and not is_stream(rows) and self._fingerprints is None:  # a stream is read once
            self._fingerprints = self.backend.fingerprints(rows)
        if self._fingerprints:
            checkpoint.save_fingerprints(folder, self._fingerprints)
