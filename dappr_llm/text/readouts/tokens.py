"""Fixed labels, each read from one token that a causal LM says next: trained, or as guards and judges are deployed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ...core.errors import UserError
from .answer_tokens import AnswerTokens
from .vocabulary import VocabularyReadout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...methods import Method

_CURE = "sidecar or tokenizer was changed: fetch the checkpoint again"


class TokenReadout(VocabularyReadout):
    """
    Reads one token of the vocabulary per label.

    Args:
        model (`nn.Module`):
            A causal LM or `PeftModel`.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer.
        answers ([`AnswerTokens`]):
            Labels and their tokens, from [`choose_answers`] or a checkpoint.
        extra_token_ids:
            As in [`VocabularyReadout`].
    """

    name = "tokens"
    truncation = "end"
    ids_key = "answer_token_ids"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        answers: AnswerTokens,
        extra_token_ids: Sequence[Sequence[int]] | None = None,
    ):
        super().__init__(model, extra_token_ids)
        self.tokenizer, self.answers = tokenizer, answers
        self.labels: tuple[str, ...] = answers.labels
        if max(answers.ids) >= self.head.vocab_size:
            raise UserError(
                f"The token {max(answers.ids)} of an answer is beyond the {self.head.vocab_size} outputs of this "
                "model: model and tokenizer do not belong together"
            )

    def token_ids(self, width: int) -> list[int]:
        if width > len(self.labels):
            raise UserError(f"{width} options, but this model has {len(self.labels)} labels")
        return list(self.answers.ids[:width])

    def extra_blocks(self, method: Method, width: int) -> list[list[int]]:
        # Those of all labels, so that reading fewer moves no row.
        return [block[:width] for block in super().extra_blocks(method, len(self.labels))]

    def option_names(self, count: int) -> list[str]:
        return list(self.labels)

    def config(self, method: Method, width: int) -> dict[str, Any]:
        return {
            "readout": self.name,
            "labels": list(self.labels),
            "answers": list(self.answers.texts),
            "answer_tokens": self.tokenizer.convert_ids_to_tokens(list(self.answers.ids)),
            **super().config(method, width),
        }

    def check_saved(self, sidecar: Path, config: Mapping[str, Any], method: Method) -> None:
        super().check_saved(sidecar, config, method)
        compare_tokens(sidecar, config, self.tokenizer)


def saved_answers(config: Mapping[str, Any]) -> AnswerTokens:
    """The answers of a checkpoint."""
    return AnswerTokens(tuple(config["labels"]), tuple(config["answers"]), tuple(config["answer_token_ids"]))


def compare_tokens(sidecar: Path, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a checkpoint whose tokenizer has other tokens under the ids that were trained."""
    size = len(tokenizer)
    ids = config["answer_token_ids"]
    own = [tokenizer.convert_ids_to_tokens(token) if token < size else None for token in ids]
    for label, token, stored, found in zip(config["labels"], ids, config["answer_tokens"], own, strict=True):
        if stored != found:
            raise UserError(
                f"{sidecar}: answer_token_ids says {token} for the label {label!r}, which was {stored!r}, but to its "
                f"tokenizer is {found!r}; {_CURE}"
            )
