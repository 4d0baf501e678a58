"""
`dappr sweep`: train methods x seeds on one task, each run in its own process, and compare them in one table.

A table file lists seeds and rows. Its runs are ordinary `dappr train` runs in folders `OUT/ROW/seedN`: finished runs
(those with results) are skipped, interrupted ones resumed, failed ones reported while the others continue. A row may
also build on other runs: an ensemble of `members` runs per seed, or another method applied to the trained weights of
another row (`weights_of`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core import checkpoint
from ..core.errors import UserError, nearest
from ..core.names import safe_name, safe_path
from ..core.recipe import Recipe, default_name, find_recipe, load_recipe, read_yaml
from ..core.schemas import check
from ..core.schemas.results import SweepTable
from ..core.terminal import show
from ..evaluation.comparison import Row, compare, save_comparison
from ..evaluation.prediction_table import PredictionTable
from ..evaluation.runs import load_run
from ..training.run_folder import claim_folder
from .combine import combine_runs
from .local_pool import Job, run_jobs, visible_devices

MEMBER_STRIDE = 1000  # member i of an ensemble is trained with seed + 1000 i


@dataclass(frozen=True)
class TableRow:
    """
    One row of the table.

    Args:
        name (`str`): Name of its folder.
        label (`str`): Name shown in the table.
        recipe (`Path`): Its recipe file.
        overrides (`tuple[str, ...]`): Recipe overrides `section.key=value` of its runs.
        members (`int`): Number of runs per seed; more than 1 make an ensemble.
        weights_of (`str`, *optional*): Do not train; evaluate the weights of that other row with this row's method.
    """

    name: str
    label: str
    recipe: Path
    overrides: tuple[str, ...] = ()
    members: int = 1
    weights_of: str | None = None


@dataclass
class Table:
    """A table file with all its recipes resolved."""

    name: str
    output_dir: Path
    seeds: list[int]
    rows: list[TableRow]
    description: str = ""
    jobs: dict[str, Job] = field(default_factory=dict)  # by the run's folder
    runs: dict[tuple[str, int], list[str]] = field(default_factory=dict)  # folders of the runs of each (row, seed)


def load_table(
    path: str | Path,
    overrides: Iterable[str] = (),
    output_dir: str | None = None,
    seeds: list[int] | None = None,
    only: list[str] | None = None,
) -> Table:
    """
    Read a table file and resolve all its recipes, so that errors in them show before anything runs.

    Args:
        path (`str` or `Path`):
            A YAML file, or the name of a shipped one.
        overrides (`Iterable[str]`, *optional*):
            Recipe overrides `"section.key=value"` of every run.
        output_dir (`str`, *optional*):
            Output folder of runs and tables; defaults to the file's `output_dir`, or `runs/NAME`.
        seeds (`list[int]`, *optional*):
            Seeds, instead of the file's.
        only (`list[str]`, *optional*):
            Names of the rows to keep; the first row, the baseline, is always kept.
    """
    path = find_recipe(path)
    values = read_yaml(path)
    where = str(path)
    if "rows" not in values:
        raise UserError(f"{where} is no table file: it has no `rows` (a single recipe is run by `dappr train`)")
    check(SweepTable, values, where)
    name = values.get("name") or default_name(path)
    shared = [*_settings(values.get("set", {}), where), *overrides]
    rows = [_row(entry, number, path, shared) for number, entry in enumerate(values["rows"], start=1)]
    _check_rows(rows, where)
    found = seeds or values.get("seeds") or [0]
    if len({*found}) < len(found):
        raise UserError(f"{where}: seeds must be different, found {found}")
    folder = Path(output_dir or values.get("output_dir") or "runs" / safe_path(name))
    table = Table(name, folder, list(found), _keep(rows, only, where), values.get("description", ""))
    _plan(table)
    return table


def _settings(values: Mapping[str, Any] | None, where: str) -> list[str]:
    """A mapping `set:` as recipe overrides `section.key=value`."""
    values = values or {}
    try:
        return [f"{key}={json.dumps(value, allow_nan=False)}" for key, value in values.items()]  # JSON is YAML
    except (TypeError, ValueError) as error:  # dates, NaN
        raise UserError(f"{where}: `set` holds a value that a recipe cannot: {error}") from None


def _row(entry: str | dict[str, Any], number: int, path: Path, shared: list[str]) -> TableRow:
    """One entry of `rows:`, checked; `shared` are the overrides of all rows."""
    where = f"{path}, row {number}"
    entry = {"recipe": entry} if isinstance(entry, str) else entry
    beside = path.parent / f"{str(entry['recipe']).removesuffix('.yaml')}.yaml"
    recipe = beside if beside.is_file() else find_recipe(entry["recipe"])
    name = str(entry.get("name") or recipe.stem)
    members = entry.get("members", 1)
    if members > 1 and entry.get("weights_of"):
        raise UserError(f"{where}: a row is either an ensemble (members) or reads another row's weights (weights_of)")
    overrides = (*shared, *_settings(entry.get("set", {}), where))
    row = TableRow(name, str(entry.get("label") or name), recipe, overrides, members, entry.get("weights_of"))
    load_recipe(row.recipe, row.overrides)
    return row


def _check_rows(rows: list[TableRow], where: str) -> None:
    folders = [safe_name(row.name).casefold() for row in rows]  # not every file system tells "a" from "A"
    for row, folder in zip(rows, folders, strict=True):
        if folders.count(folder) > 1:
            raise UserError(f"{where}: two rows are called {row.name!r}; give one of them a `name`")
    trained = [row.name for row in rows if row.weights_of is None and row.members == 1]
    for row in rows:
        if row.weights_of is not None and row.weights_of not in trained:
            hint = nearest(row.weights_of, trained)
            raise UserError(f"{where}: row {row.name!r} wants the weights of {row.weights_of!r}; {hint}")


def _keep(rows: list[TableRow], only: list[str] | None, where: str) -> list[TableRow]:
    names = [row.name for row in rows]
    for name in only or ():
        if name not in names:
            raise UserError(f"{where} has no row {name!r}; {nearest(name, names)}")
    wanted = {rows[0].name, *(only or names)}
    wanted |= {row.weights_of for row in rows if row.name in wanted and row.weights_of}
    return [row for row in rows if row.name in wanted]


def _plan(table: Table) -> None:
    """Fill in `table.jobs` and `table.runs`; rows with equal recipe and overrides share their runs."""
    owners: dict[tuple[Path, tuple[str, ...], str | None], str] = {}
    # Seed by seed, so that all rows can be compared early. Rows that use the weights of others come after them.
    ordered = sorted(table.rows, key=lambda row: (row.members > 1, row.weights_of is not None))
    for seed in table.seeds:
        for row in ordered:
            owner = owners.setdefault((row.recipe, row.overrides, row.weights_of), row.name)
            seeds = [seed + MEMBER_STRIDE * number for number in range(row.members)]
            found = [_job(table, row, owner, member) for member in seeds]
            table.runs[row.name, seed] = [str(job.folder) for job in found]
            for job in found:
                table.jobs.setdefault(str(job.folder), job)


def _job(table: Table, row: TableRow, owner: str, seed: int) -> Job:
    folder = table.output_dir / safe_name(owner) / f"seed{seed}"
    overrides = [*row.overrides, f"train.seed={seed}", f"train.output_dir={folder}"]
    after = None
    if row.weights_of is not None:
        after = str(table.output_dir / safe_name(row.weights_of) / f"seed{seed}")
        overrides += [f"model.adapter={after}", "train.num_train_epochs=0", "train.max_steps=-1"]
    return Job(f"{owner} seed {seed}", folder, row.recipe, tuple(overrides), after)


def job_recipe(job: Job) -> Recipe:
    """The resolved recipe of a run."""
    return load_recipe(job.recipe, job.overrides)


def is_finished(job: Job) -> bool:
    """Whether the run is finished; `UserError` if its folder holds a different run."""
    return claim_folder(job_recipe(job), job.folder, "auto", overwrite=False)


def sweep(table: Table, jobs: int | None = None, dry_run: bool = False, tables_only: bool = False) -> int:
    """
    Run the jobs that are not finished, then write the comparison table.

    Args:
        table (`Table`):
            From [`load_table`].
        jobs (`int`, *optional*):
            Number of parallel runs; defaults to one per visible GPU, or 1.
        dry_run (`bool`, *optional*, defaults to `False`):
            List the runs and stop.
        tables_only (`bool`, *optional*, defaults to `False`):
            Start no run; only write the table.

    Returns:
        `int`: Exit code: 0, 1 if runs failed, 130 if interrupted.
    """
    done = {name for name, job in table.jobs.items() if is_finished(job)}
    left = [job for name, job in table.jobs.items() if name not in done]
    counts = f"{len(table.rows)} rows, {len(table.seeds)} seeds, {len(table.jobs)} runs"
    show(f"{table.name}: {counts} in {table.output_dir}, {len(done)} of them finished")
    if dry_run:
        for name, job in table.jobs.items():
            show(f"  {'finished' if name in done else 'to do   '}  {job.name:<24}  {job.folder}")
        return 0
    failed: dict[str, str] = {}
    interrupted = False
    if left and not tables_only:
        slots: list[str | None] = [*visible_devices()] or [None]
        if jobs is not None:
            slots = [slots[i % len(slots)] for i in range(max(1, jobs))]
        failed, interrupted = run_jobs(left, slots, done)
    rows = collect(table)
    if rows:
        show("\n" + save_comparison(compare(rows), table.output_dir, table.name, table.description))
    for name, reason in failed.items():
        show(f"Failed: {name}: {reason}")
    if interrupted:
        show("Interrupted; the same command goes on where this one stopped.")
        return 130
    return 1 if failed else 0


def collect(table: Table) -> list[Row]:
    """Prediction tables of every row and seed whose runs are finished; combines the members of ensembles."""
    rows = []
    for row in table.rows:
        found: dict[int, dict[str, PredictionTable]] = {}
        for seed in table.seeds:
            folders = table.runs[row.name, seed]
            if not all((Path(folder) / checkpoint.RESULTS).is_file() for folder in folders):
                continue
            source = Path(folders[0])
            if row.members > 1:
                source = table.output_dir / safe_name(row.name) / f"seed{seed}-ensemble"
                combine_runs(folders, str(source), quiet=True)
            found[seed] = load_run(source, require="results").tables
        if found:
            rows.append(Row(row.name, row.label, found))
    return rows
