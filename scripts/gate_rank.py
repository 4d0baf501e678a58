"""
What the low rank of the gate's covariances costs, and what each layer and pooling would give alone.

    python scripts/gate_rank.py runs/clinc --data-root data --ood clinc_oos_oos --limit 500

Collects the pooled hidden states of training rows, of the run's test rows and of OOD rows once, fits the gate's
Gaussians with several ranks from the same moments, and prints the AUROC of each. Nothing is chosen by these figures:
the rank is a matter of the file's size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scriptlib import arguments

from dappr_llm import load_checkpoint
from dappr_llm.core import checkpoint
from dappr_llm.decisions.density import Gaussian, Moments, combined, normalised, standard
from dappr_llm.evaluation.reporting.markdown import markdown_table
from dappr_llm.inference.modality import load_rows
from dappr_llm.inference.run_data import RunData

RANKS = (16, 64, 256)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--ood", nargs="+", required=True, help="OOD tasks")
    parser.add_argument("--rows", type=int, default=4000, help="training rows")
    parser.add_argument("--limit", type=int, default=500, help="rows of every test")
    parser.add_argument("--data-root")
    args = parser.parse_args()
    data = RunData(*checkpoint.load_sidecar(args.run))
    run = load_checkpoint(args.run, gate=False)
    predictor, root = run.predictor(), data.root(args.data_root)
    assert data.recipe is not None
    wanted = [
        data.find(split=data.recipe.data.train_split),
        data.find(),
        *(data.find(o, role="ood") for o in args.ood),
    ]
    found = []
    for number, each in enumerate(wanted):
        limit = args.limit if number else args.rows
        rows = load_rows(each.task, each.split, root, limit, labelled=False, seed=data.seed)
        found.append(states(predictor, rows))
    train, inside, *outside = found
    names = run.backend.gate_groups(run.model)
    fixed = run.backend.class_names is not None
    labels = np.asarray(load_rows(wanted[0].task, wanted[0].split, root, args.rows)["label"]) if fixed else None
    table = []
    for rank in (*RANKS, train.shape[-1]):
        for kind in ("gaussian", "class_gaussian") if fixed else ("gaussian",):
            own = labels if kind == "class_gaussian" else None
            scores = fitted(train, own, rank, names, [inside, *outside])
            table.append([kind, str(rank), *(f"{auroc(scores[0].mean(-1), o.mean(-1)):.4f}" for o in scores[1:])])
    print(markdown_table(["density", "rank", *args.ood], table, "lr" + "r" * len(args.ood)))
    scores = fitted(train, None, 256, names, [inside, *outside])
    alone = [
        [name, *(f"{auroc(scores[0][:, group], o[:, group]):.4f}" for o in scores[1:])]
        for group, name in enumerate(names)
    ]
    print(markdown_table(["alone (gaussian, rank 256)", *args.ood], alone, "l" + "r" * len(args.ood)))


def states(predictor: Any, rows: Any) -> np.ndarray:
    """Normalised pooled states `[N, G, D]` of rows, in their order."""
    prepared = predictor.backend.prepare(rows, labelled=False)
    found: dict[int, np.ndarray] = {}
    for numbers, part in predictor.pooled_states(prepared, list(prepared["length"]), "states"):
        found |= dict(zip(numbers, part, strict=True))
    return normalised(np.stack([found[number] for number in range(len(prepared))]))


def fitted(
    train: np.ndarray, labels: np.ndarray | None, rank: int, names: tuple[str, ...], others: list[np.ndarray]
) -> list[np.ndarray]:
    """Standardised scores `[N, G]` of other rows; a fifth of the training rows standardise."""
    order = np.random.default_rng(0).permutation(len(train))
    cut = len(order) // 5
    held, own = train[order[:cut]], train[order[cut:]]
    classes = 1 if labels is None else int(labels.max()) + 1
    moments = Moments.empty(train.shape[1], train.shape[2], classes)
    moments.add(own, None if labels is None else labels[order[cut:]])
    densities = [Gaussian.fit(moments, group, rank, name) for group, name in enumerate(names)]

    def scores(rows: np.ndarray) -> np.ndarray:
        return np.stack([density.score(rows[:, group]) for group, density in enumerate(densities)], axis=1)

    centre, spread = standard(scores(held), names)
    assert np.isfinite(combined(scores(held), centre, spread)).all()
    return [(scores(rows) - centre) / spread for rows in others]


def auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    """Probability that an ID row is denser than an OOD row."""
    return float((inside[:, None] > outside).mean() + (inside[:, None] == outside).mean() / 2)


if __name__ == "__main__":
    main()
