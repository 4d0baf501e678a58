"""Random prediction tables for the tests of metrics, intervals and reports."""

import numpy as np

from dappr_llm.evaluation.prediction_table import PredictionTable


def make_table(rows, seed=0, options=4, levels=None, mixed=False, unlabelled=0, task="toy", sharp=3.0, alpha=True):
    """Random tables with ties (`levels`), mixed numbers of options and unlabelled rows."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(2, options + 1, rows) if mixed else np.full(rows, options)
    labels = rng.integers(counts)
    evidence = rng.gamma(0.7, sharp, (rows, options)) + sharp * rng.random((rows, 1)) * np.eye(options)[labels]
    if levels:
        evidence = np.round(evidence * levels / evidence.max())
    labels[:unlabelled] = -1
    arrays = {"alpha": 1 + evidence}
    if not alpha:
        arrays = {"probs": (1 + evidence) / (1 + evidence).sum(axis=1, keepdims=True)}
    meta = {"task": task, "num_choices": options, "task_num_choices": options}
    ids = [f"{task}-{row}" for row in range(rows)]
    return PredictionTable.from_arrays(ids, labels, num_options=counts, meta=meta, **arrays)
