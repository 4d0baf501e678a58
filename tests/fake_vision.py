"""A minimal model for tests of methods: 2-D points instead of images, one hidden layer instead of a backbone."""

import torch
from torch import nn

from dappr_llm.core.outputs import Outputs
from dappr_llm.methods import HeadInfo

CENTRES = torch.tensor([[4.0, 0.0], [-2.0, 3.5], [-2.0, -3.5]])


def blobs(rows=300, seed=0):
    """Three Gaussian blobs: points `[N, 2]` and labels `[N]`."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (rows,), generator=draw)
    return CENTRES[labels] + 0.5 * torch.randn(rows, 2, generator=draw), labels


class FakeVision(nn.Module):
    """Backbone, linear classifier (if the method has outputs) and the method's own head, in one forward pass."""

    def __init__(self, method, num_classes=3, width=32, counts=(100, 100, 100), seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(2, width), nn.Tanh())
        outputs = method.num_outputs(num_classes)
        self.classifier = nn.Linear(width, outputs) if outputs else None
        self.method_head = method.build_head(HeadInfo(num_classes, width, counts))

    def forward(self, pixel_values):
        features = self.body(pixel_values)
        logits = None if self.classifier is None else self.classifier(features)
        head = None if self.method_head is None else self.method_head(features=features, logits=logits)
        return Outputs(logits=logits, features=features, inputs=pixel_values, head=head)
