"""
Dispatch between text and images where there is no backend yet to ask: tasks by name, rows, adapters, plans.

The only module of `inference/` that imports `text` or `vision`, always inside functions, so that importing it loads no
torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, overload

from ..core.checkpoint import SIDECAR
from ..core.errors import UserError
from ..core.hub_revisions import dataset_commit, is_commit

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

    from ..core.backend import Backend
    from ..core.planned_model import PlannedModel
    from ..core.recipe import Recipe
    from ..methods import Method
    from ..text.data.items import MCQItem
    from ..text.data.proposal import Proposal
    from ..text.data.tasks import ItemRows, MCQTask
    from ..vision.backend import ImageItem
    from ..vision.data.catalogue import ImageTask
    from ..vision.data.rows import ImageRows

    Task: TypeAlias = MCQTask | ImageTask
    DatasetRows: TypeAlias = Dataset | ImageRows  # rows with `select`
    TaskSpec: TypeAlias = str | Mapping[str, Any] | Task  # a name, a file or folder, a mapping, or a declaration

DATA_ROOT = "DAPPR_DATA_ROOT"
# Module and class of the backend that loads checkpoints of each modality.
BACKENDS = {
    "text": ("dappr_llm.text.backend", "TextBackend"),
    "vision": ("dappr_llm.vision.backend", "ImageBackend"),
}


class PlanArguments(Protocol):
    """The training arguments that a plan needs; `DAPPrConfig` has them."""

    max_length: int
    seed: int


@overload
def find_task(spec: TaskSpec, modality: Literal["text"]) -> MCQTask: ...
@overload
def find_task(spec: TaskSpec, modality: Literal["vision"]) -> ImageTask: ...
@overload
def find_task(spec: TaskSpec, modality: str | None = None, revisions: Mapping[str, str] | None = None) -> Task: ...
def find_task(spec: TaskSpec, modality: str | None = None, revisions: Mapping[str, str] | None = None) -> Task:
    """
    The declaration of a task.

    Args:
        spec (`str`, `Mapping`, `MCQTask` or `ImageTask`):
            A task's name, a file or folder, a Hub id, a mapping from a recipe, or a declaration (returned as it is).
        modality (`str`, *optional*):
            `"text"` or `"vision"`, if a checkpoint or recipe determines it; by default inferred from `spec`.
        revisions (`Mapping[str, str]`, *optional*):
            Commits by Hub id, as a checkpoint recorded them: its datasets are read at these, unless `spec` names one.
    """
    return _pinned(_declared(spec, modality), revisions)


def _pinned(task: Task, revisions: Mapping[str, str] | None) -> Task:
    commit = (revisions or {}).get(task.path or "")
    if commit is None or task.revision is not None:
        return task
    if not is_commit(commit):
        raise UserError(f"data_revisions of the checkpoint: {task.path} has {str(commit)[:80]!r}, which is no commit")
    return replace(task, revision=commit)


def _declared(spec: TaskSpec, modality: str | None) -> Task:
    # Both functions raise a `UserError` for whatever they do not accept.
    if modality == "vision" or modality is None:
        from ..vision.data.tasks import get_image_task, is_image_task

        if modality == "vision" or is_image_task(spec):
            return get_image_task(spec)  # type: ignore[arg-type]
    from ..text.data.tasks import get_task

    return get_task(spec)  # type: ignore[arg-type]


def remembered_task(recipe: Recipe | None, config: Mapping[str, Any]) -> Task | None:
    """
    The task that a run was trained on, without reading its rows; `None` if nothing says it.

    Args:
        recipe (`Recipe`, *optional*):
            The recipe in the run's folder.
        config (`Mapping`):
            Its sidecar.
    """
    if config["modality"] == "text":
        from ..text.data.run_task import remembered

        return remembered(recipe, tuple(config.get("labels") or ()) or None)
    return find_task(recipe.data.train, config["modality"]) if recipe is not None else None


def find_run_task(
    own: Task | None,
    spec: TaskSpec | None,
    config: Mapping[str, Any],
    columns: Mapping[str, Any] | None = None,
    ood: bool = False,
) -> Task:
    """
    A task beside a run's own, from which files of text inherit columns and labels; images have theirs in their files.

    Args:
        own (`MCQTask` or `ImageTask`, *optional*):
            From [`remembered_task`].
        spec (*optional*):
            As for [`find_task`]; `None` for the run's own.
        config (`Mapping`):
            The run's sidecar: modality, and commits of Hub datasets.
        columns (`Mapping`, *optional*):
            Columns, labels and encoding that the user names.
        ood (`bool`, *optional*, defaults to `False`):
            Rows of another distribution, whose labels may be others.
    """
    if config["modality"] == "text":
        from ..text.data.run_task import find_rows

        found: Task = find_rows(own, spec, columns, ood)  # type: ignore[arg-type]
    elif columns:
        raise UserError("Images have no columns to name: leave --text, --choices, --labels and --label out")
    elif spec is None:
        if own is None:
            raise UserError("The run does not say what it was trained on; name the images")
        found = own
    else:
        found = find_task(spec, config["modality"])
    return _pinned(found, config.get("data_revisions"))


def is_own_task(own: Task, spec: TaskSpec | None) -> bool:
    """Whether a task is a run's own: nothing is named, or its name, or the file whose rows were dealt out."""
    from ..text.data.registry import MCQTask

    if not isinstance(own, MCQTask):
        return spec is None or spec == own.name
    from ..text.data.run_task import is_own

    return is_own(own, spec)


