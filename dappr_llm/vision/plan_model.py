"""An image classifier for `dappr plan`: fake tensors on the CPU, so that autocast can be measured too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError
from ..core.planned_model import PlannedModel, count
from ..core.recipe import Recipe
from ..methods import Method
from .build import build_data, build_task, model_config

if TYPE_CHECKING:
    from .data.tasks import ImageTask

# Weights stay in float32; `train.bf16: true` computes under autocast. Image classifiers are not loaded in 8 or 4 bits.
PRECISIONS = ("float32", "bf16 autocast", "8-bit", "4-bit")
PRESETS = ("single_gpu", "multi_gpu")


@dataclass(frozen=True)
class _Classes:
    """What a classifier's config asks of training rows, where only their number is known."""

    num_classes: int
    rows: int

    @property
    def class_names(self) -> list[str]:
        return [str(i) for i in range(self.num_classes)]

    def class_counts(self) -> Any:
        """Equally many of each class."""
        import numpy as np

        return np.bincount(np.arange(self.rows) % self.num_classes, minlength=self.num_classes)

    def __len__(self) -> int:
        return self.rows


def plan_images(recipe: Recipe, method: Method, seed: int = 0, rows: int | None = None) -> PlannedModel:
    """
    The classifier of an image recipe.

    Args:
        recipe (`Recipe`):
            The recipe; pretrained weights are not fetched.
        method (`Method`):
            Its method, which decides on outputs and head.
        seed (`int`, *optional*, defaults to 0):
            Decides which training rows validate.
        rows (`int`, *optional*):
            Training rows, where the data is not at hand.
    """
    import torch

    from .model import ImageClassifier

    task = build_task(recipe)
    train = _training_rows(recipe, task, seed, rows)
    config = model_config(recipe, task, train, method, recipe.method["name"])
    with torch.device("meta"):
        model: Any = ImageClassifier(config)
    example = (config.channels, config.image_size, config.image_size)
    return PlannedModel(
        config.backbone,
        model,
        run=_fake_forward(model, example),
        example=example,
        precisions=PRECISIONS,
        presets=PRESETS,
        largest_unit=max(count(child) for child in model.children()),
        rows=rows or len(train),
    )


def _training_rows(recipe: Recipe, task: ImageTask, seed: int, rows: int | None) -> Any:
    """The training rows, or their number and classes where that is all we know."""
    if rows is not None and task.num_classes is not None:
        return _Classes(task.num_classes, rows)
    try:
        return build_data(recipe, task, seed)[0]
    except UserError as error:
        hint = "" if rows else " (or say how many training rows there are: --rows N)"
        raise UserError(f"{error}{hint}") from None


def _fake_forward(model: Any, example: tuple[int, ...]) -> Callable[[int, bool], Any]:
    """
    Give a model on the meta device fake tensors of the CPU, and return its forward pass.

    Autocast does not know the meta device, and timm's ViTs cannot be built from fake tensors: hence first one, then
    the other.
    """
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    faked: dict[int, Any] = {}  # tied weights stay tied

    def fake(tensor: Any) -> Any:
        if id(tensor) not in faked:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            faked[id(tensor)] = (
                nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            )
        return faked[id(tensor)]

    with mode:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: fake(value) for name, value in tensors.items() if value is not None})

    def run(batch: int, autocast: bool) -> Any:
        with mode, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model.train()(pixel_values=torch.zeros(batch, *example))

    return run
