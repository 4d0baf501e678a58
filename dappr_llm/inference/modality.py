"""Tasks of text or of images by one call, for those who have a name and no model yet. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError

if TYPE_CHECKING:
    from ..core.planned_model import PlannedModel
    from ..core.recipe import Recipe
    from ..methods import Method


def find_task(spec: Any, modality: str | None = None) -> Any:
    """
    The declaration of a task.

    Args:
        spec (`str` or `Mapping`):
            A task's name, a file or folder, or a description.
        modality (`str`, *optional*):
            `"text"` or `"vision"`, where a checkpoint or recipe says which; by default what it looks like.
    """
    if modality == "vision" or modality is None:
        from ..vision.data.tasks import get_image_task, is_image_task

        if modality == "vision" or is_image_task(spec):
            return get_image_task(spec)
    from ..text.data.tasks import get_task

    return get_task(spec)


def load_rows(
    task: Any,
    split: str,
    root: str | None = None,
    limit: int | None = None,
    labelled: bool = True,
    seed: int = 0,
    plain: bool = False,
) -> Any:
    """
    The rows of one split.

    Args:
        task (`MCQTask` or `ImageTask`):
            From `find_task`.
        split (`str`):
            Which.
        root (`str`, *optional*):
            Folder with local copies of Hub datasets.
        limit (`int`, *optional*):
            At the most so many rows.
        labelled (`bool`, *optional*, defaults to `True`):
            Refuse rows without a label.
        seed (`int`, *optional*, defaults to 0):
            Images: decides which training rows validate.
        plain (`bool`, *optional*, defaults to `False`):
            Questions: as `ItemRows` instead of a `Dataset`, for those who may never need one.
    """
    from ..vision.data.tasks import ImageTask, load_image_task

    if isinstance(task, ImageTask):
        return load_image_task(task, split, root, limit, labelled, seed)
    from ..text.data.tasks import load_items, load_task

    return (load_items if plain else load_task)(task, split, root, limit, labelled)


def iter_items(task: Any, split: str, root: str | None, backend: Any) -> Iterator[Any]:
    """
    Items of one split, one after the other, for a backend's `encode`.

    Args:
        task (`MCQTask` or `ImageTask`):
            From `find_task`.
        split (`str`):
            Which.
        root (`str`, *optional*):
            Folder with local copies of Hub datasets.
        backend (`TextBackend` or `ImageBackend`):
            What will read them.
    """
    if backend.modality == "text":
        from ..text.data.tasks import iter_items as iter_questions

        yield from (item for _, item in iter_questions(task, split, root))
        return
    prepared = backend.prepare(load_rows(task, split, root, labelled=False), labelled=False, name=task.name)
    for i, name in enumerate(prepared["id"]):
        row = {"id": name, "image": prepared.rows.load(i), "label": int(prepared.rows.labels[i])}
        yield from backend.items([row], i)


def plan_model(
    recipe: Recipe,
    args: Any,
    method: Method,
    lora: Any,
    config: str | None = None,
    rows: int | None = None,
    length: int | None = None,
) -> PlannedModel:
    """
    A recipe's model without memory for its weights.

    Args:
        recipe (`Recipe`):
            The recipe.
        args (`DAPPrConfig`):
            Its training arguments.
        method (`Method`):
            Its method.
        lora (`LoraConfig`):
            Its adapter, for text.
        config, rows, length (*optional*):
            As in `scale.plan.plan`.
    """
    from ..vision.build import is_image_recipe

    if not is_image_recipe(recipe):
        from ..text.plan_model import plan_text

        return plan_text(recipe, lora, length or args.max_length, config)
    from ..vision.plan_model import plan_images

    if config is not None or length is not None:
        raise UserError(f"{recipe.name} trains on images: --config and --length are for language models")
    return plan_images(recipe, method, args.seed, rows)
