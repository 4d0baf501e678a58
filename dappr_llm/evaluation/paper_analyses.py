"""
The paper's analyses, computed from prediction tables without torch; `scripts/plot_*.py` draws and prints them.

A sweep's folder holds runs `ROW/seedN`; [`find_runs`] reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..core.errors import UserError
from ..core.files import PathLike
from . import calibration_metrics, classification_metrics
from .bootstrap import Summary, over_seeds
from .evaluators import evaluate_id, evaluate_ood
from .prediction_table import PredictionTable
from .reporting.figures import COLOURS, STYLES, legend_above, new_figure, save_figure
from .reporting.markdown import markdown_table
from .runs import Run


def grouped(values: Sequence[tuple[float, float]]) -> dict[float, Summary]:
    """`(x, value)` pairs of several seeds → mean and spread of the values at each x, in ascending order of x."""
    positions = sorted({position for position, _ in values})
    return {p: over_seeds([value for position, value in values if position == p]) for p in positions}


def lambda_curves(runs: Sequence[Run]) -> dict[str, dict[float, Summary]]:
    """
    Accuracy, confidence AUPR and mean OOD AUPR against the coefficient λ of the regulariser.

    Args:
        runs (`Sequence[Run]`): Runs that differ in `method.reg_weight`; `regulariser: none` counts as λ = 0.

    Returns:
        `dict[str, dict[float, Summary]]`: By metric and λ.
    """
    found: dict[str, list[tuple[float, float]]] = {"accuracy": [], "conf. AUPR": [], "OOD AUPR": []}
    for run in runs:
        options = run.id_table.meta.get("options") or {}
        weight = 0.0 if options.get("regulariser") == "none" else float(options.get("reg_weight", 0.0))
        scores = evaluate_id(run.id_table)
        ood = [evaluate_ood(run.id_table, table)["aupr"] for table in run.ood_tables.values()]
        found["accuracy"].append((weight, scores["accuracy"]))
        found["conf. AUPR"].append((weight, scores["conf_aupr"]))
        found["OOD AUPR"].append((weight, float(np.mean(ood)) if ood else float("nan")))
    return {name: grouped(values) for name, values in found.items()}


def size_curves(runs: Sequence[Run]) -> dict[str, dict[float, Summary]]:
    """
    Mean epistemic uncertainty on the ID test split against the number of training rows.

    Args:
        runs (`Sequence[Run]`): Runs that differ in `data.max_train_samples`.

    Returns:
        `dict[str, dict[float, Summary]]`: By method and number of rows.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        size = run.recipe.data.max_train_samples
        if size is None:
            raise UserError(f"Run {run.row}, seed {run.seed}: its recipe sets no data.max_train_samples")
        mean = float(run.id_table.epistemic.mean())
        found.setdefault(str(run.id_table.meta.get("method")), []).append((float(size), mean))
    return {method: grouped(values) for method, values in found.items()}


def falls(curve: Mapping[float, Summary]) -> bool:
    """Whether the means of a curve are strictly decreasing."""
    means = [curve[position].mean for position in sorted(curve)]
    return all(after < before for before, after in zip(means, means[1:], strict=False))


def normalised_evidence(tables: Mapping[str, PredictionTable]) -> dict[str, np.ndarray]:
    """
    Total evidence alpha0 of several tables of one model, min-max scaled to [0, 1] over all tables jointly.

    Args:
        tables (`Mapping[str, PredictionTable]`): By name; all must have alpha.
    """
    totals = {}
    for name, table in tables.items():
        if table.alpha is None:
            raise UserError(f"The table of {name!r} has no alpha: only Dirichlet methods have evidence")
        totals[name] = table.alpha.astype(np.float64).sum(axis=1)
    low = min(values.min() for values in totals.values())
    high = max(values.max() for values in totals.values())
    return {name: (values - low) / max(high - low, 1e-12) for name, values in totals.items()}


def shift_table(id_table: PredictionTable, shifted: Mapping[str, PredictionTable]) -> dict[int, dict[str, float]]:
    """
    CIFAR-10-C metrics by severity, averaged over corruptions.

    Args:
        id_table (`PredictionTable`): Predictions for the clean test split, the positives.
        shifted (`Mapping[str, PredictionTable]`): Predictions for the corrupted test splits, by task name, which ends
            in `_<severity>`.

    Returns:
        `dict[int, dict[str, float]]`: By severity: `aupr` and `auroc` of clean against corrupted rows by *aleatoric*
        uncertainty, as in the paper, `aupr_epistemic`, `accuracy`, and `corruptions`, the number averaged over.
    """
    by_severity: dict[int, list[dict[str, float]]] = {}
    for name, table in shifted.items():
        severity = name.rpartition("_")[2]
        if not severity.isdigit():
            raise UserError(f"{name!r}: the name of a shifted set ends in its severity, as cifar10_c_fog_3")
        scores = evaluate_ood(id_table, table, score="aleatoric")
        by_severity.setdefault(int(severity), []).append(
            {
                "aupr": scores["aupr"],
                "auroc": scores["auroc"],
                "aupr_epistemic": evaluate_ood(id_table, table)["aupr"],
                "accuracy": evaluate_id(table).get("accuracy", float("nan")),
            }
        )
    return {
        severity: {
            **{key: float(np.mean([values[key] for values in found])) for key in found[0]},
            "corruptions": len(found),
        }
        for severity, found in sorted(by_severity.items())
    }


