"""Checkpoints that survive kills and full disks: written under a hidden name, renamed, published in one commit."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_callback import ExportableState, TrainerState

from ..core import checkpoint, manifest
from ..core.errors import UserError, explained
from ..core.files import read_json
from ..core.schemas import check
from ..core.schemas.trainer_state import TrainerStateFile

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer

    from ..inference.hub import Pushed
else:
    _Trainer = object

logger = logging.getLogger(__name__)

_STATE = "trainer_state.json"
_LARGEST_STATE = 2**30
_REMEDY = "resume from another checkpoint, or train anew with --overwrite"
_PUSH_OPTIONS = ("private", "revision", "token", "tables", "license")  # of `hub.push`; Trainer's own are ignored


class AtomicCheckpoints(_Trainer):
    """
    Mixed into a `Trainer`, before it: saves and publishes all of a checkpoint or nothing.

    Checkpoints are written under a hidden name and renamed when whole, each with a manifest of sizes and SHA-256 that
    is checked before training resumes from it. A failed save leaves the last good checkpoint alone and becomes a
    `UserError` on every rank. A mixin and no callback, because Trainer has no hook between writing and renaming.
    """

    _in_checkpoint = False

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
        # Without a shared file system, each node renames what its own ranks wrote (their RNG states).
        self._together(lambda: self._publish_on_node(staged, final), staged, final)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            manifest.rotate(run_dir, self.args.save_total_limit, final, best)

    def _empty(self, staged: Path) -> None:
        if self.args.should_save:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)

    def _write_state(self, folder: str) -> None:
        """Write all that resuming needs, with Trainer's own methods; sharded models are written by all ranks."""
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
            except FileNotFoundError:  # a shared file system after all: rank 0 has renamed it
                return

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Save the model for `load_checkpoint` and PEFT: all of its files, or none of them.

        Args:
            output_dir (`str`, *optional*):
                The folder; by default `args.output_dir`. What else is in it stays. With `args.push_to_hub` it is
                uploaded too, in one commit.
        """
        if self._in_checkpoint:  # inside a checkpoint, which is renamed as a whole
            super().save_model(output_dir, _internal_call=True)
            return
        final = Path(output_dir or self.args.output_dir)
        staged = final / f".model{manifest.PARTIAL}"
        self._together(lambda: self._empty(staged), staged, final)
        self._together(
            lambda: super(AtomicCheckpoints, self).save_model(str(staged), _internal_call=True), staged, final
        )
        self._together(lambda: self._publish_into(staged, final), staged, final)
        if self.args.push_to_hub and not _internal_call:
            self.push_saved(output_dir, "Model save")

    def _publish_into(self, staged: Path, final: Path) -> None:
        if self.args.should_save:
            manifest.publish_into(staged, final)

    def _together(self, work: Callable[[], None], staged: Path, final: Path) -> None:
        """Run one part of a save on every rank; if it fails on one, all raise, and the partial folder is removed."""
        problem: Exception | None = None
        try:
            work()
        except Exception as error:
            if not is_write_error(error):
                raise
            problem = error
        # Ranks that save a sharded model use collectives: after a failure on one, the launcher ends the others.
        alone = problem is not None and (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if not alone and not self.any_rank(problem is not None):
            return
        if self.args.should_save:
            shutil.rmtree(staged, ignore_errors=True)
        reason = reason_of(problem) if problem else "another process could not write, see its message"
        kept = next(
            (p for p in checkpoint.checkpoints(self.args.output_dir) if (p / checkpoint.MANIFEST).is_file()), None
        )
        rest = f"{kept} is whole: " if kept else ""
        raise UserError(
            f"Cannot save {final}: {reason}. {rest}make room or mend the folder, then go on with --resume"
        ) from problem

    def any_rank(self, flag: bool) -> bool:
        """Whether a flag is set on any rank."""
        if self.args.world_size <= 1:
            return flag
        value = torch.tensor(float(flag), device=self.args.device)
        torch.distributed.all_reduce(value)
        return bool(value.item())

    # --- the Hub --------------------------------------------------------------------------------------------------
    # Trainer would write its arguments as a pickle, replace our card by a draft that PEFT then edits, and commit a
    # folder in several steps. Here every upload is one commit with our card.

    def init_hf_repo(self, token: str | None = None) -> None:
        try:
            super().init_hf_repo(token)
        except Exception as error:
            name = self.args.hub_model_id or Path(self.args.output_dir).name
            raise UserError(f"push_to_hub is set, but {checkpoint.hub_problem(error, name)}") from None

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the card is rendered from the checkpoint's files when it is pushed."""

    def push_to_hub(self, commit_message: str | None = "End of training", **kwargs: Any) -> Pushed | None:
        """
        Save the model and upload it with its card, in one commit.

        Args:
            commit_message (`str`, *optional*, defaults to `"End of training"`):
                Message of the commit.
            kwargs:
                `token`, `revision`, `tables` and `license` as in `dappr_llm.push`.

        Returns:
            `Pushed`: Repository, page and commit; `None` on all ranks but the first.
        """
        self.save_model(_internal_call=True)
        return self.push_saved(None, commit_message or "End of training", **kwargs)

    def push_saved(self, folder: str | None = None, message: str = "End of training", **kwargs: Any) -> Pushed | None:
        """Upload a folder that was saved before (by default `args.output_dir`), without writing the model again."""
        from ..inference import hub

        if not self.is_world_process_zero():
            return None
        if self.hub_model_id is None:
            self.init_hf_repo(kwargs.get("token"))
        args = self.args
        given = {"private": args.hub_private_repo, "revision": args.hub_revision, "token": args.hub_token}
        given |= {key: kwargs[key] for key in _PUSH_OPTIONS if key in kwargs}
        return hub.push(folder or str(args.output_dir), str(self.hub_model_id), message=message, **given)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.args.hub_strategy == "end":
            return
        try:
            self.push_saved(checkpoint_folder, f"Training in progress, step {self.state.global_step}")
        except UserError as error:  # hours of training are worth more than one upload; the last one must succeed
            logger.warning(str(error))

    # --- resuming -----------------------------------------------------------------------------------------------

    def resume_folder(self, resume: str | bool | None) -> str | None:
        """
        The checkpoint to go on from, checked; the first process decides for all.

        Args:
            resume (`str` or `bool`, *optional*):
                A folder; `True`: the last good one in `output_dir`; `"auto"`: the same if there is one.
        """
        found: list[Any] = [None, None]
        if self.args.should_save and any(Path(self.args.output_dir).glob(f".*{manifest.PARTIAL}")):
            manifest.tidy(self.args.output_dir)  # what a killed process left
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
            return None if last is None else _check_state(last)
        checkpoint.check_files(str(resume))
        if not Path(str(resume), _STATE).is_file():
            raise UserError(f"{resume} is no checkpoint to resume from: it holds no {_STATE}")
        return _check_state(str(resume))

    # Trainer reads what may have been damaged with libraries that raise anything: the checkpoint is named instead.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with explained(f"{resume_from_checkpoint}: its weights cannot be loaded", _REMEDY):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with explained(f"{checkpoint}: its optimizer.pt or scheduler.pt cannot be loaded", _REMEDY):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with explained(f"{checkpoint}: its rng_state.pth cannot be loaded", _REMEDY):
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        checkpoint.check_files(self.state.best_model_checkpoint)
        super()._load_best_model()


