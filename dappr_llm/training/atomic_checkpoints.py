"""A `Trainer` whose saved state survives kills, full disks and bad batches: what `DAPPrTrainer` is built on."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import rotate_checkpoints

from ..core import checkpoint, manifest
from ..core.errors import UserError
from ..inference.batching import is_stream
from ..methods.base import Progress, Scheduled
from .callbacks.nonfinite_guard import NonFiniteWatch

logger = logging.getLogger(__name__)

_STATE = "trainer_state.json"


class DurableTrainer(Trainer):
    """
    A `Trainer` with atomic, validated checkpoints and a guard against losses that are not finite.

    Checkpoints are written under a hidden name and renamed when whole, each with a manifest of sizes and SHA-256 that
    is checked before training goes on from it. A failed save leaves the last good checkpoint alone and becomes a
    `UserError` in every process.
    """

    _in_checkpoint = False
    _watch: NonFiniteWatch | None = None

    # --- saving -------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is None:
            self.store_flos()
        run_dir = Path(self._get_output_dir(trial=trial))
        final = run_dir / f"checkpoint-{self.state.global_step}"
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(final)
        staged = manifest.staging(final)
        self._together(lambda: self._empty(staged), staged, final)
        self._in_checkpoint = True
        try:
            self._together(lambda: self._write_state(str(staged)), staged, final)
        finally:
            self._in_checkpoint = False
        self._together(lambda: self._publish(staged, final), staged, final)
        # Where nodes share no disk, what the others wrote (their random states) waits to be named on each of them.
        self._together(lambda: self._publish_on_node(staged, final), staged, final)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(run_dir), self.args.save_total_limit, best, use_mtime=True)

    def _empty(self, staged: Path) -> None:
        if self.args.should_save:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)

    def _write_state(self, folder: str) -> None:
        """Everything that resuming needs, by Trainer's own writers; sharded models are written by all processes."""
        self.save_model(folder, _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(folder)
            self._save_scaler(folder)
            self._save_rng_state(folder)
        if self.args.should_save:
            for callback in [*self.callback_handler.callbacks, self.control]:
                if isinstance(callback, ExportableState):
                    self._note(type(callback).__name__, callback.state())
            self.state.save_to_json(os.path.join(folder, _STATE))

    def _note(self, name: str, state: dict[str, Any]) -> None:
        known = self.state.stateful_callbacks.get(name)  # a list where several callbacks share a class
        if isinstance(known, list):
            known.append(state)
        else:
            self.state.stateful_callbacks[name] = state

    def _publish(self, staged: Path, final: Path) -> None:
        if self.args.should_save:
            manifest.publish(staged, final)

    def _publish_on_node(self, staged: Path, final: Path) -> None:
        if not self.args.should_save and self.is_local_process_zero() and staged.is_dir():
            try:
                manifest.publish(staged, final)
            except FileNotFoundError:  # seen through a cache of a shared disk, on which the first process was quicker
                return

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Save the model for `load_checkpoint` and PEFT: all of its files, or none of them.

        Args:
            output_dir (`str`, *optional*):
                The folder; by default `args.output_dir`. What else is in it stays.
        """
        if self._in_checkpoint:  # already inside a folder that is named when it is whole
            super().save_model(output_dir, _internal_call=True)
            return
        final = Path(output_dir or self.args.output_dir)
        staged = final / f".model{manifest.PARTIAL}"
        self._together(lambda: self._empty(staged), staged, final)
        self._together(lambda: super(DurableTrainer, self).save_model(str(staged), _internal_call=True), staged, final)
        self._together(lambda: self._publish_into(staged, final), staged, final)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _publish_into(self, staged: Path, final: Path) -> None:
        if self.args.should_save:
            manifest.publish_into(staged, final)

    def _together(self, work: Callable[[], None], staged: Path, final: Path) -> None:
        """Do a part of a save in every process; if it fails in one, all of them stop, and the disk is given back."""
        problem: Exception | None = None
        try:
            work()
        except Exception as error:
            if not is_write_error(error):
                raise
            problem = error
        # Processes that save a sharded model talk to each other while they do: there the launcher ends the others.
        alone = problem is not None and (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if not alone and not self._any(problem is not None):
            return
        if self.args.should_save:
            shutil.rmtree(staged, ignore_errors=True)
        reason = reason_of(problem) if problem else "another process could not write, see its message"
        kept = next((p for p in checkpoint.checkpoints(self.args.output_dir) if (p / manifest.NAME).is_file()), None)
        rest = f"{kept} is whole: " if kept else ""
        raise UserError(
            f"Cannot save {final}: {reason}. {rest}make room or mend the folder, then go on with --resume"
        ) from problem

    def _any(self, flag: bool) -> bool:
        """Whether a flag is set in any process."""
        if self.args.world_size <= 1:
            return flag
        value = torch.tensor(float(flag), device=self.args.device)
        torch.distributed.all_reduce(value)
        return bool(value.item())

    # --- resuming -----------------------------------------------------------------------------------------------

    def resume_folder(self, resume: str | bool | None) -> str | None:
        """
        The checkpoint to go on from, checked; the first process decides for all.

        Args:
            resume (`str` or `bool`, *optional*):
                A folder; `True`: the last good one in `output_dir`; `"auto"`: the same if there is one.
        """
        found: list[Any] = [None, None]
        if self.args.should_save:
            manifest.tidy(self.args.output_dir)
        if self.is_world_process_zero():
            try:
                found[0] = self._find(resume)
            except UserError as error:
                found[1] = str(error)
        if self.args.world_size > 1:
            torch.distributed.broadcast_object_list(found, src=0)
        if found[1]:
            raise UserError(found[1])
        return found[0]

    def _find(self, resume: str | bool | None) -> str | None:
        if not resume:
            return None
        if resume in ("auto", "true", True):
            last = checkpoint.last_checkpoint(self.args.output_dir)
            if last is None and resume != "auto":
                raise UserError(f"{self.args.output_dir} holds no checkpoint to resume from")
            if last is None and checkpoint.checkpoints(self.args.output_dir):
                logger.warning(f"{self.args.output_dir} holds no whole checkpoint: training starts anew")
            return last
        manifest.check(str(resume))
        if not Path(str(resume), _STATE).is_file():
            raise UserError(f"{resume} is no checkpoint to resume from: it holds no {_STATE}")
        return str(resume)

    def _load_best_model(self) -> None:
        manifest.check(self.state.best_model_checkpoint)
        super()._load_best_model()

    # --- several processes --------------------------------------------------------------------------------------

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; then each process draws its own noise and dropout. The order of rows has a seed of its own."""
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.args.world_size > 1:
            torch.manual_seed(self.args.seed + self.args.process_index)
        return prepared

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """
        As Trainer's; the last batch of an epoch also gets each row's share of the loss.

        Where rows do not divide by processes, accelerate fills the last round up with rows from the start. Those count
        for nothing here, and the others as they would in one process: processes change no gradient.
        """
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        state = self.accelerator.gradient_state
        if self.args.world_size > 1 and batches and state.end_of_dataloader and state.remainder > 0:
            shape = (state.remainder, self.args.world_size, self.args.process_index)
            batches[-1]["shares"] = real_shares(len(batches[-1]["labels"]), *shape)
        return batches, items

    def stream_progress(self) -> Progress:
        """Where training stands on a stream, in epochs of `args.epoch_rows` rows."""
        rows = self.args.epoch_rows
        if not rows:
            return Progress(epoch=0.0, epochs=1.0)
        batch = self.get_total_train_batch_size(self.args)
        return Progress(epoch=self.state.global_step * batch / rows, epochs=self.args.max_steps * batch / rows)

    def check_stream(self, method: Any) -> None:
        """Refuse what a stream cannot do, before anything is trained."""
        if not is_stream(self.train_dataset):
            return
        if self.args.max_steps <= 0:
            raise UserError("Training from a stream needs train.max_steps, since its length is not known")
        if isinstance(method, Scheduled) and method.schedule != "constant" and not self.args.epoch_rows:
            raise UserError(
                f"method.schedule: {method.schedule} counts epochs, and a stream has none: set train.epoch_rows (rows "
                "that count as one), or schedule: constant"
            )

    # --- losses that are not finite -------------------------------------------------------------------------------

    @property
    def watch(self) -> NonFiniteWatch:
        """Notices rows whose loss is not finite; see `DAPPrConfig.on_nonfinite`."""
        if self._watch is None:
            if self.args.on_nonfinite == "skip" and self.is_deepspeed_enabled:
                raise UserError("on_nonfinite: skip does not work with DeepSpeed, which steps by itself; use stop")
            self._watch = NonFiniteWatch()
        return self._watch

    def row_names(self, rows: Tensor | None) -> list[str]:
        """Ids of rows of the training set, given the `row` column of a batch."""
        if rows is None or is_stream(self.train_dataset):
            return []
        ids = getattr(self.train_dataset, "ids", None)
        if ids is not None:  # images: a row itself would have to be decoded
            return [str(ids[int(row)]) for row in rows]
        return [str(self.train_dataset[int(row)].get("id", int(row))) for row in rows]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Trainer asks for the norm right before each optimizer step: the place to notice that one must not happen."""
        norm = super()._get_grad_norm(model, grad_norm)
        # With a scaler infinite norms are everyday, and handled by it.
        scaled = getattr(self.accelerator, "scaler", None) is not None
        bad = self.watch.bad or not (scaled or is_finite(norm))
        if self._any(bad):
            report = self.watch.report(self.args.world_size, self.state.global_step + 1)
            if self.args.on_nonfinite == "stop":
                raise UserError(f"{report}. {self.watch.remedy}")
            model.zero_grad(set_to_none=True)  # without gradients the optimizer leaves every weight as it is
            if self.is_world_process_zero():
                logger.warning(f"{report}; this step changes no weight")
        self.watch.clear()
        return norm


def real_shares(size: int, real: int, processes: int, index: int) -> Tensor:
    """
    Shares of a process's rows in the loss of a last round of which only the first `real` rows are not repeats.

    Gradients are averaged over processes, hence the factor: with 10 real rows, 2 processes and batches of 8, the
    second process has 2 of them, and each of the 10 counts 2/10 where it is.
    """
    own = min(max(real - index * size, 0), size)
    return torch.cat([torch.full((own,), processes / real), torch.zeros(size - own)])


def is_finite(norm: Any) -> bool:
    """Whether a norm is finite: a number, a tensor, a sharded one, or nothing (DeepSpeed, between steps)."""
    if norm is None:
        return True
    return math.isfinite(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))


def is_write_error(error: BaseException) -> bool:
    """Whether an error is one of writing: Python's own, safetensors', or torch's, which is a plain RuntimeError."""
    from safetensors import SafetensorError

    if isinstance(error, OSError):
        return True
    text = str(error)
    if isinstance(error, SafetensorError):
        return "I/O" in text or "os error" in text.lower() or "No space" in text
    return isinstance(error, RuntimeError) and ("PytorchStreamWriter" in text or "inline_container" in text)


def reason_of(error: BaseException) -> str:
    """The operating system's reason, also where a library wrapped it."""
    for part in (error, error.__cause__, error.__context__):
        if isinstance(part, OSError) and part.strerror:
            return part.strerror
    return str(error).strip().splitlines()[0]
