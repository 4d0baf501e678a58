"""Transforms against torchvision's own on the same images, and against the protocols of the paper."""

import numpy as np
import pytest
import torch
from pictures import noise
from PIL import Image
from torchvision.transforms import v2

from dappr_llm.core.errors import UserError
from dappr_llm.vision.data.seeded_random import draws
from dappr_llm.vision.data.tasks import IMAGE_TASKS, load_image_task
from dappr_llm.vision.transforms import ImageTransform, build_transform, random_crop, to_channels

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def reference(*steps, mean, std):
    return v2.Compose([v2.PILToTensor(), *steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])


def picture(height, width, channels=3, seed=0):
    """A smooth picture, as resizing meets them."""
    small = Image.fromarray(noise(5, 6, 3, seed=seed)).resize((width, height), Image.Resampling.BICUBIC)
    return small if channels == 3 else small.convert("L")


@pytest.mark.parametrize("name", ["cub", "dogs", "imagenet"])
@pytest.mark.parametrize("height, width", [(300, 400), (333, 250), (224, 224), (100, 90)])
def test_photographs_are_resized_and_cut_as_torchvision_does(name, height, width):
    image = picture(height, width)
    expected = reference(v2.Resize(256, antialias=True), v2.CenterCrop(224), mean=IMAGENET[0], std=IMAGENET[1])(image)
    found = build_transform(IMAGE_TASKS[name])(image)
    assert found.shape == (3, 224, 224) and torch.allclose(found, expected, atol=1e-5)


def test_tinyimagenet_cuts_strange_images_only():
    transform = build_transform(IMAGE_TASKS["tinyimagenet"])
    own = picture(64, 64)
    assert torch.allclose(transform(own), reference(mean=IMAGENET[0], std=IMAGENET[1])(own), atol=1e-5)
    other = picture(200, 300)
    steps = [v2.Resize(72, antialias=True), v2.CenterCrop(64)]
    assert torch.allclose(transform(other), reference(*steps, mean=IMAGENET[0], std=IMAGENET[1])(other), atol=1e-5)


def test_strange_images_get_the_training_tasks_geometry_and_statistics():
    task = IMAGE_TASKS["cifar10"]
    transform = build_transform(task)
    other = picture(64, 80)
    expected = reference(v2.Resize((32, 32), antialias=True), mean=task.mean, std=task.std)(other)
    assert torch.allclose(transform(other), expected, atol=1e-5)
    grey = picture(28, 28, channels=1)
    assert torch.allclose(
        transform(grey), reference(v2.Grayscale(3), v2.Resize((32, 32)), mean=task.mean, std=task.std)(grey), atol=1e-5
    )
    letters = load_image_task("digits_letters", "test").with_transform(transform)
    assert letters[0]["pixel_values"].shape == (3, 32, 32)


def test_mnist_is_only_scaled():
    image = noise(28, 28)
    assert torch.allclose(
        build_transform(IMAGE_TASKS["mnist"], train=True)(Image.fromarray(image))[0] * 255, torch.tensor(image).float()
    )


def test_augmentations_of_the_paper():
    augment = {name: build_transform(task, train=True).augment for name, task in IMAGE_TASKS.items()}
    assert augment["mnist"] == () and augment["cifar10"] == augment["cifar100"] == augment["cub"] == ("crop", "flip")
    assert augment["tinyimagenet"] == ("flip",) and augment["dogs"] == ("crop", "flip")
    assert build_transform(IMAGE_TASKS["cifar10"]).augment == ()
    assert build_transform(IMAGE_TASKS["cifar10"], train=True, augment="none").augment == ()
    assert build_transform(IMAGE_TASKS["mnist"], train=True, augment="flip").augment == ("flip",)


def test_random_crop_finds_every_place():
    images = torch.from_numpy(noise(400, 3, 6, 6))
    chance = draws(np.arange(400), 2)
    cut = random_crop(images, 6, 2, chance)
    padded = torch.nn.functional.pad(images, [2] * 4)
    places = set()
    for i in range(400):
        top, left = (int(c * 5) for c in chance[i])
        places.add((top, left))
        assert torch.equal(cut[i], padded[i, :, top : top + 6, left : left + 6])
    assert len(places) == 25 and torch.equal(random_crop(images, 6, 0, chance), images)