def _check_state(folder: str) -> str:
    """The folder, if its `trainer_state.json` is one; Trainer would take whatever stands there."""
    path = Path(folder, _STATE)
    # Trainer writes NaN where a loss was NaN, and its log grows with every step.
    state = read_json(path, _LARGEST_STATE, allow_nan=True)
    check(TrainerStateFile, state, f"{path} is damaged", cure=_REMEDY)
    unknown = sorted(set(state) - {field.name for field in fields(TrainerState)})
    if unknown:
        raise UserError(f"{path} is damaged, or of another version of transformers: it has {unknown[0]!r}; {_REMEDY}")
    return folder


def is_write_error(error: BaseException) -> bool:
    """Whether an exception means that writing failed: `OSError`, safetensors', or torch's plain `RuntimeError`."""
    from safetensors import SafetensorError

    if isinstance(error, OSError):
        return True
    text = str(error)
    if isinstance(error, SafetensorError):
        return "I/O" in text or "os error" in text.lower() or "No space" in text
    return isinstance(error, RuntimeError) and ("PytorchStreamWriter" in text or "inline_container" in text)


def reason_of(error: BaseException) -> str:
    """The operating system's error text, also of a wrapped `OSError`."""
    for part in (error, error.__cause__, error.__context__):
        if isinstance(part, OSError) and part.strerror:
            return part.strerror
    return str(error).strip().splitlines()[0]
