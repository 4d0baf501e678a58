"""What a run remembers of its data: tasks, columns, labels and splits, for every verb that reads rows. No torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..core import checkpoint
from ..core.errors import UserError
from ..core.recipe import Recipe, load_recipe
from ..core.splits import CALIBRATION
from .modality import check_unchanged, find_run_task, is_own_task, remembered_task, trained_places

if TYPE_CHECKING:
    from .modality import Task, TaskSpec

logger = logging.getLogger(__name__)

Role = Literal["test", "validation", "calibration", "ood"]


@dataclass(frozen=True)
class Wanted:
    """
    Rows that a verb asks for.

    Args:
        task (`MCQTask` or `ImageTask`):
            The task.
        split (`str`):
            Its split.
        limit (`int`, *optional*):
            Only the first rows.
    """

    task: Task
    split: str
    limit: int | None = None


class RunData:
    """
    The data of a run, from the `recipe.yaml` in its folder and its sidecar.

    Args:
        folder (`str` or `Path`):
            The run's folder.
        config (`Mapping`):
            Its `uncertainty_config.json`.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any]):
        self.folder, self.config = Path(folder), config

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe that was trained; `None` for a run of a script."""
        path = self.folder / checkpoint.RECIPE
        return load_recipe(path) if path.is_file() else None

    @cached_property
    def own(self) -> Task | None:
        """The task that was trained on; `None` if nothing says it."""
        return remembered_task(self.recipe, self.config)

    @property
    def seed(self) -> int:
        """The run's seed, which determines the validation rows of images."""
        return int(self.recipe.train.get("seed", 42)) if self.recipe else 0

    def root(self, given: str | None) -> str | None:
        """The folder with local copies of Hub datasets: the one that is given, or the run's if it is still there."""
        own = self.recipe.data.root if self.recipe else None
        return given or (own if own and Path(own).expanduser().is_dir() else None)

    def find(
        self,
        spec: TaskSpec | None = None,
        columns: Mapping[str, Any] | None = None,
        role: Role = "test",
        split: str | None = None,
        limit: int | None = None,
    ) -> Wanted:
        """
        The rows that are asked for; what is not said is the run's.

        Args:
            spec (*optional*):
                As for `modality.find_task`; `None` for the run's own task.
            columns (`Mapping`, *optional*):
                Columns, labels and encoding that the user names.
            role (`str`, *optional*, defaults to `"test"`):
                `"test"`, `"validation"`, `"calibration"` or `"ood"`: which split is meant if none is named.
            split (`str`, *optional*):
                The split.
            limit (`int`, *optional*):
                Only the first rows.
        """
        if spec is None and (self.recipe is None or self.own is None):
            raise UserError(
                f"{self.folder} has no {checkpoint.RECIPE} that says what it was trained on; name the rows (--task, "
                "for evaluate --id)"
            )
        task = find_run_task(self.own, spec, self.config, columns, ood=role == "ood")
        own = self.own is not None and self.recipe is not None and role != "ood" and is_own_task(self.own, spec)
        if own:
            warning = check_unchanged(task, str(self.folder))
            if warning:
                logger.warning(warning)
        return Wanted(task, split or self._split(role, own, spec is not None), limit)

    def _split(self, role: Role, own: bool, named: bool) -> str:
        data = self.recipe.data if self.recipe else None
        usual = role if role in ("validation", "calibration") else "test"
        if data is None or not own:
            return usual
        held_out = data.validation_split or ("validation" if data.validation_fraction else None)
        found = {"validation": held_out, "calibration": data.calibration_split}.get(role, data.test_split)
        if role == "calibration" and found is not None and not self._has_calibration(found):
            found = None  # a run of a version that kept no such rows
        if found is None and named:
            return usual  # of a file without such a part all rows are read
        if found is None:
            raise UserError(
                f"{self.folder} was trained without {role} rows (data.{role}_split is null); name rows (--task) or a "
                "split (--split)"
            )
        return found

    def _has_calibration(self, split: str) -> bool:
        task, data = self.own, self.recipe.data if self.recipe else None
        if split != CALIBRATION or data is None or task is None:
            return True
        known = {*getattr(task, "splits", ()), *getattr(task, "fractions", ())}
        return bool(getattr(task, "calibration", ())) or getattr(task, "bundled", False) or split in known

    def say_trained(self, wanted: Wanted, rows: Any) -> None:
        """Warn of rows of a new file that the run was trained on: its results would be too good."""
        if self.recipe is None or self.own is None or wanted.task.name == self.own.name:
            return
        found = trained_places(self.own, self.recipe.data.train_split, rows)
        if found:
            first = f"{rows['id'][found[0][0]]!r} = {found[0][1]}"
            logger.warning(
                f"{wanted.task.name}: {self.folder} was trained on {len(found):,} of these {len(rows):,} rows (first: "
                f"{first}): results on them are too good"
            )

    def tests(self, limit: int | None = None) -> tuple[Wanted, list[Wanted]]:
        """The rows that the run itself was tested on: in distribution, and of each OOD task."""
        data = self.recipe.data if self.recipe else None
        limit = limit or (data.max_test_samples if data else None)
        own = self.find(limit=limit)
        split = data.ood_split if data else None
        return own, [self.find(spec, role="ood", split=split, limit=limit) for spec in (data.ood if data else ())]
