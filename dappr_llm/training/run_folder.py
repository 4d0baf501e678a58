"""The output folder of a run: free, holding this very run, or another one. No torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..core import checkpoint
from ..core.errors import UserError
from ..core.files import is_empty
from ..core.hub_revisions import is_commit
from ..core.recipe import Recipe, load_recipe
from ..core.schemas.recipe import Dtype
from ..inference.modality import settle_data
from .overwrite import remove_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Settings of the train section that change speed, logging or places but not the trained weights: a run may be resumed
# with other values.
_NOT_IDENTITY = {
    "output_dir",
    "resume_from_checkpoint",
    "logging_steps",
    "disable_tqdm",
    "report_to",
    "save_total_limit",
    "packing",
    "share_prefix",
    "eval_tokens",
    "trunk_cache",
}
_FITTED = {"evidence_offset", "chosen", "versions", "format_version"}  # found in training, or not the run's


def claim_folder(recipe: Recipe, folder: Path, resume: str | None, overwrite: bool) -> bool:
    """
    Make sure that the output folder is free or holds a run of this recipe.

    Args:
        recipe (`Recipe`):
            The run that wants the folder.
        folder (`Path`):
            Its output folder; nothing in it is changed, but by `overwrite`.
        resume (`str`, *optional*):
            As `--resume`; `None` refuses a folder that already holds this run.
        overwrite (`bool`):
            Remove an older run first, whatever its recipe.

    Returns:
        `bool`: Whether the run in the folder is this one and finished.
    """
    if is_empty(folder):
        return False
    path = folder / checkpoint.RECIPE
    if not path.is_file():
        raise UserError(f"{folder} is not empty and holds no run of ours; choose another train.output_dir")
    if overwrite:
        remove_run(folder)
        return False
    stored = load_recipe(path)
    before, now = _identity(stored), _identity(recipe)
    for key in stored.chosen:  # by that run, which this one does as well where nothing is given
        if now.get(key) is None:
            before.pop(key, None)
            now.pop(key, None)
    difference = _difference(before, now)
    if difference:
        raise UserError(
            f"{folder} holds another run ({difference}); choose another train.output_dir, or pass --overwrite"
        )
    if resume is None:
        raise UserError(
            f"{folder} holds this run already: pass --resume to go on with it, or --overwrite to start anew"
        )
    return (folder / checkpoint.RESULTS).is_file()


def keep_dtype(recipe: Recipe, folder: Path, resume: str) -> None:
    """
    Let `dtype: auto` mean what the checkpoint to go on from was trained in, whatever machine it was trained on.

    Args:
        recipe (`Recipe`):
            The run that goes on; its `model.dtype` is set.
        folder (`Path`):
            Its output folder.
        resume (`str`):
            As `--resume`.
    """
    for last in checkpoint.checkpoints(folder) if resume == "auto" else [Path(resume)]:
        try:
            held = checkpoint.load_sidecar(last)[1].get("precision")
        except UserError:  # a damaged checkpoint, which resuming passes over
            continue
        set_dtype(recipe, held)
        return


def set_dtype(recipe: Recipe, precision: str | None) -> None:
    """Write the dtype that a base model is held in into a recipe that says `auto`; unless quantised."""
    if (
        recipe.model.dtype == "auto"
        and recipe.model.quantization is None
        and precision in get_args(get_args(Dtype)[0])
    ):
        recipe.model = recipe.model.model_copy(update={"dtype": precision})


def check_resumed(folder: Path, config: Mapping[str, Any], rows: Iterable[str] | None = None) -> dict[str, Any]:
    """
    Raise a `UserError` if a checkpoint was made by another model, precision, data or layout; returns its sidecar.

    The recipe alone does not say: `dtype: auto`, a branch on the Hub and the files below a data root mean other things
    on another day or machine. What an older version did not write is not compared.

    Args:
        folder (`Path`):
            The checkpoint to go on from.
        config (`Mapping`):
            What the run that wants to go on would write into its own sidecar.
        rows (`Iterable[str]`, *optional*):
            Fingerprints of its training rows.
    """
    sidecar = checkpoint.load_sidecar(folder)[1]
    stored = {key: value for key, value in sidecar.items() if key in config and key not in _FITTED}
    difference = _difference(_flat(stored), _flat({key: config[key] for key in stored}))
    before, now = checkpoint.load_fingerprints(folder), frozenset(rows or ())
    if not difference and before and now and before != now:
        difference = f"of its {len(before)} training rows {len(before & now)} are among the {len(now)} of now"
    if difference:
        how = " (DAPPR_CPU_DTYPE says what auto means)" if "its precision" in difference else ""
        raise UserError(
            f"{folder} was made by another job ({difference}); resume it as it was started{how}, choose another "
            "train.output_dir, or pass --overwrite"
        )
    return sidecar


def _identity(recipe: Recipe) -> dict[str, Any]:
    """The settings that decide what is trained, by dotted key."""
    with suppress(UserError):  # what is wrong with the data is said to those who read them
        recipe = settle_data(recipe)  # a run's own recipe says what was found in them
    values = recipe.model_dump()
    values["data"].pop("checks")
    values["train"] = {k: v for k, v in values["train"].items() if k not in _NOT_IDENTITY}
    values["data"]["root"] = _place(values["data"]["root"])
    return _flat({k: v for k, v in values.items() if k not in ("name", "description", "chosen")})


def _place(root: Any) -> Any:
    """A data root as one path, however it was written."""
    return str(Path(root).expanduser().resolve()) if isinstance(root, str) else root


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first setting in which two runs differ, in words; empty if there is none."""
    for key in sorted(old.keys() | new.keys()):
        if key == "model.revision" and is_commit(old.get(key)) and not is_commit(new.get(key)):
            continue  # a run records the commit behind a branch; `check_resumed` compares what it is now
        if key == "model.dtype" and new.get(key) == "auto":
            continue  # a run records what it meant; it goes on with that
        if old.get(key) != new.get(key):
            return f"its {key} is {old.get(key)!r}, now {new.get(key)!r}"
    return ""
