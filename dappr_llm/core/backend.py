"""
The contract between a model's modality (text, images) and everything that trains, predicts or serves it.

A backend holds what surrounds the model: tokenizer or image transform, labels, how rows become tensors and how a
forward pass becomes `Outputs`. It never holds results: nothing in a backend, nor in the model, changes during a call,
so one backend serves any number of threads. How many options to read, and with which offset, travels with each call.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from .errors import UserError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..methods.base import Method
    from .outputs import Outputs

Row = Mapping[str, Any]  # one example, as a mapping of columns
Batch = Mapping[str, Any]  # a collated batch: tensors, and whatever the backend's `read` needs besides


class Item(Protocol):
    """One example to answer: a multiple-choice question, or an image with the classes it may belong to."""

    @property
    def id(self) -> str: ...

    @property
    def options(self) -> tuple[str, ...]: ...

    @property
    def label(self) -> int: ...


class PreparedRows(Protocol):
    """Rows as training and prediction read them: an example by number, a column by name."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any) -> Any: ...


class Backend(ABC):
    """
    What trainer, predictor, pipeline and commands ask of a modality.

    Attributes:
        modality (`str`):
            `"text"` or `"vision"`.
        method (`Method`):
            The method whose outputs are read.
        num_choices (`int`, *optional*):
            K, the options or classes that are trained; `None` until the first training rows settle it.
        evidence_offset (`float`):
            Added to every answer logit; fixed before training starts and stored with the checkpoint.
        offset_is_trained (`bool`):
            Whether the adapter that training starts from learnt evidence with this offset.
        chooses_start (`bool`):
            Whether a trainer may choose offset and coefficients that were not given; see `training.defaults`.
        base_model (`str`, *optional*):
            Name or path of the pretrained weights.
        base_revision (`str`, *optional*):
            The commit on the Hub that they were loaded from.
        precision (`str`, *optional*):
            How they are held: `"bfloat16"`, `"float32, 4bit nf4"`; `None` where that is never a question.
        data_revisions (`Mapping[str, str]`):
            The commits of the Hub datasets that a run reads, by Hub id.
        max_length (`int`, *optional*):
            Tokens of a prompt at the most; `None` where inputs have no length.
        has_head (`bool`):
            Whether the model runs a head of the method's own inside its forward pass.
        has_new_head (`bool`):
            Whether the layer that [`score_layer`] names is new and random.
        pretrained (`bool`):
            Whether the features of the base model mean something before training.
        answers_untrained (`bool`):
            Whether the model can be asked before any training (zero-shot).
        processing_class:
            What `transformers.Trainer` calls so: the tokenizer; `None` for images.
        class_names (`Sequence[str]`, *optional*):
            Names of fixed labels; `None` where rows bring options of their own.
        ask_help (`str`):
            How `dappr ask` explains what to type.
    """

    modality: ClassVar[str]
    ask_help: str
    method: Method
    num_choices: int | None
    evidence_offset: float
    offset_is_trained: bool = False
    chooses_start: ClassVar[bool] = False  # images start from the published values
    base_model: str | None
    base_revision: str | None = None
    precision: str | None = None
    data_revisions: Mapping[str, str] = MappingProxyType({})
    max_length: int | None = None
    has_head: bool = False
    has_new_head: bool = False
    pretrained: bool = False
    answers_untrained: bool = False
    processing_class: Any = None
    class_names: Sequence[str] | None = None

    # --- the model ------------------------------------------------------------------------------------------------

    @abstractmethod
    def read(
        self,
        model: nn.Module,
        inputs: Batch,
        width: int | None = None,
        hidden_states: bool = False,
        gate: bool = False,
    ) -> Outputs:
        """
        One forward pass.

        Args:
            model (`nn.Module`):
                The model, wrapped for training or not.
            inputs (`Batch`):
                From `collate`, on the model's device.
            width (`int`, *optional*):
                How many options to read; by default the K trained ones.
            hidden_states (`bool`, *optional*, defaults to `False`):
                Also return `Outputs.features`, `[B, D]`: the states that the answers are read from.
            gate (`bool`, *optional*, defaults to `False`):
                Also return `Outputs.gate`, `[B, G, D]`: hidden states of G kinds from the same forward pass. The batch
                must have been collated for it.
        """

    @abstractmethod
    def collate(self, rows: Sequence[Row], pack: bool = True, gate: bool = False) -> dict[str, Any]:
        """
        A batch of tensors from prepared rows.

        Args:
            rows (`Sequence[Mapping]`):
                Prepared rows.
            pack (`bool`, *optional*, defaults to `True`):
                Lay out a padding-free batch, where the model can be read so.
            gate (`bool`, *optional*, defaults to `False`):
                Add what `read` needs to give `Outputs.gate`.
        """

    def gate_groups(self, model: nn.Module) -> tuple[str, ...]:
        """Names of the G kinds of hidden states in `Outputs.gate`; none: this model can have no gate."""
        return ()

    def content_lengths(self, rows: Any) -> list[int]:
        """How long what each prepared or encoded row asks is, for comparing like with like; 0 without lengths."""
        return [0] * len(rows)

    def repeated(self, inputs: Batch, times: int) -> dict[str, Any]:
        """A batch repeated `times` times, for stochastic passes side by side."""
        return repeat_rows(inputs, times)

    def read_adapters(
        self, model: nn.Module, rows: Sequence[Row], adapters: Sequence[str], width: int
    ) -> Tensor | None:
        """Logits `[M, B, C]` of several adapters from one forward pass; `None` if that does not work or not pay."""
        return None

    def with_method(self, method: Method, evidence_offset: float) -> Self:
        """The same backend for another method and offset, as members of an ensemble have them."""
        other = copy.copy(self)
        other.method, other.evidence_offset = method, evidence_offset
        return other

    # --- rows -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, dataset: Any, labelled: bool = True, name: str = "dataset") -> Any:
        """
        Rows of any accepted layout → prepared rows with the columns `id`, `labels` and `num_options`.

        Args:
            dataset:
                Raw rows, items, or rows that were prepared before (returned as they are).
            labelled (`bool`, *optional*, defaults to `True`):
                Refuse rows without a label.
            name (`str`, *optional*, defaults to `"dataset"`):
                What error messages call it.
        """

    def augmented(self, prepared: Any) -> Any:
        """Training rows with data augmentation, where there is any."""
        return prepared

    def plain(self, prepared: Any) -> Any:
        """The same rows without data augmentation."""
        return prepared

    def check_options(self, prepared: Any, name: str) -> None:  # noqa: B027 - optional
        """Settle K from the first rows if it is still open; refuse rows with more options than are trained."""

    @abstractmethod
    def fingerprints(self, prepared: Any) -> list[str] | None:
        """A short content hash per row, so that calibration can refuse training rows; `None` if too costly."""

    def row_keys(self, prepared: Any) -> list[bytes] | None:
        """
        A key per row, equal for rows with equal inputs, whose order puts rows with a common prefix next to each other.

        `None`: rows are neither deduplicated nor reordered.
        """
        return None

    # --- single items ---------------------------------------------------------------------------------------------

    @abstractmethod
    def as_row(self, question: Any, choices: Sequence[Any] | None = None) -> Row | None:
        """One question or image as a row; `None` for anything that holds several."""

    @abstractmethod
    def items(self, rows: Sequence[Any], start: int = 0, name: str = "item") -> list[Any]:
        """Raw rows as parsed items; `start` continues numbering where rows come in several parts."""

    @abstractmethod
    def encode(self, items: Sequence[Any]) -> list[dict[str, Any]]:
        """Items → rows for `collate`, each with `num_options` and `length`."""

    @abstractmethod
    def content_key(self, item: Any) -> str:
        """A text that is equal for items with equal content, whatever their ids."""

    @abstractmethod
    def option_names(self, item: Any) -> list[str]:
        """Names of an item's options: letters, or classes."""

    @abstractmethod
    def ask_row(self, read: Callable[[str], str]) -> Row | None:
        """Ask for one item in the terminal; `None` if nothing was typed."""

    # --- checkpoints ----------------------------------------------------------------------------------------------

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What `uncertainty_config.json` says so that this checkpoint's outputs can be read again."""

    def save_processor(self, folder: str | Path) -> None:  # noqa: B027 - optional
        """Write the tokenizer beside the weights, where there is one."""

    def score_layer(self, model: nn.Module) -> nn.Linear | None:
        """The trainable layer that turns features into logits, where training may choose its start; else `None`."""
        return None

    @property
    def table_facts(self) -> Mapping[str, Any]:
        """More entries for the meta data of prediction tables."""
        return {}

    # --- speed ----------------------------------------------------------------------------------------------------

    @property
    def packs(self) -> bool:
        """Whether batches are computed without padding."""
        return False

    def compile_blocks(self, model: nn.Module, **options: Any) -> None:
        """`torch.compile` the parts of the model whose shapes do not change between packed batches."""
        raise UserError("train.torch_compile: this model is compiled as a whole")

    def use_frozen_layers_cache(self, model: nn.Module, folder: str) -> None:
        """Keep the hidden states below the lowest trained layer in a folder and start from them."""
        raise UserError("train.trunk_cache is for text models; leave it out")


