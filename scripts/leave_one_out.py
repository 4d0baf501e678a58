"""
Leave-one-out check of the approximation behind DAPPr's loss (bundled digits, a small network, CPU).

    python scripts/leave_one_out.py --items 4 --steps 60 --out leave_one_out.png

The possibility of predicting probability p for the label of a training image x is, relative to its maximum,
exp(-L_true(p)) with L_true(p) = l(p) + S_x(p): l(p) = -log p is the image's own loss, and S_x(p) the minimal loss on
*all other* training images among networks that predict p at x. DAPPr drops S_x, assuming that a large network can fit
the other images whatever it predicts at x. This script estimates S_x(p) by continuing training on the other images
while the prediction at x is held at p, and compares S_x(p) minus its minimum with l(p). The idea is the paper's, this
construction is ours.
"""

from __future__ import annotations

import numpy as np
import torch
from scriptlib import arguments
from torch.nn.functional import cross_entropy

from dappr_llm.evaluation.bootstrap import over_seeds
from dappr_llm.evaluation.paper_analyses import plot_curves
from dappr_llm.vision.data.tasks import load_image_task
from dappr_llm.vision.model import ImageClassifier, ImageClassifierConfig

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)


def pixels(rows) -> torch.Tensor:
    return torch.from_numpy(rows.images.batch(np.arange(len(rows)))).float() / 255


def fit(model, x, y, steps, batch=128, lr=1e-3, held=None) -> None:
    """Train with Adam; `held` = (image, target distribution) is added to the loss of every step with weight 10."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        index = torch.randint(len(x), (batch,), generator=generator)
        loss = cross_entropy(model(x[index]).logits, y[index])
        if held is not None:
            loss = loss + 10 * cross_entropy(model(held[0]).logits, held[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def total_loss(model, x, y) -> float:
    return float(cross_entropy(model(x).logits, y, reduction="sum"))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--images", type=int, default=400, help="training images")
    parser.add_argument("--items", type=int, default=4, help="images that are left out, one at a time")
    parser.add_argument("--steps", type=int, default=60, help="further steps per held prediction")
    parser.add_argument("--start-steps", type=int, default=400, help="steps of the initial training")
    parser.add_argument("--out", default="leave_one_out.png")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = load_image_task("digits", "train", limit=args.images)
    x, y = pixels(rows), torch.from_numpy(rows.labels)
    model = ImageClassifier(ImageClassifierConfig("convnet", channels=1, image_size=8))
    fit(model, x, y, args.start_steps)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    rest: dict[float, list[float]] = {level: [] for level in LEVELS}
    for item in range(args.items):
        others = torch.arange(len(x)) != item
        found = []
        for level in LEVELS:
            answer = torch.full((1, 10), (1 - level) / 9)
            answer[0, y[item]] = level
            model.load_state_dict(start)
            fit(model, x[others], y[others], args.steps, held=(x[item : item + 1], answer))
            found.append(total_loss(model, x[others], y[others]))
        for level, value in zip(LEVELS, found, strict=True):
            rest[level].append(value - min(found))
    own = {level: -float(np.log(level)) for level in LEVELS}
    print("label's probability   l(p)   S_x(p) - min   L_true(p) - min")
    for level in LEVELS:
        mean = float(np.mean(rest[level]))
        print(f"{level:19.2f} {own[level]:7.3f} {mean:13.3f} {own[level] + mean - min(own.values()):15.3f}")
    curves = {
        "l(p), what DAPPr keeps": {level: over_seeds([own[level]]) for level in LEVELS},
        "S_x(p), what it drops": {level: over_seeds(rest[level]) for level in LEVELS},
        "L_true(p)": {level: over_seeds([value + own[level] for value in rest[level]]) for level in LEVELS},
    }
    plot_curves(
        curves, args.out, "probability of the label at the image left out", "loss minus its minimum", log=False
    )
    print(args.out)


if __name__ == "__main__":
    main()
