"""`uncertainty_config.json`: what is needed besides the weights to read a checkpoint's outputs again."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..files import PathLike
from .check import check
from .files import load
from .method_options import METHOD_OPTIONS
from .types import File, Name, Number, Options, Text

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
TokenIds = Annotated[list[TokenId], Field(max_length=100_000)]


class MethodPart(File):
    """The method and its options."""

    name: Name
    options: Options

    @model_validator(mode="after")
    def _known(self) -> MethodPart:
        if self.name in METHOD_OPTIONS:  # others are of a later version, or the user's own: the registry says so
            check(METHOD_OPTIONS[self.name], self.options, "its options")
        return self


class PromptPart(File):
    """The prompt template."""

    instruction: Text
    template: Text
    choice: Text
    chat: bool = False
    system: Text | None = None
    rendered: Annotated[list[Text], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def _rendered(self) -> PromptPart:
        if self.chat and self.rendered is None:
            raise ValueError("prompt.chat is true without prompt.rendered, the text around a message")
        return self


class SidecarFile(File):
    """What every sidecar holds."""

    format_version: Literal[1]
    modality: Name
    method: MethodPart
    num_choices: Annotated[int, Field(ge=1, le=1_000_000)]
    evidence_offset: Number = 0.0
    chosen: Annotated[list[Name], Field(max_length=100)] = Field(default_factory=list)  # settings that nobody gave
    data_revisions: dict[Name, Commit] = Field(default_factory=dict)
    versions: dict[Name, Text] = Field(default_factory=dict)


class TextSidecar(SidecarFile):
    """The sidecar of an adapter that reads answer letters."""

    modality: Literal["text"]
    base_model: Text | None = None
    base_revision: Name | None = None
    precision: Name | None = None
    labels: Annotated[list[Text], Field(min_length=2, max_length=100_000)] | None = None  # if all rows share them
    letters: Annotated[list[Name], Field(max_length=26)]
    letter_token_ids: TokenIds
    extra_token_ids: Annotated[list[TokenIds], Field(max_length=1000)] | None = None
    prompt: PromptPart
    max_length: Annotated[int, Field(ge=1, le=10_000_000)]
    truncation: Literal["start", "end", "head_tail"] = "start"
    evidence_offset: Number

    @model_validator(mode="after")
    def _one_token_per_letter(self) -> TextSidecar:
        if not len(self.letters) == len(self.letter_token_ids) == self.num_choices:
            raise ValueError(
                f"num_choices is {self.num_choices}, with {len(self.letters)} letters and "
                f"{len(self.letter_token_ids)} letter_token_ids: there must be as many of each"
            )
        return self


class HeadSidecar(SidecarFile):
    """The sidecar of a text classifier with a head."""

    modality: Literal["text"]
    readout: Literal["head"]
    base_model: Text | None = None
    base_revision: Name | None = None
    precision: Name | None = None
    labels: Annotated[list[Text], Field(min_length=2, max_length=100_000)]
    prompt: PromptPart
    max_length: Annotated[int, Field(ge=1, le=10_000_000)]
    truncation: Literal["start", "end", "head_tail"] = "start"
    evidence_offset: Number

    @model_validator(mode="after")
    def _one_label_per_choice(self) -> HeadSidecar:
        if len(self.labels) != self.num_choices:
            raise ValueError(f"num_choices is {self.num_choices}, with {len(self.labels)} labels: both must agree")
        return self


class TokenSidecar(HeadSidecar):
    """The sidecar of a text classifier that reads one token per label."""

    readout: Literal["tokens"]  # type: ignore[assignment]
    answers: Annotated[list[Text], Field(max_length=100_000)]
    answer_tokens: Annotated[list[Text], Field(max_length=100_000)]
    answer_token_ids: TokenIds
    extra_token_ids: Annotated[list[TokenIds], Field(max_length=1000)] | None = None

    @model_validator(mode="after")
    def _one_token_per_label(self) -> TokenSidecar:
        counts = {len(self.answers), len(self.answer_tokens), len(self.answer_token_ids)}
        if counts != {self.num_choices} or len(set(self.answer_token_ids)) < self.num_choices:
            raise ValueError(
                f"num_choices is {self.num_choices}: there must be as many answers, answer_tokens and "
                "answer_token_ids, and no id twice"
            )
        return self


class TransformPart(File):
    """The transform of the images."""

    size: Annotated[int, Field(ge=1, le=16_384)]


class ImageSidecar(SidecarFile):
    """The sidecar of an image classifier."""

    modality: Literal["vision"]
    class_names: Annotated[list[str], Field(max_length=1_000_000)]
    transform: TransformPart


class TrainedRows(File):
    """`trained_rows.json`: short hashes of the rows that a checkpoint was trained on."""

    sha256_64: Annotated[list[Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]], Field(max_length=100_000_000)]


SIDECARS: dict[Any, type[SidecarFile]] = {"text": TextSidecar, "vision": ImageSidecar}
_READOUTS: dict[str, type[SidecarFile]] = {"head": HeadSidecar, "tokens": TokenSidecar}


def load_sidecar_file(path: PathLike) -> dict[str, Any]:
    """The content of an `uncertainty_config.json`, checked by the schema of its modality."""
    cure = "fetch or train the checkpoint again"
    content = load(SidecarFile, path, cure)
    # Other modalities are of a later version: loading says so.
    schema = SIDECARS.get(content["modality"], SidecarFile)
    if schema is TextSidecar:
        schema = _READOUTS.get(str(content.get("readout")), TextSidecar)
    check(schema, content, f"{path} is damaged", cure=cure)
    return content
