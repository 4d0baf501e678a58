"""Random prediction tables for the tests of metrics, intervals and reports."""

import numpy as np

from dappr_llm.decisions.rule import scale
from dappr_llm.evaluation.prediction_table import PredictionTable


def make_table(rows, seed=0, options=4, levels=None, mixed=False, unlabelled=0, task="toy", sharp=3.0, alpha=True):
    """A random table, optionally with ties (`levels`), mixed numbers of options, unlabelled rows, or without alpha."""
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


def calibration_table(n=600, seed=0, sharpness=2.0, temperature=1.0, mixed=False, dirichlet=True):
    """A table with labels drawn from softmax(z) and predicted probabilities softmax(z / temperature)."""
    draw = np.random.default_rng(seed)
    logits = sharpness * draw.normal(size=(n, 4))
    counts = np.where(np.arange(n) % 2, 3, 4) if mixed else np.full(n, 4)
    logits[np.arange(4) >= counts[:, None]] = -np.inf
    true = np.exp(logits - logits.max(axis=1, keepdims=True))
    true /= true.sum(axis=1, keepdims=True)
    labels = (true.cumsum(axis=1) > draw.random(n)[:, None]).argmax(axis=1)
    stated, _ = scale(true, None, counts, temperature)
    stated = np.maximum(stated, 1e-6)
    stated /= stated.sum(axis=1, keepdims=True)
    alpha = stated * draw.gamma(4, 3, size=(n, 1)) if dirichlet else None
    return PredictionTable.from_arrays(
        [f"row {i}" for i in range(n)], labels, stated, num_options=counts, alpha=alpha,
        meta={"task": "made", "split": "validation", "num_choices": 4},
    )  # fmt: skip
