"""`ImageTask` and the registry of image benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import digits

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SEVERITIES = (1, 2, 3, 4, 5)
CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
    "speckle_noise", "gaussian_blur", "spatter", "saturate",
)  # fmt: skip


@dataclass(frozen=True)
class ImageTask:
    """
    The dataset of an image task, its splits, and the transform that models are trained with.

    Args:
        name (`str`):
            Short name, used in metric keys and file names.
        path (`str`, *optional*):
            Hub id of the dataset, or a local folder or file; `None` for bundled tasks.
        config (`str`, *optional*):
            Hub configuration.
        splits (`dict[str, str]`, *optional*):
            Our split name → the dataset's split name, or a data file; `"*"` for all others.
        image (`str`, *optional*, defaults to `"image"`):
            Name of the image column.
        label (`str`, *optional*, defaults to `"label"`):
            Name of the label column.
        num_classes (`int`, *optional*):
            Number of classes K. `None`: found in the data.
        class_names (`tuple[str, ...]`, *optional*):
            Class names in the order of the labels; by default the dataset's.
        channels (`int`, *optional*, defaults to 3):
            Channels of the images, 1 or 3.
        size (`int`, *optional*, defaults to 224):
            Height and width of the model's input.
        resize (`int`, *optional*):
            Length of the short side before the crop; `None`: both sides are resized to `size`.
        keep_native (`bool`, *optional*, defaults to `True`):
            Do not resize images that already have the right size.
        mean, std (`tuple[float, ...]`, *optional*):
            Normalisation per channel.
        augment (`tuple[str, ...]`, *optional*):
            Augmentation in training; see `ImageTransform`.
        interpolation (`str`, *optional*, defaults to `"bilinear"`):
            Interpolation of the resizing.
        folders (`tuple[str, ...]`, *optional*):
            Further names of its folder in the data root, besides the task's name and the Hub id.
        layout (`str`, *optional*):
            Dataset-specific folder layout (a key of `sources.SPECIAL`), tried before the general ones.
        in_memory (`bool`, *optional*, defaults to `False`):
            Decode all images at loading; for small images of one size.
        validation_fraction (`float`, *optional*):
            Fraction of the training rows to hold out for validation. `None`: the dataset has a validation split.
        validation_rule (`str`, *optional*, defaults to `"random"`):
            How validation rows are chosen, see `splits.divide`.
        test_fraction (`float`, *optional*, defaults to 0.2):
            Fraction of rows to hold out for testing if the source has no splits.
        whole (`bool`, *optional*, defaults to `False`):
            For OOD datasets: every split is the whole dataset.
        imbalance (`float`, *optional*):
            Subsample the training rows to a long tail: rows of the last class / rows of the first.
        where (`dict[str, Any]`, *optional*):
            Keep only rows with these values, by column.
        revision (`str`, *optional*):
            Commit or tag on the Hub.
        calibration (`dict[str, Any]`, *optional*):
            Calibration rows that are split off from another split: its `source`, and their `share` of its rows.
    """

    name: str
    path: str | None = None
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    image: str = "image"
    label: str = "label"
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()
    channels: int = 3
    size: int = 224
    resize: int | None = None
    keep_native: bool = True
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    augment: tuple[str, ...] = ()
    interpolation: str = "bilinear"
    folders: tuple[str, ...] = ()
    layout: str | None = None
    in_memory: bool = False
    validation_fraction: float | None = None
    validation_rule: str = "random"
    test_fraction: float = 0.2
    whole: bool = False
    imbalance: float | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    calibration: Mapping[str, Any] = field(default_factory=dict)


# 28 px, grey, neither augmented nor normalised; 48000 training and 12000 validation rows.
_MNIST: dict[str, Any] = {
    "num_classes": 10, "channels": 1, "size": 28, "mean": (0.0,), "std": (1.0,), "in_memory": True,
    "validation_fraction": 0.2,
}  # fmt: skip
_CIFAR: dict[str, Any] = {
    "image": "img", "size": 32, "augment": ("crop", "flip"), "in_memory": True, "validation_fraction": 0.05,
}  # fmt: skip
_CIFAR10: dict[str, Any] = {
    **_CIFAR, "num_classes": 10, "mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010),
    "class_names": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}  # fmt: skip
# Short side 256 px, crop of 224 px; images of 224 px are resized too.
_PHOTO: dict[str, Any] = {"size": 224, "resize": 256, "keep_native": False}
FINE: dict[str, Any] = {
    **_PHOTO, "augment": ("crop", "flip"), "validation_fraction": 0.1, "validation_rule": "stratified",
}  # fmt: skip
_DIGITS: dict[str, Any] = {"channels": 1, "size": 8, "mean": (0.0,), "std": (1.0,), "in_memory": True}

IMAGE_TASKS: dict[str, ImageTask] = {
    task.name: task
    for task in (
        ImageTask("mnist", "ylecun/mnist", folders=("MNIST",), **_MNIST),
        ImageTask("kmnist", "tanganke/kmnist", folders=("KMNIST",), **_MNIST),
        ImageTask(
            "fashion_mnist", "zalando-datasets/fashion_mnist", folders=("fashion-mnist", "FashionMNIST"), **_MNIST
        ),
        ImageTask("cifar10", "uoft-cs/cifar10", **_CIFAR10),
        ImageTask("cifar10_lt_001", "uoft-cs/cifar10", folders=("cifar10",), imbalance=0.01, **_CIFAR10),
        ImageTask("cifar10_lt_01", "uoft-cs/cifar10", folders=("cifar10",), imbalance=0.1, **_CIFAR10),
        ImageTask(
            "cifar100", "uoft-cs/cifar100", label="fine_label", num_classes=100, mean=(0.5071, 0.4867, 0.4408),
            std=(0.2675, 0.2565, 0.2761), **_CIFAR,
        ),
        # 95 datasets, named cifar10_c/<corruption>/<severity>.
        ImageTask(
            "cifar10_c", "robro/cifar10-c-parquet", splits={"*": "train"}, folders=("CIFAR-10-C",), layout="corrupted",
            whole=True, **{**_CIFAR10, "image": "image"},
        ),
        ImageTask(
            "svhn", "ufldl-stanford/svhn", "cropped_digits", num_classes=10, mean=(0.4377, 0.4438, 0.4728),
            std=(0.1980, 0.2010, 0.1970), **{**_CIFAR, "image": "image", "augment": ()},
        ),
        # The official validation split is the usual test set; the last 25 files of each class are used for validation.
        ImageTask(
            "tinyimagenet", "zh-plus/tiny-imagenet", splits={"test": "valid"}, num_classes=200, size=64, resize=72,
            augment=("flip",), folders=("tiny-imagenet-200",), layout="tinyimagenet", validation_fraction=0.05,
            validation_rule="last",
        ),
        ImageTask(
            "cub", "bentrevett/caltech-ucsd-birds-200-2011", num_classes=200, folders=("CUB_200_2011",), layout="cub",
            **FINE,
        ),
        ImageTask(
            "dogs", "Donghyun99/Stanford-Dogs", num_classes=120, folders=("StanfordDogs",), layout="dogs", **FINE
        ),
        # Test labels are not public; no augmentation, since its backbone is frozen.
        ImageTask(
            "imagenet", "ILSVRC/imagenet-1k", splits={"test": "validation"}, num_classes=1000,
            folders=("imagenet-1k", "ILSVRC2012"), **_PHOTO,
        ),
        ImageTask(
            "imagenet_o", "clip-benchmark/wds_imagenet-o", splits={"*": "test"}, image="jpg", label="cls",
            folders=("imagenet-o",), whole=True, **_PHOTO,
        ),
        ImageTask("dtd", "tanganke/dtd", splits={"*": "train+test"}, num_classes=47, whole=True, **_PHOTO),
        ImageTask(
            "places365", "dpdl-benchmark/Places365-Validation", splits={"*": "train"}, num_classes=365,
            layout="places365", whole=True, **_PHOTO,
        ),
        ImageTask("digits", num_classes=10, **_DIGITS),
        ImageTask("digits_letters", class_names=tuple(digits.LETTERS), whole=True, **_DIGITS),
        ImageTask("digits_photos", class_names=tuple(digits.PHOTOS), whole=True, **_DIGITS),
    )
}  # fmt: skip
