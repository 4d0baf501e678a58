"""What a readout says: how an item becomes a prompt, which logits are read, what a checkpoint keeps of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..forward_call import ForwardCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...methods import Method


class Readout(ABC):
    """
    One way from a text to K logits, held by the one [`TextBackend`].

    Attributes:
        name (`str`):
            As in `model.readout` of a recipe.
        labels (`tuple[str, ...]`, *optional*):
            The fixed labels; `None` where every row brings its own options.
        most (`int`, *optional*):
            The largest K there can be; `None`: any.
        causal (`bool`):
            Whether the answer is read after the last token of a left-padded row; otherwise the model pools
            right-padded rows by itself.
        truncation (`str`):
            Which words a text loses by default if it is too long: those at its `"start"` or `"end"`.
        padding_side (`str`):
            How the tokenizer is saved: on the left for those who generate, on the right for those who classify.
    """

    name: ClassVar[str]
    labels: tuple[str, ...] | None = None
    most: int | None = None
    causal: bool = True
    truncation: str = "start"
    padding_side: str = "left"

    @abstractmethod
    def call(self, method: Method, width: int, device: torch.device, adapters: Sequence[str] | None) -> ForwardCall:
        """
        What the hooks of the model are told in one forward pass.

        Args:
            method (`Method`):
                Says how many outputs are read per option.
            width (`int`):
                How many options are read.
            device (`torch.device`):
                Where the batch is.
            adapters (`Sequence[str]`, *optional*):
                An adapter name per row.
        """

    def select(self, logits: Tensor, width: int) -> Tensor:
        """The outputs of the first `width` options, where a forward pass gives more than it was asked for."""
        return logits

    @abstractmethod
    def check_tokens(self) -> list[int]:
        """Two token ids from which the check of packed batches makes its rows."""

    @abstractmethod
    def option_names(self, count: int) -> list[str]:
        """What the options are called in answers: letters, or the labels themselves."""

    @abstractmethod
    def config(self, method: Method, width: int) -> dict[str, Any]:
        """What the sidecar keeps so that the same logits can be read again."""

    def check_saved(self, sidecar: Any, config: Mapping[str, Any], method: Method) -> None:  # noqa: B027 - optional
        """Refuse a checkpoint whose sidecar says something else than this model and tokenizer do."""

    def score_layer(self, model: nn.Module) -> nn.Linear | None:
        """The trainable layer that turns features into logits; `None` where logits are rows of the vocabulary."""
        return None
