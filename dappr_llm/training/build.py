"""Recipe → method, model, backend and rows. Chooses between text and vision for everything that trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.backend import Backend
from ..core.errors import UserError, explained
from ..core.hub_revisions import commit_read
from ..core.recipe import Recipe
from ..inference.batching import RowSet
from ..methods import Method, get_method
from .config import DAPPrConfig

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn
    from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase


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
    values = {"report_to": "none", **recipe.train, "output_dir": str(recipe.output_dir)}
    with explained(f"{recipe.name}: the train section is not valid"):  # TrainingArguments may raise anything
        return DAPPrConfig(**values)


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
    backend.data_revisions = data_revisions(recipe)
    return TrainingRun(method, model, backend, task.name, train, validation, auxiliary)


def load_calibration(recipe: Recipe, seed: int = 0) -> Any:
    """The rows that are kept for calibration; `None` if there are none."""
    build = _modality(recipe)
    return build.load_calibration(recipe, build.build_task(recipe), seed)


def data_revisions(recipe: Recipe) -> dict[str, str]:
    """The commits of a recipe's Hub datasets that were read by now, by Hub id."""
    build, data = _modality(recipe), recipe.data
    specs = [data.train, *data.ood, *([data.auxiliary] if data.auxiliary is not None else [])]
    tasks = [build.find_task(spec) for spec in specs if not (recipe.model.backbone and _is_noise(spec))]
    found = {task.path: commit_read(task.path, task.revision) for task in tasks}
    return {path: commit for path, commit in found.items() if commit}


def _is_noise(spec: Any) -> bool:
    from ..vision.build import is_noise

    return is_noise(spec)


def build_rows(recipe: Recipe, seed: int = 0) -> tuple[Any, Any]:
    """Training and validation rows of a recipe, without its model."""
    build = _modality(recipe)
    return build.build_data(recipe, build.build_task(recipe), seed)


def _modality(recipe: Recipe) -> Any:
    """`text.build` or `vision.build`, which have functions of the same names."""
    if recipe.model.backbone is not None:
        from ..vision import build

        return build
    from ..text import build as text_build

    try:
        text_build.build_task(recipe)
    except UserError:
        from ..vision.build import is_image_recipe

        is_image_recipe(recipe)  # says so if it is a task of images that lacks its backbone
        raise
    return text_build


def from_objects(
    model: str | nn.Module,
    processing_class: PreTrainedTokenizerBase | None,
    args: DAPPrConfig,
    method: Method,
    peft_config: LoraConfig | None = None,
    quantization_config: BitsAndBytesConfig | None = None,
    train_dataset: Any = None,
) -> tuple[nn.Module, Backend]:
    """Model and backend for `DAPPrTrainer`, from a model given by name or as an object."""
    if not isinstance(model, str):
        from ..vision.model import ImageClassifier

        if isinstance(model, ImageClassifier):
            from ..vision.backend import ImageBackend

            return model, ImageBackend(model, method)
    from ..text.build import from_objects as text_from_objects

    return text_from_objects(model, processing_class, args, method, peft_config, quantization_config, train_dataset)


def load_auxiliary(recipe: Recipe, method: Method, own: Any, seed: int) -> Any:
    """Rows of the auxiliary task, or noise images, for a method that learns from them; `own`: the training task."""
    if recipe.data.auxiliary is None and "auxiliary_rows" not in method.needs:
        return None
    from ..vision.build import is_noise, noise
    from .auxiliary_rows import check_auxiliary, check_names

    data, build = recipe.data, _modality(recipe)
    check_auxiliary(method, recipe.method["name"], data.auxiliary is not None)
    if recipe.model.backbone is not None and is_noise(data.auxiliary):
        return noise(recipe, own, seed)
    task = build.find_task(data.auxiliary, own)
    check_names(recipe.name, task.name, own.name, [build.find_task(spec).name for spec in data.ood])
    return build.load_rows(task, data.auxiliary_split, data.root, labelled=False, seed=seed)


def build_tests(recipe: Recipe) -> tuple[RowSet | None, list[RowSet]]:
    """Rows of the ID test (if there is a test split) and of each OOD test, read before any training."""
    data, build = recipe.data, _modality(recipe)
    own, name = build.build_task(recipe), recipe.output_dir.name
    id_set = None
    if data.test_split:
        rows = build.load_rows(own, data.test_split, data.root, data.max_test_samples)
        meta = {"checkpoint": name, "task_num_choices": getattr(own, "num_choices", None)}
        id_set = RowSet(rows, own.name, data.test_split, meta)
    ood: list[RowSet] = []
    for spec in data.ood:
        task = build.find_task(spec, own)
        if task.name in [each.task for each in ood] or task.name == own.name:
            raise UserError(f"{recipe.name}: data.ood names {task.name!r} twice, or it is the training task")
        rows = build.load_rows(task, data.ood_split, data.root, data.max_test_samples, labelled=False)
        meta = {"checkpoint": name, "task_num_choices": getattr(task, "num_choices", None)}
        ood.append(RowSet(rows, task.name, data.ood_split, meta))
    return id_set, ood