def test_flips_turn_half_of_the_rows():
    images = torch.from_numpy(noise(600, 1, 4, 4))
    transform = ImageTransform(4, channels=1, augment=("flip",))
    chance = draws(np.arange(600), transform.num_draws)
    found = (transform.finish(transform.frame(images, chance), chance) * 255).round().to(torch.uint8)
    kept = (found == images).flatten(1).all(1)
    turned = (found == images.flip(-1)).flatten(1).all(1)
    assert (kept | turned).all() and 240 < turned.sum() < 360


def test_crop_of_a_photograph_comes_from_the_resized_one():
    image = torch.from_numpy(np.asarray(picture(300, 256)).transpose(2, 0, 1).copy())
    transform = build_transform(IMAGE_TASKS["cub"], train=True)
    chance = np.array([[0.999, 0.0, 0.9, 0, 0, 0]])
    cut = transform.frame(image[None], chance)[0]
    assert torch.equal(cut, image[:, 76:300, :224])  # its short side has 256 already: the lower left corner, unpadded


def test_resized_crops_and_rotations_keep_the_size():
    image = picture(40, 60)
    transform = ImageTransform(16, augment=("resized_crop", "rotate", "flip"))
    torch.manual_seed(0)
    found = torch.stack([transform(image) for _ in range(20)])
    assert found.shape == (20, 3, 16, 16) and len({tensor.sum().item() for tensor in found}) == 20
    chance = draws(np.arange(3), transform.num_draws)
    tiny = torch.from_numpy(noise(3, 3, 1, 1))
    assert transform.finish(transform.frame(tiny, chance), chance).shape == (3, 3, 16, 16)


def test_channels():
    grey, colour = torch.from_numpy(noise(2, 1, 5, 5)), torch.from_numpy(noise(2, 3, 5, 5))
    assert torch.equal(to_channels(grey, 3), grey.repeat(1, 3, 1, 1)) and to_channels(colour, 3) is colour
    as_pillow = [np.asarray(Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L")) for image in colour]
    assert np.abs(to_channels(colour, 1)[:, 0].numpy().astype(int) - np.stack(as_pillow)).max() <= 1
    task = IMAGE_TASKS["mnist"]
    assert build_transform(task, channels=3, mean=[0.1307], std=[0.3081]).mean == (0.1307,) * 3
    assert build_transform(IMAGE_TASKS["cifar10"], channels=1).mean == pytest.approx(((0.4914 + 0.4822 + 0.4465) / 3,))


def test_another_size_scales_the_resizing_along():
    transform = build_transform(IMAGE_TASKS["cub"], size=112)
    assert (transform.size, transform.resize) == (112, 128)
    assert [build_transform(IMAGE_TASKS[name]).padding for name in ("cifar10", "digits")] == [4, 1]
    assert build_transform(IMAGE_TASKS["digits"], size=32, channels=3)(picture(8, 8, 1)).shape == (3, 32, 32)
    assert build_transform(IMAGE_TASKS["cub"], size=224, resize=248, interpolation="bicubic").resize == 248


def test_round_trip():
    import json

    transform = build_transform(IMAGE_TASKS["cub"], train=True)
    again = ImageTransform.from_dict(json.loads(json.dumps(transform.to_dict())))
    assert again == transform


@pytest.mark.parametrize(
    "values, words",
    [
        ({"augment": ("flop",)}, "'flip'"),
        ({"interpolation": "lanczos"}, "interpolation 'lanczos'"),
        ({"mean": (0.5, 0.5)}, "mean has 2 values for 3 channels"),
        ({"std": (0.0,)}, "std must be positive"),
        ({"resize": 7}, "Cannot cut 8 pixels"),
        ({"channels": 4}, "1 or 3 channels, not 4"),
        ({"colour": 1}, "Unknown key 'colour'"),
    ],
)
def test_wrong_settings(values, words):
    with pytest.raises(UserError, match=words):
        ImageTransform.from_dict({"size": 8, **values})


def test_accelerate_tells_the_rows_their_epoch():
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from dappr_llm.vision.data.rows import collate_rows

    rows = load_image_task("digits", "validation")
    rows = rows.with_transform(build_transform(IMAGE_TASKS["digits"], train=True, augment=["crop"]))
    loader = Accelerator(cpu=True).prepare(DataLoader(rows, batch_size=90, collate_fn=collate_rows))
    seen = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        seen.append(torch.cat([batch["pixel_values"] for batch in loader]))
    assert not torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