def trained_places(own: Task, split: str, rows: Any) -> list[tuple[int, str]]:
    """Which rows of text a run was trained on: their numbers, each with the place of the training row."""
    from ..text.data.registry import MCQTask

    if not isinstance(own, MCQTask):
        return []
    from ..text.data.tasks import trained_places as of_text

    return of_text(own, split, rows["question"])


def check_unchanged(task: Task, run: str) -> str | None:
    """What to warn of if the files of a run's own task have changed; a `UserError` if trained rows are not known."""
    from ..text.data.registry import MCQTask

    if not isinstance(task, MCQTask):
        return None
    from ..text.data.run_task import check_unchanged as of_text

    return of_text(task, run)


def settle_data(recipe: Recipe) -> Recipe:
    """A recipe with what its rows say where it says nothing: columns, labels, splits; of images splits alone."""
    if recipe.model.backbone is not None:
        from ..vision.build import settle

        return settle(recipe)
    from ..text.data.tasks import settle_recipe

    try:
        return settle_recipe(recipe)
    except UserError:
        from ..vision.build import is_image_recipe

        is_image_recipe(recipe)  # says so if it is a task of images that lacks its backbone
        raise


def check_data(recipe: Recipe) -> None:
    """Data checks of a recipe on text, which need no model; images are checked as they are read."""
    if recipe.model.backbone is None:
        from ..text.data.checks import check_recipe

        check_recipe(recipe)


def propose(path: str, given: Mapping[str, Any]) -> Proposal:
    """What a file of texts holds, and a recipe for it; `given` are the keys of a task description that are known."""
    from ..text.data.proposal import propose as of_text

    return of_text(path, given)


def load_rows(
    task: Task,
    split: str,
    root: str | None = None,
    limit: int | None = None,
    labelled: bool = True,
    seed: int = 0,
    plain: bool = False,
) -> Dataset | ItemRows | ImageRows:
    """
    Load the rows of one split.

    Args:
        task (`MCQTask` or `ImageTask`):
            From [`find_task`].
        split (`str`):
            Name of the split.
        root (`str`, *optional*):
            Folder with local copies of Hub datasets.
        limit (`int`, *optional*):
            Maximal number of rows.
        labelled (`bool`, *optional*, defaults to `True`):
            Refuse rows without a label.
        seed (`int`, *optional*, defaults to 0):
            For images: the seed of the split into training and validation rows.
        plain (`bool`, *optional*, defaults to `False`):
            For text: return `ItemRows` instead of a `Dataset`, which saves importing `datasets`.
    """
    from ..vision.data.tasks import ImageTask, load_image_task

    if isinstance(task, ImageTask):
        return load_image_task(task, split, root, limit, labelled, seed)
    from ..text.data.tasks import load_items, load_task

    return (load_items if plain else load_task)(task, split, root, limit, labelled)


def with_matched_options(rows: Any, first: Any) -> Any:
    """Rows with no more options than another task's rows offer; images are returned as they are."""
    from ..text.data.fewer_options import with_matched_options as of_text

    return of_text(rows, first)


