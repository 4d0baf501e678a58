"""`trainer_state.json` of a checkpoint: how far training came, in Trainer's own form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from .types import File, Natural, Text, Weight


class TrainerStateFile(File):
    """What resuming relies on; NaN is allowed in the log, where a loss may have been NaN."""

    model_config = ConfigDict(extra="allow", strict=True)

    global_step: Natural
    epoch: Weight | None = None
    max_steps: Annotated[int, Field(ge=-1, le=10**9)]
    num_train_epochs: Weight
    train_batch_size: Natural | None = None
    logging_steps: Weight | None = None
    eval_steps: Weight | None = None
    save_steps: Weight | None = None
    log_history: Annotated[list[dict[str, Any]], Field(max_length=10_000_000)]
    best_metric: float | None = None
    best_global_step: Natural | None = None
    best_model_checkpoint: Text | None = None
    stateful_callbacks: dict[str, Any]
    total_flos: float = 0.0
    num_input_tokens_seen: Natural = 0
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: Text | None = None
    trial_params: dict[str, Any] | None = None
