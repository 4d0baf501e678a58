"""Rows, labels and single images as the trainer and the pipeline meet them."""

import numpy as np
import pytest
import torch
from PIL import Image

from dappr_llm.core.errors import UserError
from dappr_llm.methods import get_method
from dappr_llm.vision.backend import ImageBackend
from dappr_llm.vision.data.images import ArrayImages
from dappr_llm.vision.data.rows import ImageRows
from dappr_llm.vision.model import ImageClassifier, ImageClassifierConfig
from dappr_llm.vision.transforms import ImageTransform


def build(method="dappr", names=None, task="mine", num_classes=3, **kwargs):
    torch.manual_seed(0)
    config = ImageClassifierConfig(
        "convnet", num_classes, names, channels=1, image_size=8, transform=ImageTransform(8, 1).to_dict(), task=task,
        method={"name": method}, **kwargs,
    )  # fmt: skip
    model = ImageClassifier(config)
    return model, ImageBackend(model, get_method(method), ImageTransform(8, 1, augment=("flip",)))


def make_rows(labels, names=None, size=8):
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), size, size), dtype=np.uint8)
    return ImageRows(ArrayImages(pixels, "made"), np.array(labels), [f"i{k}" for k in range(len(labels))], names, 3)


def test_a_batch_is_fetched_at_once_and_equals_its_rows():
    _, backend = build()
    prepared = backend.prepare(make_rows([0, 1, 2, 1]))
    batch = backend.collate(prepared.__getitems__([3, 0]))
    single = backend.collate([prepared[3], prepared[0]])
    assert batch["pixel_values"].shape == (2, 1, 8, 8) and batch["pixel_values"].dtype == torch.float32
    for key in ("pixel_values", "labels", "row"):
        assert torch.equal(batch[key], single[key])
    assert batch["labels"].tolist() == [1, 0] and prepared["id"] == ["i0", "i1", "i2", "i3"]
    assert prepared["num_options"] == [3] * 4


def test_training_rows_are_augmented_and_can_be_plain_again():
    _, backend = build()
    prepared = backend.prepare(make_rows([0] * 16))
    plain = backend.collate(prepared.__getitems__(range(16)))["pixel_values"]
    augmented = backend.augmented(prepared)
    augmented.set_epoch(0)
    first = backend.collate(augmented.__getitems__(range(16)))["pixel_values"]
    flipped = [not torch.equal(a, b) for a, b in zip(first, plain, strict=True)]
    assert 0 < sum(flipped) < 16
    assert all(torch.equal(a, b.flip(-1) if f else b) for a, b, f in zip(first, plain, flipped, strict=True))
    assert torch.equal(backend.collate(backend.plain(augmented).__getitems__(range(16)))["pixel_values"], plain)


def test_labels_of_other_classes_are_refused_in_training_and_unknown_in_prediction():
    _, backend = build(names=["cat", "dog", "owl"])
    with pytest.raises(UserError, match=r"row 1 \(i1\): label -1"):
        backend.prepare(make_rows([0, -1]))
    same = make_rows([0, 2], ["cat", "dog", "owl"])
    other = make_rows([0, 2], ["car", "bus", "van"])
    assert backend.prepare(same, labelled=False, name="elsewhere")["labels"].tolist() == [0, 2]
    assert backend.prepare(other, labelled=False, name="elsewhere")["labels"].tolist() == [-1, -1]
    assert backend.prepare(other, labelled=False, name="mine")["labels"].tolist() == [0, 2], "its own task"


def test_numbered_classes_of_another_task_are_not_ours():
    _, backend = build()
    assert backend.class_names == ["0", "1", "2"]
    assert backend.prepare(make_rows([0, 1]), labelled=False, name="kmnist")["labels"].tolist() == [-1, -1]


def test_users_own_rows():
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageColumn

    _, backend = build()
    pictures = [Image.fromarray(np.full((10, 12, 3), 80 * k, np.uint8)) for k in range(3)]
    rows = [{"image": picture, "label": k} for k, picture in enumerate(pictures)]
    prepared = backend.prepare(rows)
    assert prepared[2]["pixel_values"].shape == (1, 8, 8) and prepared["labels"].tolist() == [0, 1, 2]
    assert prepared[1]["pixel_values"].mean().item() == pytest.approx(80 / 255, abs=2e-3)
    features = Features({"img": ImageColumn(), "id": Value("string")})
    unlabelled = Dataset.from_dict({"img": pictures, "id": list("xyz")}, features=features)
    found = backend.prepare(unlabelled, labelled=False)
    assert found["id"] == ["x", "y", "z"] and found["labels"].tolist() == [-1] * 3
    with pytest.raises(UserError, match="image under"):
        backend.prepare([{"text": "a"}])
    with pytest.raises(UserError, match="no rows"):
        backend.prepare(make_rows([]))


def test_single_images(tmp_path):
    _, backend = build(names=["cat", "dog", "owl"])
    path = tmp_path / "a.png"
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(path)
    items = backend.items([str(path), Image.open(path), {"image": path, "id": "third", "label": 2}])
    assert [item.id for item in items] == [str(path), "1", "third"] and items[2].label == 2
    assert len({backend.content_key(item) for item in items}) == 1
    assert backend.option_names(items[0]) == ["cat", "dog", "owl"]
    batch = backend.collate(backend.encode(items))
    assert batch["pixel_values"].shape == (3, 1, 8, 8)
    (tmp_path / "b.png").write_bytes(b"no image")
    for bad, message in ((tmp_path / "b.png", "b.png"), (tmp_path / "c.png", "c.png"), (3, "int"), ({}, "no image")):
        with pytest.raises(UserError, match=message):
            backend.items([bad])
    assert backend.as_row([path, path]) is None and backend.as_row(str(path)) == {"image": str(path)}
    with pytest.raises(UserError, match="without choices"):
        backend.as_row(str(path), ["a", "b"])


def test_a_model_of_another_width_is_refused():
    model, _ = build("dappr")
    with pytest.raises(UserError, match="10|6"):
        ImageBackend(model, get_method("ib_edl"))


def test_the_offset_moves_classes_only():
    model, backend = build("ib_edl")
    batch = backend.collate(backend.prepare(make_rows([0, 1])).__getitems__([0, 1]))
    model.eval()
    with torch.no_grad():
        before = backend.read(model, batch).logits
        backend.evidence_offset = 2.0
        after = backend.read(model, batch).logits
    assert torch.allclose(after - before, torch.tensor([2.0] * 3 + [0.0] * 3), atol=1e-6)
