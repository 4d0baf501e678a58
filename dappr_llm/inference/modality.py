"""
Text or images: the only file of this folder that names them. Imports no torch by itself.

Whoever has a task's name, a checkpoint's config or an adapter, but no backend yet, comes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError

if TYPE_CHECKING:
    from ..core.backend import Backend
    from ..core.planned_model import PlannedModel
    from ..core.recipe import Recipe
    from ..methods import Method

# Module and class that reads a checkpoint of each modality.
BACKENDS = {
    "text": ("dappr_llm.text.backend", "TextBackend"),
    "vision": ("dappr_llm.vision.backend", "ImageBackend"),
}


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


def count_rows(path: str | Path, most: int) -> int:
    """Rows of a JSONL, CSV or Parquet file, counted up to a number."""
    from ..text.data.sources import read_file

    return sum(1 for _ in islice(read_file(path), most))


def iter_items(task: Any, split: str, root: str | None, backend: Backend) -> Iterator[Any]:
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


def known_tasks(names: Iterable[Any]) -> dict[str, Any]:
    """The declarations of those of these names that are tasks of ours, by name."""
    from ..text.data.tasks import TASKS
    from ..vision.data.catalogue import IMAGE_TASKS

    every: dict[str, Any] = {**TASKS, **IMAGE_TASKS}
    return {name: every[name] for name in names if isinstance(name, str) and name in every}


def public_base(name: str | None) -> str | None:
    """How others know a base model: the bundled one under the Hub id of its unrounded weights."""
    from ..text.bundled_model import public_name

    return public_name(name)


def bundled_folder(base: str) -> Path | None:
    """The folder of the bundled base model, unpacked; `None` for any other name."""
    from ..text import bundled_model

    return bundled_model.load_path() if base == bundled_model.NAME else None


def adapter_backend(
    adapter: Path, base: str, method: Method, num_choices: int, prompt: dict[str, Any] | None, max_length: int
) -> Backend:
    """A backend for a LoRA adapter that was trained elsewhere; see [`import_adapter`] for the arguments."""
    from ..text.build import adapter_backend as of_text

    return of_text(adapter, base, method, num_choices, prompt, max_length)


def plan_model(
    recipe: Recipe,
    args: Any,
    method: Method,
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
        config, rows, length (*optional*):
            As in `scale.plan.plan`.
    """
    from ..vision.build import is_image_recipe

    if not is_image_recipe(recipe):
        from ..text.build import build_lora
        from ..text.plan_model import plan_text

        return plan_text(recipe, build_lora(recipe), length or args.max_length, config)
    from ..vision.plan_model import plan_images

    if config is not None or length is not None:
        raise UserError(f"{recipe.name} trains on images: --config and --length are for language models")
    return plan_images(recipe, method, args.seed, rows)
