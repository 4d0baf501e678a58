"""`dappr train`: train a recipe, predict its test tasks, write results."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.errors import first_line
from ..core.files import is_main_process, say
from ..core.recipe import load_recipe, settings
from . import shared

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ..core.backend import Backend
    from ..core.recipe import Recipe
    from ..evaluation.prediction_table import PredictionTable
    from ..inference.batching import RowSet
    from ..inference.table_predictor import TablePredictor
    from ..training.build import TrainingRun
    from ..training.config import DAPPrConfig
    from ..training.trainer import DAPPrTrainer
    from ..training.untrained import Untrained

EPILOG = """examples:
  dappr train recipes/quickstart.yaml
  dappr train obqa_smollm2/dappr --data-root data --set train.seed=3 --set method.reg_weight=1e-3
  dappr train recipes/quickstart.yaml --resume            go on after Ctrl-C
  dappr train obqa_mistral7b/dappr --launch multi_gpu    accelerate's launcher with a shipped setting; the same as
  accelerate launch --config_file recipes/accelerate/multi_gpu.yaml -m dappr_llm train obqa_mistral7b/dappr"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    for name, options in shared.RECIPE_ARGUMENTS.items():
        parser.add_argument(name, **options)
    parser.add_argument("--output-dir", help="where the run is written (default: runs/NAME)")
    parser.add_argument("--data-root", help="local folder with Hub datasets in their row layout")
    parser.add_argument(
        "--resume", nargs="?", const="auto", metavar="CHECKPOINT", help="go on from the last (or this) checkpoint"
    )
    parser.add_argument("--overwrite", action="store_true", help="remove an older run from the output folder first")
    parser.add_argument(
        "--launch",
        metavar="PRESET",
        help="start accelerate's launcher: cpu_2, single_gpu, multi_gpu, fsdp2, zero2, zero3, multi_node, or a file",
    )
    parser.add_argument(
        "--launch-args", default="", metavar="ARGS", help='more for the launcher, as one text: "--num_processes 8"'
    )


@dataclass(frozen=True)
class TrainOptions:
    """
    What `dappr train` is asked for.

    Args:
        recipe (`str`):
            A YAML file, or the name of a shipped recipe.
        overrides (`tuple[str, ...]`, *optional*):
            Settings `section.key=value` over the recipe's own.
        resume (`str`, *optional*):
            `"auto"`: go on from the last checkpoint in the output folder if there is one; or a checkpoint folder.
        overwrite (`bool`, *optional*, defaults to `False`):
            Remove an older run from the output folder first.
        launch (`str`, *optional*):
            Preset or config file of accelerate's launcher; by default training runs in this process.
        launch_args (`str`, *optional*):
            More arguments for the launcher, as one text.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    resume: str | None = None
    overwrite: bool = False
    launch: str | None = None
    launch_args: str = ""

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> TrainOptions:
        """From the parsed command line."""
        given = settings(args.set, {"data.root": args.data_root, "train.output_dir": args.output_dir})
        return cls(args.recipe, tuple(given), args.resume, args.overwrite, args.launch, args.launch_args)


def run(args: argparse.Namespace) -> int:
    """Exit code 130 for a training that was interrupted and saved."""
    options = TrainOptions.from_args(args)
    recipe = load_recipe(options.recipe, options.overrides)  # a mistake in it is found once, not once per process
    if options.launch:
        from ..scale.launch import launch

        return launch(options.launch, launched_arguments(options), options.launch_args)
    return 0 if train(recipe, options.resume, options.overwrite) else 130


def launched_arguments(options: TrainOptions) -> list[str]:
    """The command line of `dappr` in each launched process."""
    arguments = ["train", options.recipe, *(part for text in options.overrides for part in ("--set", text))]
    arguments += ["--resume", options.resume] if options.resume else []
    return arguments + (["--overwrite"] if options.overwrite else [])


def train(recipe: Recipe, resume: str | None = None, overwrite: bool = False) -> Path | None:
    """
    Train a recipe, test it, write tables, results and pictures.

    Args:
        recipe (`Recipe`):
            What to do.
        resume, overwrite (*optional*):
            As in [`TrainOptions`].

    Returns:
        The folder of the finished run, or `None` if training was interrupted and saved.
    """
    from ..core import checkpoint
    from ..core.files import folder_lock, is_empty, remove_leftovers
    from ..evaluation.reporting.run_results import show_results
    from ..training.run_folder import claim_folder

    folder = recipe.output_dir
    with folder_lock(folder) if is_main_process() else nullcontext():
        if is_main_process():
            remove_leftovers(folder)
        taken = is_main_process() and not is_empty(folder)
        if taken and not overwrite and claim_folder(recipe, folder, resume, overwrite):
            say(f"{folder} holds this run already, finished; use --overwrite to train it again.")
            show_results(folder)
            return folder
        if not is_main_process() and resume is not None and not overwrite and (folder / checkpoint.RESULTS).is_file():
            return folder  # rank 0 says so; nothing is left to do
        recipe = _with_data(recipe)
        if taken and overwrite:  # not before the data are known to be good
            claim_folder(recipe, folder, resume, overwrite)
        return _train(recipe, folder, resume)


def _with_data(recipe: Recipe) -> Recipe:
    """The recipe with what its data say, which are checked: without torch, in a second or two."""
    from ..inference.modality import check_data, settle_data

    recipe = settle_data(recipe)
    if is_main_process():
        check_data(recipe)
    return recipe


def _train(recipe: Recipe, folder: Path, resume: str | None) -> Path | None:
    # torch and its friends take seconds to import: mistakes in the recipe were found before.
    from ..core.backend import is_stream
    from ..core.errors import UserError, first_line
    from ..evaluation.reporting.run_results import finish, show_samples
    from ..training.build import build_args, build_run, build_tests
    from ..training.gate import fit_run_gate
    from ..training.run_folder import keep_dtype
    from ..training.saving import check_last
    from ..training.untrained import before_training

    args = build_args(recipe)
    if resume is not None:
        keep_dtype(recipe, folder, resume)
    id_set, ood_sets = build_tests(recipe)
    run = build_run(recipe, args)
    trainer = _trainer(recipe, args, run, ood_sets)
    if resume is not None:
        check_last(trainer, folder)
    _record(recipe, trainer, folder)
    before = before_training(trainer, run.train, id_set)
    size = "a stream of" if is_stream(run.train) else len(run.train)
    held = "" if run.backend.precision in (None, "float32") else f", base model in {run.backend.precision}"
    say(f"Training {recipe.method['name']} on {run.task}, {size} rows{held}, into {folder}")
    if args.num_train_epochs or args.max_steps > 0:  # 0 epochs: test the starting adapter with this method
        try:
            trainer.train(resume_from_checkpoint=resume)
        except ImportError as error:  # an optimizer or kernel whose package is not installed
            raise UserError(f"{recipe.name}: {first_line(error)}") from error
    if trainer.interrupt.stopped:
        say(f"Stopped at step {trainer.state.global_step}, saved in {folder}. Continue with --resume.")
        return None
    trainer.save_model(str(folder), _internal_call=True)  # pushed below, once, with its results
    gate = fit_run_gate(trainer, recipe, run.task, folder)
    sets = [each for each in (id_set, *ood_sets) if each is not None]
    tables = _predict(trainer.predictor.with_gate(gate), sets, run.train, folder)
    if id_set is not None:
        named = {each.task: table for each, table in zip(sets, tables, strict=True)}
        facts = _facts(run.backend)
        baselines = _baselines(run.train, id_set.rows, tables[0], before) if is_main_process() else {}
        finish(folder, named, recipe.name, seed=trainer.args.seed, facts=facts, baselines=baselines)
        show_samples(folder, named)
        say(next_steps(folder))
    if trainer.args.push_to_hub:
        pushed = trainer.push_saved(str(folder))
        say(f"Published: {pushed.url if pushed else ''}")
    return folder


def _record(recipe: Recipe, trainer: DAPPrTrainer, folder: Path) -> None:
    """Write the recipe into the run's folder, with what its words meant here: a branch, `dtype: auto`, nothing."""
    from ..core import checkpoint
    from ..training.callbacks.record_chosen import RecordChosen
    from ..training.run_folder import set_dtype

    backend = trainer.backend
    if backend.base_revision:
        recipe.model.revision = backend.base_revision  # the commit behind the branch, to be loaded again
    set_dtype(recipe, backend.precision)
    trainer.add_callback(RecordChosen(trainer, recipe, folder / checkpoint.RECIPE))


