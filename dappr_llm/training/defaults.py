"""
Where training starts, and with which coefficient, where neither recipe nor script says so.

What is right depends on the model that is met: the letters of a language model start at logits of 14, a new head at 0,
and a model at chance needs its regulariser from the first step. What is chosen here becomes part of the run: it is
said, written into its `recipe.yaml` and its checkpoints, and never replaces a value that was given.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.backend import evaluating, is_stream, to_device
from ..core.outputs import Outputs
from ..methods.base import Scheduled, reads_evidence

if TYPE_CHECKING:
    from .trainer import DAPPrTrainer

logger = logging.getLogger(__name__)

ALIVE = (-2.0, 4.0)  # mean logits in between are left where they are
TARGET = 1.0  # where others are put: evidence is neither dead there nor already large
_ROWS = 128  # training rows that are read once
_SURE = 0.5  # the confidence that a run should be able to reach


@dataclass(frozen=True)
class FirstRead:
    """
    What the untrained model makes of some training rows.

    Args:
        logits (`Tensor` of shape `[N, K]`):
            The answers' logits, with the offset that the model came with.
        labels, options (`Tensor` of shape `[N]`):
            Right answers, and how many each row offers.
        features (`Tensor` of shape `[N, D]`, *optional*):
            What a classification head reads.
    """

    logits: Tensor
    labels: Tensor
    options: Tensor
    features: Tensor | None = None

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        unread = torch.arange(self.logits.shape[-1]) >= self.options.unsqueeze(-1)
        answers = self.logits.masked_fill(unread, -math.inf).argmax(-1)
        return (answers == self.labels).double().mean().item()

    @property
    def chance(self) -> float:
        """The accuracy of guessing."""
        return self.options.double().reciprocal().mean().item()

    @property
    def at_chance(self) -> bool:
        """Whether this many right answers are what guessing gives, within two standard deviations."""
        return is_chance(self.accuracy, self.chance, len(self.labels))


def is_chance(accuracy: float, chance: float, rows: int) -> bool:
    """Whether an accuracy on so many rows is no better than guessing, by two standard deviations."""
    return accuracy <= chance + 2 * math.sqrt(chance * (1 - chance) / max(rows, 1))


@torch.no_grad()
def first_read(trainer: DAPPrTrainer) -> FirstRead | None:
    """Labelled training rows spread over the whole data, which may be sorted by label; `None` if there are none."""
    source = trainer.labelled_rows
    if is_stream(source):
        rows = [row for _, row in zip(range(_ROWS), source, strict=False)]
    else:
        count = min(_ROWS, len(source))
        rows = [source[number * len(source) // count] for number in range(count)]
    rows = [row for row in rows if row["labels"] >= 0]
    if not rows:
        return None
    size, backend, model = trainer.args.per_device_eval_batch_size, trainer.backend, trainer.model
    chunks = [backend.collate(rows[start : start + size]) for start in range(0, len(rows), size)]
    head = backend.score_layer(model) is not None
    more = {"hidden_states": True} if head else {}
    with evaluating(model):
        found = [backend.read(model, to_device(chunk, trainer.args.device), **more) for chunk in chunks]
    width = backend.num_choices or 2
    options = [
        torch.full_like(c["labels"], width) if c.get("num_options") is None else c["num_options"] for c in chunks
    ]
    return FirstRead(
        torch.cat([out.logits for out in found])[:, :width].float().cpu(),
        torch.cat([chunk["labels"] for chunk in chunks]).cpu(),
        torch.cat(options).cpu(),
        torch.cat([out.features for out in found]).float().cpu() if head else None,
    )


def choose(trainer: DAPPrTrainer) -> dict[str, Any]:
    """
    Choose what was left open, use it and say so; the same in every process.

    Returns:
        `dict`: The chosen settings by their names in a recipe (`train.evidence_offset`, `method.schedule`, …).
    """
    args, method, backend = trainer.args, trainer.method, trainer.backend
    if not backend.chooses_start or backend.has_head or not reads_evidence(method, backend.num_choices or 2):
        return {}
    open_offset = args.evidence_offset is None
    open_names = method.open_options()
    if not open_offset and not open_names and backend.score_layer(trainer.model) is None:
        return {}
    read = first_read(trainer)
    if read is None:
        return {}
    chosen: dict[str, Any] = {}
    said = []
    if open_offset:
        kept = backend.evidence_offset if backend.offset_is_trained else None
        chosen["train.evidence_offset"], why = choose_offset(read, kept)
        said.append(f"evidence offset {chosen['train.evidence_offset']:g} ({why})")
        read = replace(read, logits=read.logits + chosen["train.evidence_offset"] - backend.evidence_offset)
    if open_names:
        assert isinstance(method, Scheduled)
        found, why = choose_coefficient(method, read, is_stream(trainer.train_dataset) and not args.epoch_rows)
        chosen |= {f"method.{name}": found[name] for name in open_names}
        said.append(", ".join(f"{name} {found[name]}" for name in open_names if name != "warmup_epochs") + f" ({why})")
    chosen = agreed(chosen)
    apply(trainer, chosen)
    if said:
        logger.info("Not given, so chosen: " + "; ".join(said))
    short = what_falls_short(trainer, read)
    if short and trainer.is_world_process_zero():
        logger.warning(short)
    return chosen


def choose_offset(read: FirstRead, trained: float | None) -> tuple[float, str]:
    """
    The evidence offset, and why: none where logits start alive, otherwise one that moves their mean to 1.

    Args:
        read (`FirstRead`):
            Logits, with the offset that the model came with, which is 0 unless it was trained.
        trained (`float`, *optional*):
            The offset that the starting adapter learnt evidence with: it stays.
    """
    mean = read.logits[torch.isfinite(read.logits)].mean().item()
    if trained is not None or not math.isfinite(mean):  # logits that are not numbers are reported by the first step
        return trained or 0.0, "as the adapter was trained with"
    if ALIVE[0] <= mean <= ALIVE[1]:
        return 0.0, f"answer logits start at {mean:.1f} on average, where evidence is alive"
    return round(TARGET - mean, 2), f"answer logits start at {mean:.1f} on average, and would at {TARGET:g}"


def choose_coefficient(method: Scheduled, read: FirstRead, endless: bool) -> tuple[dict[str, Any], str]:
    """
    The regulariser's coefficient, and why.

    Args:
        method (`Scheduled`):
            The method, with what was given.
        read (`FirstRead`):
            What the model can do.
        endless (`bool`):
            Whether rows come from a stream that has no epochs to schedule by.
    """
    found = method.at_chance() if read.at_chance else method.defaults()
    given = {name: getattr(method, name) for name in method.given}
    if read.at_chance and given.get("schedule", found["schedule"]) != found["schedule"]:
        found = method.defaults()  # a weight that is meant for the first step is not for the end of another schedule
    if endless:
        found["schedule"] = "constant"
    state = "at chance" if read.at_chance else "above chance"
    return found | given, f"accuracy at the start {read.accuracy:.2f}, chance {read.chance:.2f}: {state}"


def what_falls_short(trainer: DAPPrTrainer, read: FirstRead) -> str | None:
    """
    A warning if evidence cannot grow to a confident answer in the planned steps where a softmax could; else `None`.

    A step of Adam moves each weight of a head by the learning rate at most, and so a logit by that times the sum of
    the features' absolute values; a class's own rows are in a share of `batch/K` of the steps.
    """
    if read.features is None or is_stream(trainer.labelled_rows):
        return None
    args, classes = trainer.args, read.logits.shape[-1]
    batch = trainer.get_total_train_batch_size(args)
    epochs = math.ceil(args.num_train_epochs * len(trainer.labelled_rows) / batch)
    steps = args.max_steps if args.max_steps > 0 else epochs
    path = args.learning_rate * steps * (1.0 if "constant" in str(args.lr_scheduler_type) else 0.5)
    growth = path * read.features.abs().sum(-1).mean().item() * min(1.0, batch / classes)
    most = read.logits.amax(-1).mean().item() + growth
    logits = torch.full((1, trainer.method.num_outputs(classes)), -30.0)
    logits[0, 0] = most
    confidence = trainer.method.predict(Outputs(logits=logits)).probs[0, 0].item()
    softmax = 1 / (1 + (classes - 1) * math.exp(-min(most, 50.0)))
    if confidence >= _SURE or softmax < _SURE:
        return None
    return (
        f"With {classes} classes and {steps:,} steps evidence can grow to about {most:.0f} at most, and a class's "
        f"probability to {confidence:.2f}: answers may be right, but probabilities will stay far below accuracy. "
        "method: dappr_exp has no such limit; otherwise train longer, or fit a temperature (dappr calibrate)"
    )


def agreed(value: Any) -> Any:
    """What the first process found, in all of them."""
    values = [value]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(values, 0)
    return values[0]


def apply(trainer: DAPPrTrainer, chosen: dict[str, Any]) -> None:
    """Use chosen settings; from here on they count as given."""
    if "train.evidence_offset" in chosen:
        trainer.backend.evidence_offset = chosen["train.evidence_offset"]
        trainer.args.evidence_offset = chosen["train.evidence_offset"]
    options = {key.removeprefix("method."): value for key, value in chosen.items() if key.startswith("method.")}
    if options:
        trainer.use_method(replace(trainer.method, **options))
    trainer.chosen |= chosen


def restore(trainer: DAPPrTrainer, sidecar: dict[str, Any]) -> None:
    """Take over from a checkpoint what its run had chosen."""
    options = sidecar["method"]["options"]
    values = {f"method.{name}": options.get(name) for name in trainer.method.open_options()}
    if trainer.args.evidence_offset is None:
        values["train.evidence_offset"] = sidecar["evidence_offset"]
    chosen = sidecar.get("chosen", [])
    apply(trainer, {key: value for key, value in values.items() if key in chosen and value is not None})
