"""The letters A, B, C, … of options that every row brings along, read from the vocabulary of a causal LM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ..data.items import LETTERS
from ..prompt import choice_token_ids
from .vocabulary import VocabularyReadout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...methods import Method


class LetterReadout(VocabularyReadout):
    """
    Reads the answer letters of multiple-choice prompts.

    Args:
        model (`nn.Module`):
            A causal LM or `PeftModel`.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer.
        ending (`str`, *optional*, defaults to `"Answer:"`):
            The end of the prompt, after which the letter is read.
        spaces (`tuple[str, ...]`, *optional*):
            What may stand between the two, in the order of preference.
        extra_token_ids:
            As in [`VocabularyReadout`].
    """

    name = "letters"
    most = len(LETTERS)
    ids_key = "letter_token_ids"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        ending: str = "Answer:",
        spaces: tuple[str, ...] = (" ", ""),
        extra_token_ids: Sequence[Sequence[int]] | None = None,
    ):
        super().__init__(model, extra_token_ids)
        self.tokenizer, self.ending, self.spaces = tokenizer, ending, spaces

    def token_ids(self, width: int) -> list[int]:
        return choice_token_ids(self.tokenizer, width, self.ending, self.spaces)

    def option_names(self, count: int) -> list[str]:
        return list(LETTERS[:count])

    def config(self, method: Method, width: int) -> dict[str, Any]:
        return {"letters": list(LETTERS[:width]), **super().config(method, width)}