def _facts(backend: Backend) -> dict[str, Any]:
    """What `results.json` says of the model and the data."""
    return {
        "base_revision": backend.base_revision,
        "precision": backend.precision,
        "data_revisions": dict(backend.data_revisions),
    }


def _trainer(recipe: Recipe, args: DAPPrConfig, run: TrainingRun, ood_sets: Sequence[RowSet]) -> DAPPrTrainer:
    from ..core.errors import explained
    from ..training.trainer import DAPPrTrainer

    with explained(f"{recipe.name} cannot be trained"):  # Trainer checks its arguments against each other
        return DAPPrTrainer(
            run.model,
            args,
            run.train,
            run.validation,
            method=run.method,
            backend=run.backend,
            auxiliary_dataset=run.auxiliary,
            auxiliary_share=recipe.data.auxiliary_share,
            ood_datasets={each.task: each.rows for each in ood_sets},
        )


def _predict(predictor: TablePredictor, sets: Sequence[RowSet], train: Any, folder: Path) -> list[PredictionTable]:
    """The tables of the test sets, written with their texts, and how far each text is from the training rows."""
    from ..evaluation.ood_baselines import add_text_distances
    from .predict import save_tables

    for each in sets:
        say(f"Predicting {each.task} ({each.split}, {len(each.rows)} rows)")
    tables = predictor.predict_tables(sets)
    if len(sets) > 1:
        add_text_distances(train, tables, [each.rows for each in sets])
    save_tables(sets, tables, folder)
    return tables


def next_steps(folder: Path) -> str:
    """What to type after a training."""
    from ..decisions.rule import FILE as DECISION

    run = shlex.quote(str(folder))
    steps = [
        (f"dappr report {run}", f"one page with all figures and pictures: {folder / 'report' / 'report.html'}"),
        (f"dappr ask {run}", "ask it yourself"),
    ]
    if not (folder / DECISION).is_file():
        steps.insert(1, (f"dappr calibrate {run}", "prediction sets, and when to abstain"))
    width = max(len(command) for command, _ in steps)
    return "\n".join(["Next:", *(f"  {command:<{width}}   {what}" for command, what in steps)])


def _baselines(train: Any, test: Any, table: PredictionTable, before: Untrained) -> Mapping[str, PredictionTable]:
    """The tables of the run's baselines, from its training and test rows; empty where there can be none."""
    from ..evaluation.row_baselines import row_baselines

    try:
        others = {} if before.zero_shot is None else {"zero_shot": before.zero_shot}
        found = row_baselines(train, test, table, before.features, others, before.feature_rows)
    except Exception as error:  # training is done: whatever a baseline stumbles over must not cost its results
        say(f"No baselines: {first_line(error)}")
        return {}
    for name, reason in found.skipped.items():
        say(f"No baseline {name!r}: {reason}")
    return found.tables
