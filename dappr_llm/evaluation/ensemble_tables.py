"""The prediction table of an ensemble, from the tables of its members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.errors import UserError
from .prediction_table import PredictionTable

# Meta data in which all members of an ensemble must agree.
_SHARED_META = ("task", "split", "num_choices", "task_num_choices", "letters", "epistemic_scale")
# Without one of these in common, logits have no common scale and their mean no meaning.
_LOGIT_SCALE = ("method", "options")


def combine(tables: Sequence[PredictionTable]) -> PredictionTable:
    """
    The prediction table of an ensemble of M models.

    Args:
        tables (`Sequence[PredictionTable]`): One table per model, of the same items in the same order; the
            first difference raises a `UserError`.

    Returns:
        [`PredictionTable`]: With the mean alpha if every table has alpha; otherwise with all members stacked, their
        mean probabilities and their mutual information. Logits are averaged if every table has them and all models
        were trained with the same method; densities are averaged if every table has one. Twice the mean of
        p-values that may depend on each other is a p-value again (Rüschendorf 1982), so that is the familiarity.
        Lengths and text distances are those of the first table that has them. Entries of `meta` that differ become
        lists.
    """
    if not tables:
        raise UserError("An ensemble needs at least one prediction table.")
    for number, table in enumerate(tables[1:], start=2):
        _refuse_difference(tables[0], table, number)
    alpha, members = _mean_of(tables, "alpha"), None
    if alpha is None:
        stacks = [table.probs[None] if table.members is None else table.members for table in tables]
        if len({len(stack) for stack in stacks}) > 1:
            raise UserError(f"The tables hold different numbers of members: {[len(stack) for stack in stacks]}.")
        members = np.concatenate(stacks)
    metas = [table.meta for table in tables]
    one_scale = all(meta.get(name) == metas[0].get(name) for meta in metas for name in _LOGIT_SCALE)
    p_values = _mean_of(tables, "familiarity")
    measured = next((table for table in tables if table.lengths is not None), tables[0])
    return PredictionTable.from_arrays(
        ids=tables[0].ids,
        labels=tables[0].labels,
        num_options=tables[0].num_options,
        alpha=alpha,
        members=members,
        meta=_combine_meta(metas),
        allow_nan=any(table.allow_nan for table in tables),
        logits=_mean_of(tables, "logits") if one_scale else None,
        density=_mean_of(tables, "density"),
        familiarity=p_values if p_values is None or len(tables) == 1 else np.minimum(1.0, 2 * p_values),
        lengths=measured.lengths,
        option_lengths=measured.option_lengths,
        text_distance=next((t.text_distance for t in tables if t.text_distance is not None), None),
    )


def _mean_of(tables: Sequence[PredictionTable], name: str) -> np.ndarray | None:
    """The mean of an array over the members, in float64; `None` unless every one of them has it."""
    arrays = [getattr(table, name) for table in tables]
    if any(array is None for array in arrays):
        return None
    return np.stack(arrays).mean(axis=0, dtype=np.float64)


def _refuse_difference(first: PredictionTable, other: PredictionTable, number: int) -> None:
    if first.probs.shape != other.probs.shape:
        raise UserError(
            f"Table {number} has {other.probs.shape} items and letters, the first has {first.probs.shape}."
        )
    for name in ("ids", "labels", "num_options"):
        mine, its = getattr(first, name), getattr(other, name)
        if (mine != its).any():
            row = int(np.argmax(mine != its))
            raise UserError(f"Table {number} differs from the first in {name}[{row}]: {its[row]} against {mine[row]}.")
    for name in _SHARED_META:
        mine, its = first.meta.get(name), other.meta.get(name)
        if mine != its:
            raise UserError(f"Table {number} differs from the first in {name}: {its!r} against {mine!r}.")


def _combine_meta(metas: list[dict[str, Any]]) -> dict[str, Any]:
    combined: dict[str, Any] = {}
    for name in dict.fromkeys(name for meta in metas for name in meta):
        values = [meta.get(name) for meta in metas]
        combined[name] = values[0] if all(value == values[0] for value in values) else values
    return combined | {"ensemble": len(metas)}
