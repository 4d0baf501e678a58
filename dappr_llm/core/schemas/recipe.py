"""A recipe: what `dappr train` reads, with types, ranges and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, with_config
from typing_extensions import TypedDict

from ..model_names import BUNDLED, misspelt
from ..names import safe_path
from ..secrets import mask
from .synonyms import dtype_name
from .types import STRICT, Count, Dropout, Inside, Name, Names, Options, Positive, Section, Seed, Share, Text

Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(dtype_name)]
Width = Annotated[int, Field(ge=1, le=65_536)]
Pixels = Annotated[int, Field(ge=1, le=16_384)]
Plain = str | int | float | bool


@with_config(STRICT)
class Calibration(TypedDict):
    """Where calibration rows were split off from, and their share of these rows."""

    source: Name
    share: Inside


@with_config(STRICT)
class TaskDescription(TypedDict, total=False):
    """One's own data: where the rows are and what their columns are called; text and images share the form."""

    name: Name
    path: Text | None
    config: Name | None
    splits: dict[Name, Text] | None
    revision: Name | None
    encoding: Name | None
    fractions: Annotated[dict[Name, Inside], Field(min_length=2, max_length=20)] | None
    split_seed: Seed | None
    calibration: Calibration | None
    sha256: (
        dict[Name, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] | None
    )  # of the files, by split; runs note them
    # rows of text; for classification `question`, `answer` and `options` are also called `text`, `label` and `labels`
    text: Text | Names | None
    labels: Annotated[list[Plain], Field(min_length=2, max_length=100_000)] | None
    question: Text | Names | None
    choices: Name | Names | None
    answer: Name | None
    id: Name | None
    options: Annotated[list[Plain], Field(min_length=1, max_length=100_000)] | None
    answer_type: Literal["auto", "letter", "index", "text"] | None
    # rows of images
    task: Name
    image: Name
    label: Name | None
    num_classes: Annotated[int, Field(ge=1, le=1_000_000)] | None
    class_names: Names
    channels: Literal[1, 3]
    size: Pixels
    resize: Pixels | None
    keep_native: bool
    mean: Annotated[list[float], Field(min_length=1, max_length=4)]
    std: Annotated[list[Positive], Field(min_length=1, max_length=4)]
    augment: Names
    interpolation: Literal["nearest", "bilinear", "bicubic"]
    folders: Names
    layout: Name | None
    in_memory: bool
    validation_fraction: Inside | None
    validation_rule: Literal["random", "stratified", "last"]
    test_fraction: Inside | None
    whole: bool
    imbalance: Annotated[float, Field(gt=0, le=1)] | None
    where: Options


Task = Annotated[str, Field(min_length=1, max_length=4096)] | TaskDescription


def _model_name(name: str) -> str:
    problem = misspelt(name)
    if problem:
        raise ValueError(problem)
    return name


class ModelSection(Section):
    """
    `model:` which base model, how it is loaded, and the adapter that training starts from.

    `readout` is how a text model's K outputs are read: from answer letters, from a classification head, or from tokens
    of the labels; `auto` lets the data decide. `answers` are these tokens, as texts by label (`{spam: " Yes", ham: "
    No"}`); where they are left out, tokens are found from the labels' names.

    For images `backbone` takes the place of `name` (`convnet`, or a timm model), `adapter` is a checkpoint to start
    from, and the fields after it are those of `dappr_llm.vision.model.ImageClassifierConfig`.
    """

    name: Annotated[Text, AfterValidator(_model_name)] = BUNDLED
    dtype: Dtype = "auto"
    revision: Name | None = None
    attn_implementation: Name | None = None
    trust_remote_code: bool = False
    quantization: Options | None = None
    adapter: Text | None = None
    readout: Literal["auto", "letters", "head", "tokens"] = "auto"
    answers: Annotated[dict[Plain, Name], Field(min_length=2, max_length=100_000)] | None = None
    backbone: Name | None = None
    pretrained: bool = False
    stem: Literal["default", "small"] = "default"
    hidden: Annotated[list[Width], Field(max_length=64)] = Field(default_factory=list)
    dropout: Dropout = 0.0
    frozen: bool = False
    image_size: Pixels | None = None
    channels: Literal[1, 3] | None = None
    backbone_options: Options = Field(default_factory=dict)
    spectral_factor: Positive = 1.0


