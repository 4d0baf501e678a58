"""Recipe → method, model, backend and rows. Chooses between text and vision for everything that trains."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..core.backend import Backend
from ..core.errors import UserError
from ..core.recipe import Recipe, check_keys
from ..inference.batching import RowSet
from ..inference.modality import find_task, load_rows
from ..methods import Method, get_method
from ..vision.build import is_image_recipe
from .config import DAPPrConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass
class TrainingRun:
    """Everything a training needs: what `DAPPrTrainer` is given, and the name of the task it trains on."""

    method: Method
    model: nn.Module
    backend: Backend
    task: str
    train: Any
    validation: Any = None
    auxiliary: Any = None


def build_method(recipe: Recipe) -> Method:
    """The method of a recipe."""
    options = dict(recipe.method)
    return get_method(options.pop("name"), **options)


def build_args(recipe: Recipe) -> DAPPrConfig:
    """The recipe's `train` section as `DAPPrConfig`."""
    valid = {f.name for f in fields(DAPPrConfig) if f.init}
    check_keys(recipe.train, valid, recipe.name, "train.")
    values = {"report_to": "none", **recipe.train, "output_dir": str(recipe.output_dir)}
    try:
        return DAPPrConfig(**values)
    except (ValueError, TypeError) as error:
        raise UserError(f"{recipe.name}: the train section is not valid: {str(error).splitlines()[0]}") from None


def build_run(recipe: Recipe, args: DAPPrConfig) -> TrainingRun:
    """
    Build a run: rows first, since mistakes in them are cheap to find, then the model.

    Args:
        recipe (`Recipe`):
            The recipe.
        args (`DAPPrConfig`):
            Its training arguments, from `build_args`.
    """
    method, build = build_method(recipe), _modality(recipe)
    task = build.build_task(recipe)
    train, validation = build.build_data(recipe, task, args.seed)
    auxiliary = load_auxiliary(recipe, method, task, args.seed)
    model, backend = build.build_model(recipe, task, train, method, args)
    return TrainingRun(method, model, backend, task.name, train, validation, auxiliary)


def build_rows(recipe: Recipe, seed: int = 0) -> tuple[Any, Any]:
    """Training and validation rows of a recipe, without its model."""
    build = _modality(recipe)
    return build.build_data(recipe, build.build_task(recipe), seed)


def _modality(recipe: Recipe) -> Any:
    """`text.build` or `vision.build`: `build_task`, `build_data` and `build_model` of either."""
    if is_image_recipe(recipe):
        from ..vision import build

        return build
    from ..text import build as text_build

    return text_build


def from_objects(
    model: Any,
    processing_class: Any,
    args: DAPPrConfig,
    method: Method,
    peft_config: Any = None,
    quantization_config: Any = None,
) -> tuple[nn.Module, Backend]:
    """Model and backend for `DAPPrTrainer`, from a model given by name or as an object."""
    if not isinstance(model, str):
        from ..vision.model import ImageClassifier

        if isinstance(model, ImageClassifier):
            from ..vision.backend import ImageBackend

            return model, ImageBackend(model, method)
    from ..text.build import from_objects as text_from_objects

    return text_from_objects(model, processing_class, args, method, peft_config, quantization_config)


def load_auxiliary(recipe: Recipe, method: Method, own: Any, seed: int) -> Any:
    """Rows of the auxiliary task, or noise images, for a method that learns from them; `own`: the training task."""
    if recipe.data.auxiliary is None and "auxiliary_rows" not in method.needs:
        return None
    from ..vision.build import is_noise, noise
    from .auxiliary_rows import check_auxiliary, check_names

    data, images = recipe.data, is_image_recipe(recipe)
    check_auxiliary(method, recipe.method["name"], data.auxiliary is not None)
    if images and is_noise(data.auxiliary):
        return noise(recipe, own, seed)
    modality = "vision" if images else "text"
    task = find_task(data.auxiliary, modality)
    check_names(recipe.name, task.name, own.name, [find_task(spec, modality).name for spec in data.ood])
    return load_rows(task, data.auxiliary_split, data.root, labelled=False, seed=seed)


def build_tests(recipe: Recipe) -> tuple[RowSet | None, list[RowSet]]:
    """Rows of the ID test (if there is a test split) and of each OOD test, read before any training."""
    data, own = recipe.data, _modality(recipe).build_task(recipe)
    modality = "vision" if is_image_recipe(recipe) else "text"
    id_set = None
    if data.test_split:
        rows = load_rows(own, data.test_split, data.root, data.max_test_samples)
        id_set = RowSet.of_task(rows, own, data.test_split, recipe.output_dir.name)
    ood: list[RowSet] = []
    for spec in data.ood:
        task = find_task(spec, modality)
        if task.name in [each.task for each in ood] or task.name == own.name:
            raise UserError(f"{recipe.name}: data.ood names {task.name!r} twice, or it is the training task")
        rows = load_rows(task, data.ood_split, data.root, data.max_test_samples, labelled=False)
        ood.append(RowSet.of_task(rows, task, data.ood_split, recipe.output_dir.name))
    return id_set, ood
