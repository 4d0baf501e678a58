"""
`ImageBackend`: how trainer and pipeline prepare, collate and predict images with an `ImageClassifier`.

The backend holds settings only; the trained model stays a plain `ImageClassifier`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..core.backend import Backend, Batch, Row
from ..core.data_frames import as_rows
from ..core.errors import UserError
from ..core.outputs import Outputs
from ..methods import Method
from .data.images import ArrayImages, HubImages, as_grey_or_rgb, decode
from .data.rows import ImageRows, RowBatch, collate_rows
from .model import ImageClassifier, ImageClassifierConfig
from .transforms import ImageTransform

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

WEIGHTS = "model.safetensors"
_IMAGE_COLUMNS = ("image", "img", "pixel_values")
_LABEL_COLUMNS = ("label", "labels", "fine_label")


@dataclass(frozen=True)
class ImageItem:
    """
    One image to classify.

    Args:
        id (`str`):
            Its name or number.
        image (`PIL.Image.Image`):
            The decoded image, grey or RGB.
        options (`tuple[str, ...]`):
            Class names.
        label (`int`, *optional*, defaults to -1):
            Class index; -1 if unknown.
        question (`str`, *optional*):
            Its path, for display.
    """

    id: str
    image: Image
    options: tuple[str, ...]
    label: int = -1
    question: str = ""


class PreparedImages:
    """
    A dataset for the trainer: transformed rows by index or in batches, and columns by name.

    Args:
        rows (`ImageRows`):
            The rows, with their transform.
        num_classes (`int`):
            K, the `num_options` of every row.
    """

    column_names = ("id", "labels", "num_options")

    def __init__(self, rows: ImageRows, num_classes: int):
        self.rows = rows
        self.num_classes = num_classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: int | str) -> Any:
        if key == "id":
            return self.rows.ids
        if key == "labels":
            return self.rows.labels
        if key == "num_options":
            return [self.num_classes] * len(self)
        if isinstance(key, str):
            raise KeyError(key)
        return self.rows[key]

    def __getitems__(self, indices: Sequence[int]) -> RowBatch:
        return self.rows.__getitems__(indices)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that augmentation is seeded with."""
        self.rows.set_epoch(epoch)


