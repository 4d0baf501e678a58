"""The kinds of values that schemas are made of; strict: no text for a number, no NaN, no number without an end."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MOST = 10**9  # of rows, steps, tokens, …: beyond it a number is a slip of the keyboard
LONGEST_NAME = 200
LONGEST_TEXT = 10_000

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)
# A file of ours may hold more than this version knows: what a later version or another tool added is left alone.
OPEN = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Section(BaseModel):
    """Part of a recipe: an unknown key is an error."""

    model_config = STRICT


class File(BaseModel):
    """A file that we wrote: keys of later versions are kept, and those that are known must be valid."""

    model_config = OPEN


def _printable(text: str) -> str:
    for place, character in enumerate(text):
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t":
            raise ValueError(f"character {place + 1} is a control character ({character!r})")
    return text


Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME), AfterValidator(_printable)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT), AfterValidator(_printable)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Weight = Annotated[float, Field(ge=0, le=1e30)]
Positive = Annotated[float, Field(gt=0, le=1e30)]
Share = Annotated[float, Field(ge=0, le=1)]
Inside = Annotated[float, Field(gt=0, lt=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Natural = Annotated[int, Field(ge=0, le=MOST)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Names = Annotated[list[Name], Field(max_length=100_000)]
Options = Annotated[dict[str, Any], Field(max_length=1000)]