def described(task: Task, split: str) -> tuple[Any, Path | None]:
    """A task as plain values, with all its columns and labels if it is of text, and the file of a split."""
    from ..text.data.registry import MCQTask
    from ..text.data.registry import describe as of_text

    if not isinstance(task, MCQTask):
        return {"name": task.name, "path": task.path}, Path(task.path) if task.path else None
    return of_text(replace(task, sha256={})), Path(task.source(split)) if task.own_files else None


def count_rows(path: str | Path, most: int) -> int:
    """Number of rows of a JSONL, CSV or Parquet file, counted up to `most`."""
    from ..text.data.sources import read_file

    return sum(1 for _ in islice(read_file(path), most))


def iter_items(
    task: Task, split: str, root: str | None, backend: Backend, seed: int = 0
) -> Iterator[MCQItem | ImageItem | tuple[MCQItem, Mapping[str, Any]]]:
    """
    Iterate over the items of one split, ready for `backend.encode`; those of the user's own files with their rows.

    Args:
        task, split, root, seed:
            As for [`load_rows`].
        backend (`Backend`):
            Makes items of images.
    """
    from ..vision.data.catalogue import ImageTask

    if not isinstance(task, ImageTask):
        from ..text.data.tasks import iter_rows

        yield from ((item, row) if task.own_files else item for _, item, row in iter_rows(task, split, root))
        return
    rows = load_rows(task, split, root, labelled=False, seed=seed)
    prepared = backend.prepare(rows, labelled=False, name=task.name)
    for i, name in enumerate(prepared["id"]):
        row = {"id": name, "image": prepared.rows.load(i), "label": int(prepared.rows.labels[i])}
        yield from backend.items([row], i)


def hub_source(task: Task, root: str | None) -> tuple[str | None, str | None]:
    """Where rows come from besides a task's own files: the data root in force, and the commit of a Hub dataset."""
    root = root or os.environ.get(DATA_ROOT)
    if root:
        return str(Path(root).expanduser().resolve()), None
    if task.path is None or Path(task.path).expanduser().is_dir():
        return None, None
    return None, dataset_commit(task.path, task.revision)


def known_tasks(names: Iterable[object]) -> dict[str, Task]:
    """Declarations of the built-in tasks among these names, by name; all other entries are ignored."""
    from ..text.data.tasks import TASKS
    from ..vision.data.catalogue import IMAGE_TASKS

    every: dict[str, Task] = {**TASKS, **IMAGE_TASKS}
    return {name: every[name] for name in names if isinstance(name, str) and name in every}


def public_base(name: str | None) -> str | None:
    """Name of a base model on the Hub: for the bundled model the id of its original weights, else `name` itself."""
    from ..text.bundled_model import public_name

    return public_name(name)


def bundled_folder(base: str) -> Path | None:
    """The folder of the bundled base model, unpacked; `None` for any other name."""
    from ..text import bundled_model

    return bundled_model.load_path() if base == bundled_model.NAME else None


def load_another(model: nn.Module, folder: str, name: str) -> None:
    """Load one more adapter beside those that a model has, under a name of its own."""
    from ..text.lm import load_another as of_text

    of_text(model, folder, name)  # type: ignore[arg-type]


def base_of(folder: Path, config: Mapping[str, Any], base: str | None = None) -> tuple[str | None, str | None]:
    """Name and commit of the base model of an adapter's folder; `base`: another one than its sidecar names."""
    from ..text.adapter_files import base_revision

    return base or config.get("base_model"), base_revision(folder / SIDECAR, config, base)


def adapter_backend(
    adapter: Path,
    base: str | None,
    method: Method,
    num_choices: int,
    prompt: dict[str, Any] | None,
    max_length: int,
) -> Backend:
    """The backend of a LoRA adapter trained with other software; arguments as for [`import_adapter.adopt`]."""
    from ..text.build import adapter_backend as of_text

    return of_text(adapter, base, method, num_choices, prompt, max_length)


def plan_model(
    recipe: Recipe,
    args: PlanArguments,
    method: Method,
    config: str | None = None,
    rows: int | None = None,
    length: int | None = None,
) -> PlannedModel:
    """
    A recipe's model on the meta device, for `dappr plan`.

    Args:
        recipe (`Recipe`):
            The recipe.
        args (`DAPPrConfig`):
            Its training arguments.
        method (`Method`):
            Its method.
        config, rows, length (*optional*):
            As in `scale.plan.plan`: the model's `config.json`, the number of training rows, tokens per prompt.
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