class DataSection(Section):
    """
    `data:` the task to train on, the OOD tasks to test on; each a name or a description of one's own data.

    `naming_share` is the share of training rows whose question is replaced by one that asks for the right option's own
    words. It keeps small models in mind of what a letter stands for while they learn a task too hard to show it.
    `auxiliary` is a task whose rows are mixed in without labels, `auxiliary_share` of every epoch, for methods that
    learn from such rows. `augment` replaces an image task's own augmentation (`none`, or names such as
    `[crop, flip]`).

    `calibration_split` has the rows that p-values, prediction sets and thresholds come from, and nothing else. A task
    without that split gets it from its validation rows if no checkpoint is selected on them, from half of them if they
    are 400 or more, else from a tenth of 500 or more training rows; `calibration_fraction` is another share. `null`:
    no such rows.

    `checks`: what is done about mistakes in the rows that make results wrong. By default `error` for one's own data,
    and `warn` for the tasks of the registry, whose splits are what they are.

    `streaming` reads training rows as they are needed, shuffled within `shuffle_buffer` rows; needs `train.max_steps`.
    """

    train: Task
    ood: Annotated[list[Task], Field(max_length=1000)] = Field(default_factory=list)
    root: Text | None = None
    train_split: Name = "train"
    validation_split: Name | None = "validation"
    test_split: Name | None = "test"
    ood_split: Name = "test"
    validation_fraction: Inside | None = None
    calibration_split: Name | None = "calibration"
    calibration_fraction: Inside | None = None
    naming_share: Share = 0.0
    streaming: bool = False
    shuffle_buffer: Count = 1000
    auxiliary: Task | None = None
    auxiliary_split: Name = "train"
    auxiliary_share: Inside = 0.5
    augment: Name | Names | None = None
    max_train_samples: Count | None = None
    max_validation_samples: Count | None = None
    max_test_samples: Count | None = None
    checks: Literal["error", "warn", "off"] | None = None


class Recipe(Section):
    """
    A whole run. `lora` goes to `peft.LoraConfig`, `train` to `DAPPrConfig`, `method` to the method, as they are.

    `lora: null` trains every weight of a classifier (`model.readout: head`). `gate`: fit a density of hidden states at
    the end, which says of new rows how familiar they are. `chosen` is written by a run: which of its settings nobody
    gave. Their values stand in their sections, so the recipe of a run repeats it exactly.
    """

    name: Name = "run"
    description: Text = ""
    model: ModelSection = Field(default_factory=ModelSection)
    lora: dict[str, Any] | None = Field(default_factory=dict)
    method: dict[str, Any] = Field(default_factory=lambda: {"name": "dappr"})
    data: DataSection
    train: dict[str, Any] = Field(default_factory=dict)
    gate: bool = True
    chosen: Names = Field(default_factory=list)

    @property
    def output_dir(self) -> Path:
        """`train.output_dir`, or `runs/<name>`."""
        return Path(self.train.get("output_dir") or "runs" / safe_path(self.name))

    def with_chosen(self, chosen: Mapping[str, Any]) -> Recipe:
        """This recipe with the values of settings that nobody gave, by dotted key."""
        found = self.model_copy(deep=True, update={"chosen": sorted(chosen)})
        for key, value in chosen.items():
            section, name = key.split(".")
            getattr(found, section)[name] = value
        return found

    def to_yaml(self) -> str:
        """The resolved recipe as YAML that `load_recipe` reads back."""
        return yaml.safe_dump(mask(self.model_dump()), sort_keys=False, allow_unicode=True)
