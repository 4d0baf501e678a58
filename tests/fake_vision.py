"""The smallest model that meets every need of a method: points in the plane for images, a layer for a backbone."""

from contextlib import contextmanager

import torch
from torch import nn

from dappr_llm.methods import HeadInfo
from dappr_llm.outputs import Outputs

CENTRES = torch.tensor([[4.0, 0.0], [-2.0, 3.5], [-2.0, -3.5]])


def blobs(rows=300, seed=0):
    """Three Gaussian blobs: points `[N, 2]` and labels `[N]`."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (rows,), generator=draw)
    return CENTRES[labels] + 0.5 * torch.randn(rows, 2, generator=draw), labels


class FakeVision(nn.Module):
    """Backbone, linear classifier (where the method has outputs) and the method's own head, in one forward."""

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


class FakeRows(torch.utils.data.Dataset):
    """Map-style rows like those of an image task; noise stands for augmentation."""

    def __init__(self, points, labels, noise=0.0):
        self.points, self.labels, self.noise = points, labels, noise

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index] + self.noise * torch.randn(2)
        return {"pixel_values": point, "labels": int(self.labels[index]), "row": int(index)}


class FakeBackend:
    """What the trainer asks of a modality, and nothing more."""

    modality = "fake"
    tokenizer = None
    hub_base = None
    evidence_offset = 0.0

    def __init__(self, num_choices=3):
        self.num_choices = num_choices

    def collate(self, rows):
        batch = {key: torch.as_tensor([row[key] for row in rows]) for key in ("labels", "row")}
        batch["pixel_values"] = torch.stack([row["pixel_values"] for row in rows])
        batch["num_options"] = torch.full_like(batch["labels"], self.num_choices)
        return batch

    def read(self, model, inputs):
        return model(inputs["pixel_values"])

    @contextmanager
    def reading(self, width):
        yield

    def prepare(self, dataset, labelled=True, name="dataset"):
        return dataset

    def without_augmentation(self, dataset):
        return FakeRows(dataset.points, dataset.labels)

    def check_options(self, prepared, name):
        pass

    def config(self):
        return {"modality": self.modality, "num_choices": self.num_choices, "evidence_offset": 0.0}
