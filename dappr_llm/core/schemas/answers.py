"""Lines of JSONL files: answers, which a resumed job reads again, and the texts of a table's items."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from .types import File, Natural, Number

LONGEST_ID = 1000
Choice = Annotated[str, Field(max_length=1_000_000)]
Choices = Annotated[list[Choice], Field(min_length=1, max_length=1_000_000)]


class ItemRecord(File):
    """A line of `TABLE.items.jsonl`: the texts of one item of a prediction table."""

    id: Annotated[str, Field(max_length=LONGEST_ID)]
    question: Choice
    options: Annotated[list[Choice], Field(max_length=1_000_000)]


class AnswerRecord(File):
    """One answer; see `dappr_llm.Answer` for what the fields mean."""

    id: Annotated[str, Field(max_length=LONGEST_ID)]
    answer: Choice
    letter: str
    choices: Choices
    probs: list[Annotated[float, Field(ge=0, le=1 + 1e-6)]]
    alpha: list[Annotated[float, Field(ge=0, le=1e30)]] | None = None
    aleatoric: Annotated[float, Field(ge=-1e-6, le=1 + 1e-6)]
    epistemic: Number
    prediction_set: list[str] | None = None
    abstain: bool | None = None
    density: Number | None = None
    familiarity: Annotated[float, Field(gt=0, le=1)] | None = None
    label: Natural | None = None
    correct: bool | None = None

    @model_validator(mode="after")
    def _one_number_per_choice(self) -> AnswerRecord:
        if len(self.probs) != len(self.choices) or (self.alpha is not None and len(self.alpha) != len(self.choices)):
            raise ValueError(
                f"{len(self.choices)} choices with {len(self.probs)} probs: there must be as many of each"
            )
        if self.answer not in self.choices:
            raise ValueError("the answer is none of its choices")
        return self
