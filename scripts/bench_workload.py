"""Training step and prediction of any method on an image recipe, for `bench_step.py` and `bench_cost.py`."""

from __future__ import annotations

import benchlib
import numpy as np
import torch

from dappr_llm.core.outputs import as_outputs
from dappr_llm.core.recipe import Recipe
from dappr_llm.inference.stochastic_passes import read_passes
from dappr_llm.methods import Progress, get_method
from dappr_llm.training.memory import kept_bytes
from dappr_llm.vision.build import build_classifier, build_task
from dappr_llm.vision.data.images import ArrayImages
from dappr_llm.vision.data.rows import ImageRows


class Workload:
    """
    A recipe's model with one method, an optimizer, and a batch of random images.

    Args:
        recipe (`Recipe`):
            An image recipe; classes and image size come from its task, its data are not loaded.
        method (`str`):
            A name of `METHODS`.
        batch_size (`int`):
            Images per step.
        rows (`int`, *optional*):
            Number of training rows, for heads that depend on class counts; by default one per class.
    """

    def __init__(self, recipe: Recipe, method: str, batch_size: int, rows: int | None = None):
        task = build_task(recipe)
        classes = task.num_classes or 10
        count = max(rows or 0, classes)
        pixels = np.broadcast_to(
            np.zeros((), dtype=np.uint8), (count, task.size, task.size)
        )  # broadcast: takes no memory
        train = ImageRows(ArrayImages(pixels, "made"), np.arange(count) % classes, [str(i) for i in range(count)])
        self.name, self.method = method, get_method(method)
        self.device = benchlib.device()
        self.model, self.backend = build_classifier(recipe, task, train, self.method, method, seed=0)
        self.model.to(self.device)
        generator = torch.Generator().manual_seed(0)
        if "fit_after" in self.method.needs:  # an unfitted head would skip its computation
            labels = torch.arange(4 * classes) % classes
            self.method.fit_head(
                self.model.method_head, torch.randn(len(labels), self.model.feature_dim, generator=generator), labels
            )
        shape = (batch_size, self.model.config.channels, task.size, task.size)
        self.pixels = torch.rand(shape, generator=generator).to(self.device)
        self.labels = torch.randint(classes, (batch_size,), generator=generator).to(self.device)
        if "auxiliary_rows" in self.method.needs:  # as many auxiliary (OOD) images
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
        """One optimizer step: forward, loss, backward, update."""
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
        """One prediction, with as many forward passes as the method needs."""
        self.model.eval()
        batch = {"pixel_values": self.pixels[: self.rows]}
        self.method.predict(as_outputs(read_passes(self.backend, self.model, batch, self.method.passes)))

    def saved_bytes(self) -> int:
        """Bytes of activations that a step keeps for its backward pass, without weights; the same on every device."""
        return kept_bytes(self.model, self.step)
