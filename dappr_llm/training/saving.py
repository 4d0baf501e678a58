"""What `DAPPrTrainer` writes into a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import checkpoint
from ..core.backend import is_stream
from ..core.errors import UserError
from ..core.files import write_text
from ..core.secrets import mask
from ..evaluation.results import to_json
from ..inference.card import save_card
from .defaults import restore
from .run_folder import check_resumed

if TYPE_CHECKING:
    from torch import Tensor

    from .trainer import DAPPrTrainer


def write_checkpoint(trainer: DAPPrTrainer, folder: Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """
    PEFT's or transformers' own files, the tokenizer, and our sidecar files.

    `save_embedding_layers=False`: with LoRA on the output head PEFT would also write the frozen head itself (250 MiB
    for Mistral-7B). Trainer's pickled `training_args.bin` is written as JSON instead.

    Args:
        trainer (`DAPPrTrainer`):
            Whose model is saved.
        folder (`Path`):
            Where to.
        state_dict (`Mapping`, *optional*):
            The weights, where they were gathered from several ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    extra = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
    model.save_pretrained(folder, state_dict=state_dict, **extra)
    trainer.backend.save_processor(folder)
    arguments = to_json(mask(json.loads(trainer.args.to_json_string())))  # an infinite max_grad_norm is no JSON
    write_text(folder / "training_args.json", json.dumps(arguments, indent=2, allow_nan=False))
    config = sidecar_of(trainer)
    checkpoint.save_sidecar(folder, config)
    save_card(folder, config)
    zero_shot = trainer.args.num_train_epochs == 0 and trainer.args.max_steps <= 0  # nothing was trained on
    if (fingerprints := row_fingerprints(trainer)) and not zero_shot:
        checkpoint.save_fingerprints(folder, fingerprints)


def sidecar_of(trainer: DAPPrTrainer) -> dict[str, Any]:
    """What `uncertainty_config.json` says of a trainer's model."""
    method = {"name": trainer.method_name, "options": trainer.method.options()}
    chosen = {"chosen": sorted(trainer.chosen)} if trainer.chosen else {}
    return {"method": method, **chosen, **trainer.backend.config()}


def row_fingerprints(trainer: DAPPrTrainer) -> list[str] | None:
    """Short hashes of the training rows; `None` for a stream, which is read once."""
    rows = trainer.labelled_rows
    if trainer.fingerprints is None and rows is not None and not is_stream(rows):
        trainer.fingerprints = trainer.backend.fingerprints(rows)
    return trainer.fingerprints


def restore_settings(trainer: DAPPrTrainer, folder: str | Path) -> None:
    """Take over what training had fitted or chosen when it was interrupted; a checkpoint of another job is refused."""
    trainer.backend.evidence_offset = _same_job(trainer, Path(folder))["evidence_offset"]


def _same_job(trainer: DAPPrTrainer, folder: Path) -> dict[str, Any]:
    restore(trainer, checkpoint.load_sidecar(folder)[1])
    return check_resumed(
        folder, json.loads(json.dumps(sidecar_of(trainer), allow_nan=False)), row_fingerprints(trainer)
    )


def check_last(trainer: DAPPrTrainer, folder: Path) -> None:
    """Refuse to go on in a folder whose last checkpoint is another job's, before anything is written there."""
    for last in checkpoint.checkpoints(folder):
        try:
            checkpoint.load_sidecar(last)
        except UserError:  # a damaged checkpoint, which resuming passes over
            continue
        _same_job(trainer, last)
        return
