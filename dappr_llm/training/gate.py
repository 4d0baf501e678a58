"""The gate of a run, fitted when its training is done: plain training rows, and calibration rows for p-values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import checkpoint
from ..core.backend import is_stream
from ..core.errors import UserError
from ..core.files import is_main_process, say
from ..inference.gate import GateScorer
from ..inference.gate_fitting import GateRows, calibrated, fit_gate
from .build import load_calibration

if TYPE_CHECKING:
    from ..core.recipe import Recipe
    from ..decisions.gate import Gate
    from .trainer import DAPPrTrainer


def fit_run_gate(trainer: DAPPrTrainer, recipe: Recipe, task: str, folder: Path) -> GateScorer | None:
    """
    Fit the gate of a trained model and write it beside the weights; without one, a sentence says why.

    Args:
        trainer (`DAPPrTrainer`):
            With the weights that were saved.
        recipe (`Recipe`):
            The run's recipe, which may say `gate: false`.
        task (`str`):
            Name of the training task.
        folder (`Path`):
            The run's folder.
    """
    if not recipe.gate:
        return None
    try:
        if is_stream(trainer.labelled_rows):
            raise UserError("the training rows are a stream, which is read once; fit one with `dappr gate`")
        gate = _fitted(trainer, recipe, task)
    except UserError as error:  # training is done: its results must not be lost
        say(f"No gate: {error}")
        return None
    if is_main_process():
        gate = gate.bound(checkpoint.weights_hash(folder))
        gate.save(folder)
    return GateScorer(gate)


def _fitted(trainer: DAPPrTrainer, recipe: Recipe, task: str) -> Gate:
    predictor, data = trainer.predictor, recipe.data
    rows: Any = trainer.backend.plain(trainer.labelled_rows)
    gate = fit_gate(predictor, GateRows(rows, task, data.train_split))
    say(f"Gate: {gate.fitted_on['n']:,} training rows ({gate.kind})")
    try:
        kept = load_calibration(recipe, trainer.args.seed)
        if kept is None:
            raise UserError("no rows are kept for calibration (data.calibration_split)")
        gate = calibrated(predictor, gate, GateRows(kept, task, data.calibration_split))
    except UserError as error:
        say(f"No familiarity: {error}")
        return gate
    assert gate.familiarity is not None
    bins = len(gate.familiarity.densities)
    say(f"Familiarity: {gate.familiarity.count:,} calibration rows" + (f", {bins} bins of length" if bins > 1 else ""))
    return gate
