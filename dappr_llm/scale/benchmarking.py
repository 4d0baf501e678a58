"""One training step and one prediction of any method on an image recipe, for `scripts/bench_*.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..core.recipe import Recipe
from ..methods import Progress, get_method
from ..training.memory import kept_bytes


class Workload:
    """
    A recipe's model with one method, an optimizer, and a batch of random images.

    Args:
        recipe (`Recipe`):
            An image recipe; its task gives classes and sizes, its data are not read.
        method (`str`):
            A name of `METHODS`.
        batch_size (`int`):
            Images per step.
        rows (`int`, *optional*):
            Training rows, equally many of each class, for heads whose form depends on them; by default one per class.
    """

    def __init__(self, recipe: Recipe, method: str, batch_size: int, rows: int | None = None):
        from ..vision.build import build_model, build_task
        from ..vision.data.images import ArrayImages
        from ..vision.data.rows import ImageRows

        task = build_task(recipe)
        classes = task.num_classes or 10
        count = max(rows or 0, classes)
        pixels = np.broadcast_to(np.zeros((), dtype=np.uint8), (count, task.size, task.size))  # takes no memory
        train = ImageRows(ArrayImages(pixels, "made"), np.arange(count) % classes, [str(i) for i in range(count)])
        self.name, self.method = method, get_method(method)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.backend = build_model(recipe, task, train, self.method, method, seed=0)
        self.model.to(self.device)
        generator = torch.Generator().manual_seed(0)
        if "fit_after" in self.method.needs:  # an unfitted head costs nothing
            labels = torch.arange(4 * classes) % classes
            self.method.fit_head(
                self.model.method_head, torch.randn(len(labels), self.model.feature_dim, generator=generator), labels
            )
        shape = (batch_size, self.model.config.channels, task.size, task.size)
        self.pixels = torch.rand(shape, generator=generator).to(self.device)
        self.labels = torch.randint(classes, (batch_size,), generator=generator).to(self.device)
        if "auxiliary_rows" in self.method.needs:  # a second batch of strange images
            self.pixels = torch.cat([self.pixels, torch.rand_like(self.pixels)])
            self.labels = torch.cat([self.labels, torch.full_like(self.labels, -1)])
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)
        self.rows = batch_size

    @property
    def parameters(self) -> int:
        """Parameters of model and head."""
        return sum(p.numel() for p in self.model.parameters())

    def step(self) -> None:
        """Forward, loss, backward, update."""
        self.model.train()
        out = self.backend.read(self.model, {"pixel_values": self.pixels})
        terms = self.method.loss(out, self.labels, Progress(1.0, 10.0))
        self.optimizer.zero_grad()
        torch.stack([term.mean() for term in terms.values()]).sum().backward()
        self.optimizer.step()
        if "after_step" in self.method.needs:
            self.method.after_step(self.model.method_head, out.detach(), self.labels)

    @torch.no_grad()
    def predict(self) -> None:
        """Forward and reading, as often as the method passes."""
        from ..inference.passes import as_outputs, read_rows

        self.model.eval()
        batch = {"pixel_values": self.pixels[: self.rows]}
        self.method.predict(as_outputs(read_rows(self.backend, self.model, batch, self.method.passes)))

    def saved_bytes(self) -> int:
        """Bytes that one step keeps for its backward pass, weights not counted twice: the same on every device."""
        return kept_bytes(self.model, self.step)


def interleaved(works: dict[str, Callable[[], Any]], rounds: int, warmup: int = 3) -> dict[str, np.ndarray]:
    """
    Seconds of several pieces of work, taken in turns, so that whatever else the machine does meets all of them.

    Args:
        works (`dict[str, Callable]`):
            By name.
        rounds (`int`):
            How often each is done.
        warmup (`int`, *optional*, defaults to 3):
            Rounds that do not count.
    """
    cuda = torch.cuda.is_available()
    clock = time.perf_counter if cuda else time.process_time  # on a busy CPU only one's own time means something
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warmup + rounds):
        order = list(works) if turn % 2 == 0 else list(works)[::-1]
        for name in order:
            start = clock()
            works[name]()
            if cuda:
                torch.cuda.synchronize()
            if turn >= warmup:
                found[name].append(clock() - start)
    return {name: np.array(values) for name, values in found.items()}


def median_ratio(first: np.ndarray, second: np.ndarray, resamples: int = 2000) -> tuple[float, float, float]:
    """Median of paired ratios `first / second` and its 95 % bootstrap interval."""
    ratios = first / second
    draws = np.random.default_rng(0).integers(0, len(ratios), (resamples, len(ratios)))
    low, high = np.quantile(np.median(ratios[draws], axis=1), [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)