def render_shift(rows: Mapping[str, Mapping[int, Mapping[str, float]]], key: str = "aupr") -> str:
    """One metric of [`shift_table`] as a Markdown table in percent: a row per method, a column per severity."""
    severities = sorted({severity for row in rows.values() for severity in row})
    cells = [
        [name, *(f"{100 * row[s][key]:.2f}" if s in row else "–" for s in severities)] for name, row in rows.items()
    ]
    return markdown_table(["method", *(f"severity {s}" for s in severities)], cells) + "\n"


# --- figures ------------------------------------------------------------------------------------------------------


def plot_curves(
    curves: Mapping[str, Mapping[float, Summary]], path: PathLike, xlabel: str, ylabel: str, log: bool = True
) -> None:
    """
    Lines with bands of one standard deviation over seeds (PNG).

    Args:
        curves (`Mapping`): From `lambda_curves` or `size_curves`.
        path (`str` or `Path`): The PNG file to write.
        xlabel, ylabel (`str`): Labels of the axes.
        log (`bool`, *optional*, defaults to `True`): Logarithmic x axis; x = 0 is drawn at the left end.
    """
    figure = new_figure(5.0, 3.4)
    axes = figure.subplots()
    for number, (name, curve) in enumerate(curves.items()):
        x = np.array(sorted(curve))
        mean = np.array([curve[p].mean for p in x])
        spread = np.nan_to_num(np.array([curve[p].std for p in x]))
        if log and (x <= 0).any() and (x > 0).any():
            x = np.where(x > 0, x, x[x > 0].min() / 10)
        colour, style = COLOURS[number % 7], STYLES[number % 4]
        axes.plot(x, mean, color=colour, linestyle=style, marker="o", markersize=3.5, label=name)
        axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
    if log:
        axes.set_xscale("log")
        # Ticks at the data points: matplotlib's default minor labels overlap within one or two decades.
        ticks = sorted({position for curve in curves.values() for position in curve if position > 0})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    legend_above(axes, ncols=3)
    save_figure(figure, path)


def plot_evidence(panels: Mapping[str, Mapping[str, PredictionTable]], path: PathLike) -> None:
    """
    Histograms of normalised alpha0 in and out of distribution (PNG), one panel per method.

    Args:
        panels (`Mapping`): Tables by method and task, the ID task first.
        path (`str` or `Path`): The PNG file to write.
    """
    figure = new_figure(3.4 * len(panels), 2.9)
    edges = np.linspace(0, 1, 41)
    for axes, (title, tables) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True):
        for number, (name, values) in enumerate(normalised_evidence(tables).items()):
            share = np.histogram(values, edges)[0] / len(values)
            axes.stairs(share, edges, color=COLOURS[number], fill=number == 0, alpha=0.3 if number == 0 else 1)
            axes.stairs(share, edges, color=COLOURS[number], linestyle=STYLES[number % 4], label=name)
        axes.set(xlabel="normalised α₀", ylabel="share of items")
        axes.set_title(title, fontsize=9, pad=22)
        legend_above(axes, ncols=2)
    figure.tight_layout()
    save_figure(figure, path)


def plot_reliabilities(tables: Mapping[str, Sequence[PredictionTable]], path: PathLike) -> None:
    """
    Reliability curves of several methods in one diagram (PNG), over the 15 bins of the ECE, rows of all seeds pooled.

    Args:
        tables (`Mapping`): By method: ID tables, one per seed.
        path (`str` or `Path`): The PNG file to write.
    """
    figure = new_figure(4.4, 4.2)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="#333333", linestyle="--", linewidth=1)
    for number, (name, found) in enumerate(tables.items()):
        probs = np.concatenate([table.reading("own").probs[table.labels >= 0] for table in found])
        labels = np.concatenate([table.labels[table.labels >= 0] for table in found])
        confidence, correct = probs.max(axis=1), classification_metrics.is_correct(probs, labels)
        count, mean, accuracy = calibration_metrics.reliability_bins(confidence, correct)
        full = count > 0
        label = f"{name} (ECE {100 * calibration_metrics.ece(confidence, correct):.2f} %)"
        colour, style = COLOURS[number % 7], STYLES[number % 4]
        axes.plot(mean[full], accuracy[full], color=colour, linestyle=style, marker="o", markersize=3, label=label)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.01))
    axes.legend(fontsize=7, frameon=False)
    save_figure(figure, path)
