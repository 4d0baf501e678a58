"""Evidence while a model trains: where it starts, how it grows, when it goes wrong."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.backend import Backend, evaluating, to_device
from ..core.errors import UserError
from ..core.outputs import Outputs
from ..methods import Method, Progress
from ..methods.base import reads_evidence

if TYPE_CHECKING:
    from .chance import ChanceMonitor
    from .trainer import DAPPrTrainer

logger = logging.getLogger(__name__)

_PROBE_ROWS = 64  # training rows read once to know where the logits start
DEAD = -5.0  # logits below this carry almost no evidence and almost no gradient
_SMALLEST_PROB = 1e-10  # as in `evaluation`
_QUANTILES = {"q10": 0.1, "q50": 0.5, "q90": 0.9}


class Tally:
    """
    Sums of per-row values between two logs, over any number of processes.

    What is added must bear the same names in every process. Values that are not finite are left out: rows with such a
    loss are reported by themselves, and a value that a row does not have is given as NaN.
    """

    def __init__(self) -> None:
        self.clear()

    def __bool__(self) -> bool:
        return bool(self._sums)

    def clear(self) -> None:
        """Forget everything."""
        self._sums: dict[str, Tensor] = {}
        self._alpha0: list[Tensor] = []

    def add(self, values: Mapping[str, Tensor], keep: Tensor | None = None) -> None:
        """Add one batch; stays on the device, so that a step waits for nothing."""
        for key, value in values.items():
            value = value.detach().double()
            good = torch.isfinite(value) if keep is None else torch.isfinite(value) & keep
            pair = torch.stack([value.masked_fill(~good, 0).sum(), good.sum().double()])
            self._sums[key] = self._sums.get(key, 0) + pair
            if key == "alpha0":
                self._alpha0.append(value.masked_fill(~good, math.nan))

    def drain(self, world_size: int = 1) -> dict[str, float]:
        """Means over all processes; then begins anew."""
        keys = sorted(self._sums)
        sums = torch.stack([self._sums[key] for key in keys])
        alpha0 = torch.cat(self._alpha0).cpu() if self._alpha0 else torch.zeros(0)
        self.clear()
        if world_size > 1:
            torch.distributed.all_reduce(sums)
            parts: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(parts, alpha0.tolist())
            alpha0 = torch.tensor([value for part in parts for value in part], dtype=torch.double)
        totals = dict(zip(keys, sums.tolist(), strict=True))
        means = {key: total / count for key, (total, count) in totals.items() if count}
        alpha0 = alpha0[torch.isfinite(alpha0)]
        if len(alpha0):
            means |= {f"alpha0/{name}": alpha0.quantile(q).item() for name, q in _QUANTILES.items()}
        return means


class StepLog:
    """
    Per-row values of the training steps between two logs.

    Args:
        method (`Method`):
            The method.
        backend (`Backend`):
            Says how many options are read and whether there is a head.
    """

    def __init__(self, method: Method, backend: Backend):
        self.method, self.backend = method, backend
        self._tally = Tally()
        self.chance: ChanceMonitor | None = None  # is given the same rows

    def __bool__(self) -> bool:
        return bool(self._tally)

    @torch.no_grad()
    def add(
        self,
        terms: Mapping[str, Tensor],
        logged: Mapping[str, Tensor],
        outputs: Outputs,
        labels: Tensor,
        num_options: Tensor | None,
        progress: Progress,
        weights: Tensor | None = None,
        common_mode: bool = False,
    ) -> None:
        """
        Add one batch; stays on the device, so that a step waits for nothing.

        Args:
            terms, logged (`Mapping[str, Tensor]`):
                Loss terms, and what else the method watches, per row.
            outputs, labels, num_options:
                The batch; `num_options` is `None` where every row offers all of them.
            progress (`Progress`):
                Where training stands.
            weights (`Tensor`, *optional*):
                Loss weights; rows of weight 0 are repeats and are left out.
            common_mode (`bool`, *optional*, defaults to `False`):
                Log the share of the gradient that moves all classes alike too.
        """
        if num_options is None:
            num_options = torch.full_like(labels, self.backend.num_choices or 0)
        values = {**logged, **evidence_stats(self.method, outputs, labels, num_options)}
        if "auxiliary_rows" in self.method.needs:
            values = split_stats(values, labels)
        values |= {f"loss/{key}": value for key, value in terms.items()}
        if common_mode and not self.backend.has_head:
            share = common_mode_share(self.method, outputs, labels, progress)
            values["grad/common_mode"] = share.masked_fill(num_options != self.backend.num_choices, math.nan)
        keep = None if weights is None else weights > 0
        if self.chance is not None:
            self.chance.add(values, keep)
        del values["chance"]
        self._tally.add(values, keep)

    def drain_into(self, logs: dict[str, float], world_size: int) -> None:
        """Add the means over all ranks to a log entry and begin anew."""
        logs.update(self._tally.drain(world_size))


def evidence_stats(method: Method, out: Outputs, labels: Tensor, num_options: Tensor) -> dict[str, Tensor]:
    """Per-row values logged during training: of the answers, of the logits, of the evidence."""
    prediction = method.predict(out.detach())
    mask = torch.arange(prediction.probs.shape[-1], device=labels.device) < num_options.unsqueeze(-1)
    probs, answer = prediction.probs.masked_fill(~mask, 0), _hard(labels)
    right = probs.gather(-1, answer.clamp_min(0).unsqueeze(-1)).squeeze(-1) / probs.sum(-1)
    stats = {
        "accuracy": (prediction.probs.masked_fill(~mask, -1).argmax(-1) == answer).float(),
        "nll": -right.clamp_min(_SMALLEST_PROB).log(),
        "epistemic": prediction.epistemic,
        "chance": num_options.float().reciprocal(),
    }
    if out.logits is not None:
        logits = out.logits.detach()[:, : prediction.probs.shape[-1]]
        stats |= {"logits/mean": logits.mean(-1), "logits/std": logits.std(-1)}
    if prediction.alpha is not None:
        stats["alpha0"] = (prediction.alpha * mask).sum(-1)
    if prediction.alpha is not None and out.logits is not None and out.head is None:
        # Every answer logit far below zero: no evidence, and no gradient that could bring some.
        stats["evidence/dead"] = (logits.masked_fill(~mask, DEAD - 1).amax(-1) < DEAD).float()
    return stats


def evidence_summary(table: Any, out: Outputs) -> dict[str, float]:
    """
    What an evaluation says of evidence: mean epistemic uncertainty, quantiles of alpha0, share of dead rows.

    Args:
        table (`PredictionTable`):
            Predictions of the rows.
        out (`Outputs`):
            What they were read from; logits `[N, C]` or, of several passes, `[N, M, C]`.
    """
    found = {"epistemic": float(table.epistemic.mean())}
    if table.alpha is not None:
        alpha0 = torch.from_numpy(table.alpha).double().nansum(-1)
        alpha0 = alpha0[torch.isfinite(alpha0)]
        found |= {f"alpha0/{name}": alpha0.quantile(q).item() for name, q in _QUANTILES.items() if len(alpha0)}
    if table.alpha is not None and out.logits is not None and out.head is None:
        best = out.logits[..., : table.alpha.shape[-1]].amax(-1)
        found["evidence/dead"] = (best < DEAD).double().mean().item()
    return found


def settle_start(trainer: DAPPrTrainer) -> None:
    """Where training starts: the head (`DAPPrConfig.head_init`), then what was not given, then the evidence offset."""
    from .defaults import choose
    from .head_init import init_head

    init_head(trainer)
    choose(trainer)
    settle_offset(trainer)


def settle_offset(trainer: DAPPrTrainer) -> None:
    """Fix the evidence offset (`DAPPrConfig.evidence_offset`) before training, and log where answer logits start."""
    backend, method, wanted = trainer.backend, trainer.method, trainer.args.evidence_offset
    if wanted is not None and wanted != "auto":
        backend.evidence_offset = float(wanted)
    if backend.has_head:  # it reads the model's own logits, if there are any
        if wanted not in (None, 0.0):
            raise UserError("train.evidence_offset is for methods that read logits alone; leave it out")
        return
    if wanted != "auto" and not reads_evidence(method, backend.num_choices or 2):
        return
    if wanted == "auto":
        backend.evidence_offset = 0.0
    start = first_logits(trainer)
    if wanted == "auto":
        backend.evidence_offset = round(1.0 - start.mean().item(), 2)
        start = start + backend.evidence_offset
    low, mean, high = start.min().item(), start.mean().item(), start.max().item()
    logger.info(
        f"Answer logits start at {mean:.2f} (from {low:.2f} to {high:.2f}), evidence offset "
        f"{backend.evidence_offset:g}"
    )
    if mean < DEAD:
        logger.warning(
            f"Answer logits start at {mean:.1f} on average: evidence is dead there and its gradient vanishes; set "
            "train.evidence_offset: auto"
        )


@torch.no_grad()
def first_logits(trainer: DAPPrTrainer) -> Tensor:
    """Answer logits `[N, K]` of the first training rows, before the model is wrapped for training."""
    rows = list(islice(iter(trainer.train_dataset), _PROBE_ROWS))
    size, backend, model = trainer.args.per_device_eval_batch_size, trainer.backend, trainer.model
    chunks = [backend.collate(rows[i : i + size]) for i in range(0, len(rows), size)]
    with evaluating(model):
        logits = [backend.read(model, to_device(chunk, trainer.args.device)).logits for chunk in chunks]
    return torch.cat(logits)[:, : backend.num_choices].float().cpu()


def split_stats(values: dict[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
    """What is watched, of labelled rows alone; and the auxiliary rows' total evidence by itself."""
    known = labels >= 0
    kept = {key: value.masked_fill(~known, math.nan) for key, value in values.items()}
    return kept | ({"ood/alpha0": values["alpha0"].masked_fill(known, math.nan)} if "alpha0" in values else {})


def common_mode_share(method: Method, out: Outputs, labels: Tensor, progress: Progress) -> Tensor:
    """Share of the squared logit gradient that moves all classes of a row alike (1: nothing tells them apart)."""
    with torch.enable_grad():
        logits = out.logits.detach().requires_grad_()
        terms = method.loss(Outputs(logits=logits), labels, progress)
        (grad,) = torch.autograd.grad(sum(term.sum() for term in terms.values()), logits)
    grad = grad[:, : method.predict(Outputs(logits=logits.detach())).probs.shape[-1]]  # classes, not scales
    common = grad.mean(-1).square() * grad.shape[-1]
    return common / grad.square().sum(-1).clamp_min(1e-30)


def _hard(labels: Tensor) -> Tensor:
    return labels.argmax(-1) if labels.dim() > 1 else labels
