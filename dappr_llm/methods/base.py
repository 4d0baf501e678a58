"""The contract of every method, the schedules of their coefficients, and how they are built by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.errors import UserError, nearest
from ..core.outputs import Outputs, Prediction
from ..core.schemas import check, method_options

NEEDS = frozenset(
    {"features", "input_grad", "auxiliary_rows", "spectral_norm", "fit_before", "fit_after", "after_step"}
)
SCHEDULES = ("warmup", "linear", "constant")
COEFFICIENT = ("reg_weight", "schedule", "warmup_epochs")  # the options of `Scheduled`


@dataclass(frozen=True)
class Progress:
    """
    The point of training at which a loss is computed.

    Args:
        epoch (`float`):
            Epochs done so far; fractional within an epoch.
        epochs (`float`):
            Total number of epochs.
    """

    epoch: float
    epochs: float

    @classmethod
    def final(cls, epochs: float) -> Progress:
        """The end of training. Evaluation uses it, so that evaluation losses of different steps are comparable."""
        return cls(epoch=epochs, epochs=epochs)


@dataclass(frozen=True)
class HeadInfo:
    """
    What `Method.build_head` is given.

    Args:
        num_classes (`int`):
            K.
        feature_dim (`int`, *optional*):
            D, the width of the features `[B, D]` that the head receives.
        class_counts (`tuple[int, ...]`, *optional*):
            Training rows of each class.
    """

    num_classes: int
    feature_dim: int | None = None
    class_counts: tuple[int, ...] | None = None

    def features(self) -> int:
        """`feature_dim`, or a `UserError` if the model does not state it."""
        if self.feature_dim is None:
            raise UserError("This method's head needs features, but the model does not state their width")
        return self.feature_dim


def scheduled(weight: float, schedule: str, progress: Progress, warmup_epochs: float = 10) -> float:
    """
    The value of a loss coefficient in the current epoch `e`, a whole number counted from 0.

    Args:
        weight (`float`):
            The value that the schedule ends at.
        schedule (`str`):
            `"constant"`; `"warmup"`: `weight * min(1, e / warmup_epochs)`; `"linear"`: `weight * e / epochs`.
        progress (`Progress`):
            Current and total epochs. In the first epoch `warmup` and `linear` are 0, as in the authors' code.
        warmup_epochs (`float`, *optional*, defaults to 10):
            Length of the warm-up, in epochs.
    """
    epoch = math.floor(progress.epoch + 1e-9)  # accumulated step fractions may land just below a whole epoch
    if schedule == "constant":
        return weight
    if schedule == "warmup":
        return weight * min(1.0, epoch / warmup_epochs) if warmup_epochs > 0 else weight
    if schedule == "linear":
        return weight * min(1.0, epoch / progress.epochs) if progress.epochs > 0 else weight
    raise UserError(f"Unknown schedule {schedule!r}; {nearest(schedule, SCHEDULES)}")


@dataclass(frozen=True, kw_only=True)
class Method:
    """
    A training loss and the prediction rule that belongs to it.

    Fields are hyperparameters; a method holds no tensors and no state. Learned or fitted parameters are in the module
    that `build_head` returns. Methods see tensors only and know nothing of text, images, trainers or the Hub.

    `needs` names what a method requires beyond logits: `features` and `input_grad` (see [`Outputs`]),
    `auxiliary_rows` (unlabelled rows with label -1 in training batches), `spectral_norm` (of the model's layers),
    `fit_before` and `fit_after` (calls of `fit_head`), `after_step` (calls of `after_step`). `schema` states the
    types and ranges of the options, which are checked when a method is built. `soft_labels`: whether the loss means
    something for labels that are shared between classes.

    Args:
        passes (`int`, *optional*, defaults to 1):
            Stochastic forward passes at prediction time.
    """

    passes: int = 1
    needs: ClassVar[frozenset[str]] = frozenset()
    soft_labels: ClassVar[bool] = True
    schema: ClassVar[Any] = method_options.CrossEntropyOptions

    def __post_init__(self) -> None:
        # A subclass may have options of its own, which it checks itself.
        own = {key: value for key, value in self.options().items() if key in self.schema.__annotations__}
        check(self.schema, own, type(self).__name__)

    def num_outputs(self, num_classes: int) -> int:
        """C, the number of logits that the model must return: a multiple of K; the first K are the class logits."""
        return num_classes

    def build_head(self, info: HeadInfo) -> nn.Module | None:
        """A trainable module on the features, or `None`. It returns a dictionary of tensors, see `Outputs.head`."""
        return None

    def loss(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        """
        Loss terms by name, already weighted, each `[B]`; their sum, averaged over rows, is the training loss.

        Terms are per row, so that evaluation losses do not depend on batch size or number of processes and a row
        with a non-finite loss can be named.

        Args:
            out (`Outputs`):
                One forward pass.
            labels (`Tensor`):
                Class indices `[B]`, or soft labels `[B, K]`.
            progress (`Progress`):
                Current and total epochs, for scheduled coefficients.
        """
        raise NotImplementedError

    def predict(self, out: Outputs) -> Prediction:
        """
        Probabilities, aleatoric and epistemic uncertainty of each row.

        A row's prediction must not depend on the rest of its batch.

        Args:
            out (`Outputs`):
                Logits `[B, C]`, or `[B, M, C]` of M stochastic passes.
        """
        raise NotImplementedError

    def monitor(self, out: Outputs, labels: Tensor, progress: Progress) -> dict[str, Tensor]:
        """Further values `[B]` by name that are logged but not trained on."""
        return {}

    def fit_head(self, head: nn.Module, features: Tensor, labels: Tensor) -> None:
        """Fit the head to the training rows; called once, before or after training (`fit_before`, `fit_after`)."""
        raise NotImplementedError

    def after_step(self, head: nn.Module, out: Outputs, labels: Tensor) -> None:
        """Update the head's buffers; called after each optimizer step if the method needs `after_step`."""
        raise NotImplementedError

    def trained(self, head: nn.Module, progress: Progress) -> list[nn.Parameter] | None:
        """The parameters that are trained at this point of training; `None`: all of them."""
        return None

    def open_options(self) -> tuple[str, ...]:
        """Options that were not given and that a trainer may therefore choose."""
        return ()

    @property
    def epistemic_scale(self) -> float:
        """Factor on `K/alpha0`: the Dirichlet prior of a class, for methods where it is not 1."""
        return 1.0

    def options(self) -> dict[str, Any]:
        """Hyperparameters by name, for recipes, checkpoints and model cards."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """
    Fields of methods whose loss has one regularisation term with a scheduled coefficient.

    What is left out takes its published value (`defaults`), and `given` remembers what was not: a trainer of text
    models may choose the rest, by what it sees of the model.

    Args:
        reg_weight (`float`, *optional*):
            Coefficient of the regularisation term once the schedule has reached its end.
        schedule (`str`, *optional*):
            `"warmup"`, `"linear"` or `"constant"`.
        warmup_epochs (`float`, *optional*):
            Length of the warm-up, in epochs.
    """

    reg_weight: float = None  # type: ignore[assignment]  # these three are numbers once a method is built
    schedule: str = None  # type: ignore[assignment]
    warmup_epochs: float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", frozenset(name for name in COEFFICIENT if getattr(self, name) is not None))
        for name, value in self.defaults().items():
            if name not in self.given:
                object.__setattr__(self, name, value)
        super().__post_init__()  # type: ignore[misc]  # of `Method`, which stands beside this class

    given: ClassVar[frozenset[str]] = frozenset()  # of each object; not a field, so that equal methods stay equal

    @property
    def regularised(self) -> bool:
        """Whether the loss has the term at all."""
        return True

    def open_options(self) -> tuple[str, ...]:
        if not self.regularised:
            return ()
        known = {*self.given, "warmup_epochs"} if "schedule" in self.given else self.given
        return tuple(name for name in COEFFICIENT if name not in known)

    def defaults(self) -> dict[str, Any]:
        """The published coefficient."""
        return {"reg_weight": 1.0, "schedule": "warmup", "warmup_epochs": 10}

    def at_chance(self) -> dict[str, Any]:
        """
        The coefficient for a model that cannot answer yet.

        With equal logits every class gains evidence alike, and a coefficient that warms up from 0 comes too late.
        """
        return self.defaults()

    def weight(self, progress: Progress) -> float:
        """The coefficient of the regularisation term in the current epoch."""
        return scheduled(self.reg_weight, self.schedule, progress, self.warmup_epochs)


# --- the registry, by name ------------------------------------------------------------------------------------------


def get_method(name: str | Method, **options: Any) -> Method:
    """
    Build a method by its name.

    Args:
        name (`str` or `Method`):
            A key of `METHODS`; a method object is returned as it is.
        options:
            Its hyperparameters.
    """
    from . import METHODS

    if isinstance(name, Method):
        return name
    if name not in METHODS:
        raise UserError(f"Unknown method {name!r}; {nearest(name, METHODS)}")
    valid = METHODS[name]().options()
    for key in options:
        if key not in valid:
            raise UserError(f"Method {name!r} has no option {key!r}; {nearest(key, valid)}")
    return METHODS[name](**options)


def reads_evidence(method: Method, num_choices: int = 2) -> bool:
    """Whether a method without a head of its own reads alpha from logits."""
    logits = torch.zeros(1, method.num_outputs(num_choices))
    return method.predict(Outputs(logits=logits)).alpha is not None


def served_by(needs: frozenset[str]) -> list[str]:
    """Names of the methods that a model meeting these needs can train."""
    from . import METHODS

    return [name for name, build in METHODS.items() if build().needs <= needs]


def name_of(method: Method) -> str:
    """The registry name under which a method object can be built again; of several, the most specific."""
    from . import METHODS

    found: dict[str, int] = {}
    for name, build in METHODS.items():
        fixed = getattr(build, "keywords", {})
        built = getattr(build, "func", build)
        if type(method) is built and all(getattr(method, key) == value for key, value in fixed.items()):
            found[name] = len(fixed)
    if not found:
        raise UserError(f"{type(method).__name__} is not in METHODS: add it there, so that checkpoints can name it")
    return max(found, key=lambda name: found[name])
