"""The contract of every method, and the schedules of their coefficients."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from ..core.errors import UserError, nearest
from ..core.outputs import Outputs, Prediction

NEEDS = frozenset(
    {"features", "input_grad", "auxiliary_rows", "spectral_norm", "fit_before", "fit_after", "after_step"}
)
SCHEDULES = ("warmup", "linear", "constant")


@dataclass(frozen=True)
class Progress:
    """
    How far training is.

    Args:
        epoch (`float`):
            Epochs done so far, counting up from 0.
        epochs (`float`):
            Epochs in all.
    """

    epoch: float
    epochs: float

    @classmethod
    def final(cls, epochs: float) -> Progress:
        """What evaluation uses, so that an evaluation loss never depends on when it was taken."""
        return cls(epoch=epochs, epochs=epochs)


@dataclass(frozen=True)
class HeadInfo:
    """What a method may need to know to build its head."""

    num_classes: int
    feature_dim: int | None = None
    class_counts: tuple[int, ...] | None = None

    def features(self) -> int:
        """The width of the features, for heads that cannot be built without it."""
        if self.feature_dim is None:
            raise UserError("This method's head reads features, but the model does not say how wide they are")
        return self.feature_dim


def scheduled(weight: float, schedule: str, progress: Progress, warmup_epochs: float = 10) -> float:
    """
    The value of a coefficient in the current epoch; whole epochs, counted from 0.

    Args:
        weight (`float`):
            The full value.
        schedule (`str`):
            `"constant"`; `"warmup"`: `weight * min(1, e / warmup_epochs)`; `"linear"`: `weight * e / epochs`.
        progress (`Progress`):
            Where training stands. In the first epoch `warmup` and `linear` are 0, as in the authors' code.
        warmup_epochs (`float`, *optional*, defaults to 10):
            Length of the warm-up.
    """
    epoch = math.floor(progress.epoch + 1e-9)  # accumulated step fractions may land just below a whole epoch
    if schedule == "constant":
        return weight
    if schedule == "warmup":
        return weight * min(1.0, epoch / warmup_epochs) if warmup_epochs > 0 else weight
    if schedule == "linear":
        return weight * min(1.0, epoch / progress.epochs) if progress.epochs > 0 else weight
    raise UserError(f"Unknown schedule {schedule!r}; {nearest(schedule, SCHEDULES)}")


def single_pass(method: Method) -> None:
    """Refuse several passes for a method whose scores have no agreed mean."""
    if method.passes != 1:
        raise UserError(f"{type(method).__name__} reads a single pass; train several and combine their tables instead")


def check_choice(name: str, value: str, valid: tuple[str, ...]) -> None:
    """Refuse an option's value, naming the valid ones."""
    if value not in valid:
        raise UserError(f"Unknown {name} {value!r}; {nearest(value, valid)}")


@dataclass(frozen=True, kw_only=True)
class Method:
    """
    A loss and the prediction that belongs to it.

    Fields are hyperparameters: no tensors, no state. What is learned or fitted lives in the module that
    `build_head` returns. Methods see tensors only and know nothing of text, images, trainers or the Hub.

    Args:
        passes (`int`, *optional*, defaults to 1):
            Stochastic forward passes at prediction time.
    """

    passes: int = 1
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise UserError(f"passes must be at least 1, got {self.passes}")

    def num_outputs(self, num_classes: int) -> int:
        """Outputs the model must give for `num_classes` classes: blocks of that many, the classes first."""
        return num_classes

    def build_head(self, info: HeadInfo) -> nn.Module | None:
        """The method's own head, if it has one."""
        return None

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        """
        Named, already weighted terms, one value per row (`[B]`): their sum, averaged over rows, is the loss.

        Per row and not per batch, so that evaluation losses stay exact under any batching and any number of
        processes, and a bad row can be named.
        """
        raise NotImplementedError

    def predict(self, out: Outputs) -> Prediction:
        """
        Probabilities and the two uncertainties, from logits `[B, C]` or, of several passes, `[B, M, C]`.

        Each row by itself: what else is in the batch must not change a prediction.
        """
        raise NotImplementedError

    def monitor(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        """Values per row that are logged but not trained on."""
        return {}

    def fit_head(self, head: nn.Module, features: Tensor, labels: Tensor) -> None:
        """Called once if the method needs `fit_before` or `fit_after`."""
        raise NotImplementedError

    def after_step(self, head: nn.Module, out: Outputs, labels: Tensor) -> None:
        """Called after each optimizer step if the method needs `after_step`."""
        raise NotImplementedError

    def trained(self, head: nn.Module, progress: Progress) -> list[nn.Parameter] | None:
        """The only parameters that the optimizer may move at this point of training; `None`: all of them."""
        return None

    @property
    def epistemic_scale(self) -> float:
        """Factor on `K/alpha0`, for Dirichlet methods whose prior is not 1 per class."""
        return 1.0

    def options(self) -> dict[str, Any]:
        """Hyperparameters as plain values, for recipes, sidecar files and cards."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """
    Fields of methods whose loss has one regularisation term with a scheduled coefficient.

    Args:
        reg_weight (`float`, *optional*, defaults to 1.0):
            Coefficient of the regularisation term once the schedule has reached its end.
        schedule (`str`, *optional*, defaults to `"warmup"`):
            `"warmup"`, `"linear"` or `"constant"`.
        warmup_epochs (`float`, *optional*, defaults to 10):
            Length of the warm-up, in epochs.
    """

    reg_weight: float = 1.0
    schedule: str = "warmup"
    warmup_epochs: float = 10

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # Method's, which stands behind this one
        check_choice("schedule", self.schedule, SCHEDULES)
        if self.reg_weight < 0:
            raise UserError(f"reg_weight must not be negative, got {self.reg_weight}")

    def weight(self, progress: Progress) -> float:
        """The coefficient in the current epoch."""
        return scheduled(self.reg_weight, self.schedule, progress, self.warmup_epochs)