class ImageBackend(Backend):
    """
    Image classification with an `ImageClassifier`.

    Args:
        model (`ImageClassifier`):
            The model; its config has the classes and the transform.
        method (`Method`):
            The method that the model is trained with.
        train_transform (`ImageTransform`, *optional*):
            Transform of training images, with augmentation; by default that of the config, without.
        base_model (`str`, *optional*):
            Name of the backbone's pretrained weights, for the model card.
    """

    modality = "vision"
    ask_help = "Type the path of an image. Ctrl-D ends."
    num_choices: int  # known from the start

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        train_transform: ImageTransform | None = None,
        base_model: str | None = None,
    ):
        classifier = _classifier(model)
        self.method = method
        self.settings = classifier.config
        self.num_choices = self.settings.num_classes
        self.class_names: list[str] = self.settings.class_names
        self.has_head = classifier.method_head is not None
        self.transform = _transform_of(self.settings)
        self.train_transform = train_transform or self.transform
        self.evidence_offset = 0.0
        self.base_model = base_model
        expected = method.num_outputs(self.num_choices)
        found = classifier.classifier.out_features if classifier.classifier is not None else 0
        if expected != found:
            raise UserError(f"The model gives {found} outputs, but {type(method).__name__} reads {expected}")

    @classmethod
    def from_pretrained(
        cls,
        folder: str,
        config: Mapping[str, Any],
        method: Method,
        base_model: str | None = None,
        dtype: str = "auto",
        quantization: Any = None,
        device: Any = None,
    ) -> tuple[nn.Module, ImageBackend]:
        """Model and backend of a trained checkpoint; the arguments are those of `TextBackend.from_pretrained`."""
        if quantization is not None:
            raise UserError(f"{folder}: image classifiers are small and are not loaded in 4 or 8 bits")
        if not (Path(folder) / WEIGHTS).is_file():
            raise UserError(f"{folder} holds no {WEIGHTS}")
        model = ImageClassifier.from_pretrained(folder)
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = model.to(place, memory_format=torch.channels_last)
        backend = cls(model, method, base_model=config.get("base_model"))
        backend.evidence_offset = config.get("evidence_offset", 0.0)
        return model, backend

    def read(
        self,
        model: nn.Module,
        inputs: Batch,
        width: int | None = None,
        hidden_states: bool = False,
        gate: bool = False,
    ) -> Outputs:
        """One forward pass, with whatever the method needs; a classifier always reads all of its classes."""
        pixels = inputs["pixel_values"]
        wanted = "input_grad" in self.method.needs and model.training and torch.is_grad_enabled()
        if wanted:
            pixels = pixels.detach().requires_grad_()
        out = model(pixel_values=pixels)
        logits = out.logits
        if logits is not None and self.evidence_offset:
            classes, rest = logits.split([self.num_choices, logits.shape[-1] - self.num_choices], dim=-1)
            logits = torch.cat([classes + self.evidence_offset, rest], dim=-1)
        features = out.features if hidden_states or "features" in self.method.needs else None
        pooled = out.features[:, None] if gate else None
        return Outputs(logits, features, pixels if wanted else None, out.head, pooled)

    def gate_groups(self, model: nn.Module) -> tuple[str, ...]:
        return ("pooled features",)

    def collate(self, rows: Sequence[Row], pack: bool = True, gate: bool = False) -> dict[str, Any]:
        """A batch of tensors; rows that were fetched together are stacked already."""
        return dict(collate_rows(rows))  # type: ignore[arg-type]

    # --- rows -----------------------------------------------------------------------------------------------------

    def prepare(
        self,
        dataset: PreparedImages | ImageRows | Dataset | list[dict[str, Any]],
        labelled: bool = True,
        name: str = "dataset",
    ) -> PreparedImages:
        """
        Check the labels of a dataset and attach the evaluation transform.

        Args:
            dataset (`ImageRows`, `Dataset` or `list[dict]`):
                From `load_image_task`, or rows with the usual column names (`image`, `label`, …).
            labelled (`bool`, *optional*, defaults to `True`):
                Raise a `UserError` for rows whose label is not one of the model's classes. Otherwise the labels of
                a dataset with other classes become -1.
            name (`str`, *optional*, defaults to `"dataset"`):
                Name of the dataset in error messages.
        """
        if isinstance(dataset, PreparedImages):
            return dataset
        rows = dataset if isinstance(dataset, ImageRows) else _as_rows(as_rows(dataset), self.class_names, name)
        if len(rows) == 0:
            raise UserError(f"{name} has no rows")
        bad = (rows.labels < 0) | (rows.labels >= self.num_choices)
        if labelled and bad.any():
            row = int(bad.argmax())
            raise UserError(
                f"{name}, row {row} ({rows.ids[row]}): label {rows.labels[row]} is not one of the "
                f"{self.num_choices} classes, which training and evaluation need"
            )
        if not labelled and (bad.any() or not self._same_classes(rows, name)):
            rows = rows.without_labels()
        return PreparedImages(rows.with_transform(self.transform), self.num_choices)

    def _same_classes(self, rows: ImageRows, name: str) -> bool:
        """Whether labels refer to this model's classes; KMNIST's are 0 to 9 as MNIST's, but other characters."""
        if name in ("dataset", self.settings.task):
            return True
        return list(rows.class_names) == self.class_names and not all(word.isdigit() for word in self.class_names)

    def augmented(self, prepared: PreparedImages) -> PreparedImages:
        """The same rows with the training transform (augmentation)."""
        return PreparedImages(prepared.rows.with_transform(self.train_transform), self.num_choices)

    def plain(self, prepared: PreparedImages) -> PreparedImages:
        """The same rows with the evaluation transform (no augmentation)."""
        return PreparedImages(prepared.rows.with_transform(self.transform), self.num_choices)

    def fingerprints(self, prepared: PreparedImages) -> list[str] | None:
        """A short SHA-256 of each image's pixels; `None` for images that are not in memory."""
        images = prepared.rows.images
        if not isinstance(images, ArrayImages):
            return None
        return [
            hashlib.sha256(pixels.tobytes()).hexdigest()[:16]
            for start in range(0, len(images), 4096)
            for pixels in images.batch(np.arange(start, min(start + 4096, len(images))))
        ]

    # --- single images --------------------------------------------------------------------------------------------

    def as_row(self, question: Any, choices: Any = None) -> Mapping[str, Any] | None:
        """A single image (path or Pillow image) as a row; `None` if `question` is a collection of images."""
        if choices is not None:
            raise UserError("An image classifier has fixed classes: pass images without choices")
        if isinstance(question, Mapping):
            return question
        is_one = isinstance(question, str | Path) or hasattr(question, "getbands")
        return {"image": question} if is_one else None

    def items(self, rows: Sequence[Any], start: int = 0, name: str = "image") -> list[ImageItem]:
        """Decode paths, Pillow images, or mappings with an `image` into items."""
        return [self._item(row, f"{name} {number}", str(number)) for number, row in enumerate(rows, start)]

    def _item(self, row: Any, where: str, default_id: str) -> ImageItem:
        if isinstance(row, ImageItem):
            return row
        values = row if isinstance(row, Mapping) else {"image": row}
        image = next((values[key] for key in (*_IMAGE_COLUMNS, "path") if values.get(key) is not None), None)
        if image is None:
            raise UserError(f"{where}: no image; give a path, a Pillow image, or a mapping with 'image'")
        if isinstance(image, str | Path):
            name, decoded = str(image), decode(Path(image), str(image))
        elif hasattr(image, "getbands"):
            name, decoded = default_id, as_grey_or_rgb(image, where)
        else:
            raise UserError(f"{where}: {type(image).__name__} is not an image; give a path or a Pillow image")
        label = next((int(values[key]) for key in _LABEL_COLUMNS if values.get(key) is not None), -1)
        return ImageItem(str(values.get("id", name)), decoded, tuple(self.class_names), label, name)

    def encode(self, items: Sequence[ImageItem]) -> list[dict[str, Any]]:
        """Transform items into rows for `collate`."""
        common = {"num_options": self.num_choices, "length": 0, "own_options": False}
        return [
            {"pixel_values": self.transform(item.image), "labels": item.label, "row": i, **common}
            for i, item in enumerate(items)
        ]

    def content_key(self, item: ImageItem) -> str:
        """A string that is equal for images with the same size and pixels."""
        return f"{item.image.size} {hashlib.sha256(item.image.tobytes()).hexdigest()}"

    def option_names(self, item: ImageItem) -> list[str]:
        """The class names."""
        return list(item.options)

    def ask_row(self, read: Callable[[str], str]) -> Mapping[str, Any] | None:
        """Ask for an image path in the terminal; `None` for an empty line."""
        path = read("Image: ").strip()
        return {"image": path} if path else None

    # --- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def table_facts(self) -> Mapping[str, Any]:
        return {"class_names": list(self.class_names)}

    def config(self) -> dict[str, Any]:
        """The backend's settings for `uncertainty_config.json`."""
        return {
            "modality": self.modality,
            "base_model": self.base_model,
            "data_revisions": dict(self.data_revisions),
            "backbone": self.settings.backbone,
            "num_choices": self.num_choices,
            "class_names": list(self.class_names),
            "transform": self.transform.to_dict(),
            "evidence_offset": self.evidence_offset,
        }