# --- helpers for batches, modules and datasets that every backend shares --------------------------------------------


def option_rows(num_options: Sequence[int]) -> dict[int, Tensor]:
    """Which rows offer how many options, from counts that the host knows."""
    counts = sorted(set(num_options))
    return {count: torch.tensor([i for i, found in enumerate(num_options) if found == count]) for count in counts}


def to_device(value: Any, device: torch.device | str) -> Any:
    """A batch, with whatever is nested in it, on a device."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(entry, device) for key, entry in value.items()}
    if isinstance(value, list):
        return [to_device(entry, device) for entry in value]
    return value


def without_wrapper(model: nn.Module) -> Any:
    """A model without what several processes put around it."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; every module's own mode is restored."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def repeat_rows(inputs: Mapping[str, Any], times: int) -> dict[str, Any]:
    """A collated batch several times over; what is not per row stays as it is."""
    rows = next(iter(inputs.values())).shape[0]

    def repeated(value: Any) -> Any:
        if times == 1 or not isinstance(value, Tensor) or value.shape[:1] != (rows,):
            return value
        return value.repeat(times, *[1] * (value.dim() - 1))

    return {key: repeated(value) for key, value in inputs.items()}


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterable-style: it can be read from its start only and has no length; `None` is not."""
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__len__")
