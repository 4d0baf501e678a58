"""Building model, backend and datasets of an image recipe, and loading an image checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError
from ..core.recipe import Recipe
from ..core.splits import CALIBRATION, calibration_source
from ..methods import Method

if TYPE_CHECKING:
    from ..training.config import DAPPrConfig
    from .backend import ImageBackend
    from .data.rows import ImageRows
    from .data.tasks import ImageTask
    from .model import ImageClassifier, ImageClassifierConfig

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"


def is_image_recipe(recipe: Recipe) -> bool:
    """Whether a recipe trains an image classifier (`model.backbone`); a `UserError` for an image task without one."""
    from .data.tasks import is_image_task

    if recipe.model.backbone is None and is_image_task(recipe.data.train):
        raise UserError(f"{recipe.name}: data.train is a task of images: name a model.backbone (convnet, resnet18, …)")
    return recipe.model.backbone is not None


def find_task(spec: str | Mapping[str, Any] | ImageTask, own: ImageTask | None = None) -> ImageTask:
    """A task by its name, file or description; images inherit nothing from the training task `own`."""
    from .data.tasks import get_image_task

    return get_image_task(spec)


def load_rows(
    task: ImageTask,
    split: str,
    root: str | None = None,
    limit: int | None = None,
    labelled: bool = True,
    seed: int = 0,
) -> ImageRows:
    """Rows of one split of a task; the seed decides which training rows validate."""
    from .data.tasks import load_image_task

    return load_image_task(task, split, root, limit, labelled, seed)


def build_task(recipe: Recipe) -> ImageTask:
    """The training task of a recipe, with its `data.validation_fraction`."""
    from .data.tasks import get_image_task

    task = get_image_task(recipe.data.train)
    if recipe.data.validation_fraction is not None:
        task = dataclasses.replace(task, validation_fraction=recipe.data.validation_fraction)
    return task


def build_data(recipe: Recipe, task: ImageTask, seed: int) -> tuple[ImageRows, ImageRows | None]:
    """
    Training and validation rows of an image recipe; unreadable images are an error before training starts.

    Args:
        recipe (`Recipe`):
            Its `data` section is read.
        task (`ImageTask`):
            The training task, from [`build_task`].
        seed (`int`):
            Seed of the validation split, where the task has none of its own.

    Returns:
        Training rows, and validation rows or `None`.
    """
    from .data.tasks import load_image_task

    data = recipe.data
    train = load_image_task(task, data.train_split, data.root, data.max_train_samples, seed=seed)
    validation = None
    if data.validation_split is not None:
        validation = load_image_task(task, data.validation_split, data.root, data.max_validation_samples, seed=seed)
    if os.environ.get("RANK", "0") == "0":  # the other ranks read the same files
        for rows in (train, validation):
            if rows is not None:
                rows.verify()
    return train, validation


def settle(recipe: Recipe) -> Recipe:
    """
    A recipe that says which images are kept for calibration: the validation images if nothing is selected on them,
    half of them if there are enough.
    """
    from .data.tasks import get_image_task, load_image_task

    data, task = recipe.data, get_image_task(recipe.data.train)
    if data.calibration_split != CALIBRATION or CALIBRATION in task.splits or task.calibration:
        return recipe
    used, found = data.validation_split, None
    try:
        rows = len(load_image_task(build_task(recipe), used or "validation", data.root).ids)
    except UserError:  # said when they are read to be used
        rows = 0
    if used is None and rows and data.calibration_fraction is None:
        found = "validation"
        logger.info(f"{task.name}: its validation images, on which nothing is selected, are kept for calibration")
    share = calibration_source(rows if used else 0, 0, data.calibration_fraction)
    if share is not None:
        found = CALIBRATION
        given = recipe.data.train if isinstance(recipe.data.train, dict) else {"task": recipe.data.train}
        kept = {"source": used, "share": round(share[1], 6)}
        logger.info(f"{task.name}: {share[1]:.0%} of {rows:,} {used} images are kept for calibration")
        data = data.model_copy(update={"train": {**given, "calibration": kept}})
    elif found is None:
        logger.info(
            f"{task.name}: {rows:,} validation images are too few to keep some for calibration, so answers get no "
            "familiarity (data.calibration_split names such images)"
        )
    return recipe.model_copy(update={"data": data.model_copy(update={"calibration_split": found})})


def load_calibration(recipe: Recipe, task: ImageTask, seed: int = 0) -> ImageRows | None:
    """The images that are kept for calibration; `None` if there are none."""
    data = recipe.data
    if data.calibration_split is None:
        return None
    return load_rows(task, data.calibration_split, data.root, labelled=False, seed=seed)


def is_noise(auxiliary: object) -> bool:
    """Whether `data.auxiliary` is `"noise"` and not a task."""
    from .data.noise import NOISE

    return auxiliary == NOISE


def noise(recipe: Recipe, task: ImageTask, seed: int) -> ImageRows:
    """Auxiliary rows of noise images, in the shape of the training images."""
    from .data.noise import noise_rows

    return noise_rows(task.channels, recipe.model.image_size or task.resize or task.size, seed)


def build_model(
    recipe: Recipe, task: ImageTask, train: ImageRows, method: Method, args: DAPPrConfig
) -> tuple[ImageClassifier, ImageBackend]:
    """The classifier of a recipe and its backend."""
    return build_classifier(recipe, task, train, method, recipe.method["name"], args.seed)


def build_classifier(
    recipe: Recipe, task: ImageTask, train: ImageRows, method: Method, method_name: str, seed: int
) -> tuple[ImageClassifier, ImageBackend]:
    """
    The classifier and backend of an image recipe.

    Args:
        recipe (`Recipe`):
            Its `model`, `lora` and `data.augment` sections are used.
        task (`ImageTask`):
            The training task, for channels and image size.
        train (`ImageRows`):
            Training rows, for the classes and their counts.
        method (`Method`):
            The method, for the number of outputs and the head.
        method_name (`str`):
            Its name in the registry.
        seed (`int`):
            Seed of the initial weights.
    """
    import torch
    from transformers import set_seed

    from .backend import ImageBackend
    from .model import ImageClassifier
    from .transforms import build_transform

    section = recipe.model
    config = model_config(recipe, task, train, method, method_name)
    set_seed(seed)
    model = ImageClassifier(config, pretrained=section.pretrained)
    if section.adapter:
        _start_from(model, section.adapter)
    model = model.to(memory_format=torch.channels_last)  # faster convolutions, on CPUs too
    base = f"timm/{section.backbone}" if section.pretrained else None
    return model, ImageBackend(model, method, build_transform(task, train=True, **_wanted(recipe, task)), base)


def model_config(
    recipe: Recipe, task: ImageTask, train: ImageRows, method: Method, method_name: str
) -> ImageClassifierConfig:
    """The config of a recipe's classifier; arguments as in `build_model`."""
    from .model import ImageClassifierConfig
    from .transforms import build_transform

    section = recipe.model
    assert section.backbone is not None
    wanted = _wanted(recipe, task)
    transform = build_transform(task, train=False, **wanted)
    return ImageClassifierConfig(
        backbone=section.backbone,
        num_classes=train.num_classes,
        class_names=train.class_names,
        channels=wanted["channels"],
        image_size=transform.size,
        transform=transform.to_dict(),
        task=task.name,
        stem=section.stem,
        hidden=section.hidden,
        dropout=section.dropout,
        frozen=section.frozen,
        backbone_options=section.backbone_options,
        lora=_lora(recipe),
        method={"name": method_name, "options": method.options()},
        class_counts=train.class_counts().tolist(),
        spectral_factor=section.spectral_factor,
    )


def _wanted(recipe: Recipe, task: ImageTask) -> dict[str, Any]:
    """What a recipe asks of the transform of its images."""
    channels = recipe.model.channels or (3 if recipe.model.pretrained else task.channels)
    return {"size": recipe.model.image_size, "channels": channels, "augment": recipe.data.augment}


def _lora(recipe: Recipe) -> dict[str, Any] | None:
    return dict(recipe.lora) if recipe.lora else None


def _start_from(model: ImageClassifier, folder: str) -> None:
    """Load the weights of a checkpoint folder; the method's head only if it was trained with the same method."""
    from safetensors.torch import load_file

    from .model import ImageClassifierConfig

    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise UserError(f"model.adapter: {folder} holds no {WEIGHTS}; train the recipe that makes it first")
    before = ImageClassifierConfig.from_pretrained(folder)
    same = before.method is not None and before.method["name"] == model.config.method["name"]
    model.load_weights(load_file(str(path)), str(path), head=same)