def _classifier(model: nn.Module) -> ImageClassifier:
    if not isinstance(model, ImageClassifier):
        raise UserError(f"An image backend needs an ImageClassifier, not {type(model).__name__}")
    return model


def _transform_of(config: ImageClassifierConfig) -> ImageTransform:
    if config.transform is not None:
        return ImageTransform.from_dict(config.transform)
    return ImageTransform(size=config.image_size, channels=config.channels)


def _as_rows(dataset: Dataset | list[dict[str, Any]], class_names: list[str], name: str) -> ImageRows:
    """`ImageRows` from a `datasets.Dataset` or a list of dictionaries with the usual column names."""
    if isinstance(dataset, list):
        from datasets import Dataset, Features, Image, Value

        keys = set(dataset[0]) if dataset else set()
        image, label = _columns(keys, name)
        data = {"image": [row[image] for row in dataset]}
        features = {"image": Image()}
        if label:
            data["label"], features["label"] = [row[label] for row in dataset], Value("int64")
        dataset = Dataset.from_dict(data, features=Features(features))
    image, label = _columns(set(dataset.column_names), name)
    labels = np.asarray(dataset[label], dtype=np.int64) if label else np.full(len(dataset), -1)
    ids = list(map(str, dataset["id"])) if "id" in dataset.column_names else [str(i) for i in range(len(dataset))]
    return ImageRows(HubImages(dataset, image, name), labels, ids, class_names, len(class_names), name)


def _columns(found: set[str], name: str) -> tuple[str, str | None]:
    image = next((key for key in _IMAGE_COLUMNS if key in found), None)
    if image is None:
        raise UserError(f"{name}: rows need an image under {', '.join(_IMAGE_COLUMNS)}; found {sorted(found)}")
    return image, next((key for key in _LABEL_COLUMNS if key in found), None)
