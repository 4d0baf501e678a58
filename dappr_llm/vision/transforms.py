"""
Image transforms: resizing, cropping, augmentation and normalisation of uint8 batches `[B, C, H, W]`.

`frame` brings images to one size (images of different sizes one by one), `finish` processes them as a batch. The
transform of the training task is used for every dataset, so that OOD images are resized and normalised alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import UserError, nearest
from .data.seeded_random import draws

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from .data.tasks import ImageTask

AUGMENTATIONS = ("crop", "resized_crop", "flip", "rotate")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
_Y, _X, _FLIP, _AREA, _RATIO, _ANGLE = range(6)
_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as in Pillow's conversion to grey
_MOST_PIXELS = 100_000_000


@dataclass(frozen=True)
class ImageTransform:
    """
    Transform from images to normalised tensors; its settings (`to_dict`) are saved in the checkpoint.

    Args:
        size (`int`):
            Height and width of the output.
        channels (`int`, *optional*, defaults to 3):
            1 or 3. Grey images are repeated to 3 channels, colours are converted to grey for 1.
        mean (`tuple[float, ...]`, *optional*, defaults to no shift):
            Mean per channel, for pixel values in [0, 1].
        std (`tuple[float, ...]`, *optional*, defaults to no scaling):
            Standard deviation per channel.
        resize (`int`, *optional*):
            Length of the short side before the crop. `None`: both sides are resized to `size`.
        keep_native (`bool`, *optional*, defaults to `True`):
            Do not resize images that are already `size` × `size` (native).
        augment (`tuple[str, ...]`, *optional*):
            `"crop"` (random crop; a native image is padded first), `"resized_crop"` (random position and scale),
            `"flip"` (horizontal, with probability 0.5), `"rotate"` (up to 15 degrees).
        padding (`int`, *optional*, defaults to 4):
            Zero padding of a native image before `"crop"`.
        interpolation (`str`, *optional*, defaults to `"bilinear"`):
            `"nearest"`, `"bilinear"` or `"bicubic"`.
    """

    size: int
    channels: int = 3
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    resize: int | None = None
    keep_native: bool = True
    augment: tuple[str, ...] = ()
    padding: int = 4
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for name in ("mean", "std", "augment"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("mean", "std"):
            object.__setattr__(self, name, _per_channel(getattr(self, name), self.channels, name))
        for word in self.augment:
            if word not in AUGMENTATIONS:
                raise UserError(f"Unknown augmentation {word!r}; {nearest(word, AUGMENTATIONS)}")
        if self.interpolation not in INTERPOLATIONS:
            raise UserError(
                f"Unknown interpolation {self.interpolation!r}; {nearest(self.interpolation, INTERPOLATIONS)}"
            )
        if self.channels not in (1, 3):
            raise UserError(f"A transform makes 1 or 3 channels, not {self.channels}")
        if self.size < 1 or (self.resize is not None and self.resize < self.size):
            raise UserError(f"Cannot cut {self.size} pixels from a short side of {self.resize}")
        if min(self.std) <= 0:
            raise UserError(f"std must be positive, got {list(self.std)}")

    @property
    def num_draws(self) -> int:
        """Random numbers that augmentation needs per row."""
        return _ANGLE + 1 if self.augment else 0

    def to_dict(self) -> dict[str, Any]:
        """Settings as JSON-serialisable values, for [`ImageTransform.from_dict`]."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ImageTransform:
        """A transform from `to_dict`."""
        names = {f.name for f in fields(cls)}
        for key in values:
            if key not in names:
                raise UserError(f"Unknown key {key!r} in the image transform; {nearest(key, names)}")
        return cls(**values)

    def __call__(self, image: Image | Tensor) -> Tensor:
        """Transform one Pillow image or uint8 tensor `[C, H, W]`; augmentation uses torch's global generator."""
        import torch

        pixels: Any = torch.from_numpy(_pillow_pixels(image)) if hasattr(image, "getbands") else image
        chance = np.zeros((1, 0))
        if self.num_draws:
            chance = draws(np.zeros(1), self.num_draws, int(torch.randint(2**62, ())), -1)
        return self.finish(self.frame(pixels[None], chance), chance)[0]

    def frame(self, images: Tensor, chance: np.ndarray) -> Tensor:
        """
        Resize, convert channels and crop.

        Args:
            images (`Tensor`):
                uint8 `[B, C, H, W]`.
            chance (`np.ndarray`):
                Random numbers `[B, num_draws]` in [0, 1).

        Returns:
            uint8 `[B, channels, size, size]`.
        """
        if "resized_crop" in self.augment:
            return to_channels(self._resized_crop(images, chance), self.channels)
        height, width = images.shape[-2:]
        native = height == width == self.size
        if not (native and self.keep_native):
            images = self._resize(images)
            native = False
        images = to_channels(images, self.channels)
        if "crop" in self.augment:
            return random_crop(
                images, self.size, self.padding if native or self.resize is None else 0, chance[:, :_FLIP]
            )
        top, left = (round((side - self.size) / 2) for side in images.shape[-2:])
        return images[..., top : top + self.size, left : left + self.size]

    def finish(self, images: Tensor, chance: np.ndarray) -> Tensor:
        """
        Flip and rotate, then scale to [0, 1] and normalise.

        Args:
            images (`Tensor`):
                uint8 `[B, channels, size, size]` from `frame`.
            chance (`np.ndarray`):
                The random numbers given to `frame`.

        Returns:
            float32 `[B, channels, size, size]`.
        """
        import torch

        if "rotate" in self.augment:
            images = _rotated(images, chance[:, _ANGLE])
        if "flip" in self.augment:
            images = _flipped(images, chance[:, _FLIP] < 0.5)
        std = torch.tensor(self.std, dtype=torch.float64)
        scale = (1 / (255 * std)).float()[:, None, None]
        shift = (-torch.tensor(self.mean, dtype=torch.float64) / std).float()[:, None, None]
        return images.float().mul_(scale.to(images.device)).add_(shift.to(images.device))

    def _resize(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        if self.resize is None:
            return self._scaled(images, (self.size, self.size))
        short = min(height, width)
        sides = tuple(int(self.resize * side / short) if side != short else self.resize for side in (height, width))
        if sides[0] * sides[1] > _MOST_PIXELS:
            raise UserError(
                f"{width} × {height} pixels are too narrow for a short side of {self.resize}; cut it first"
            )
        return self._scaled(images, sides)

    def _scaled(self, images: Tensor, sides: tuple[int, ...]) -> Tensor:
        from torchvision.transforms import v2

        mode = v2.InterpolationMode(self.interpolation)
        return v2.functional.resize(images, list(sides), interpolation=mode, antialias=True)

    def _resized_crop(self, images: Tensor, chance: np.ndarray) -> Tensor:
        """Crop 8 to 100 % of the area with an aspect ratio between 3/4 and 4/3 at random, and resize it to `size`."""
        import torch

        height, width = images.shape[-2:]
        out = []
        for image, (y, x, _, share, ratio, _) in zip(images, chance, strict=True):
            area = height * width * (0.08 + 0.92 * share)
            skew = np.exp((2 * ratio - 1) * np.log(4 / 3))
            h = int(np.clip(round(np.sqrt(area / skew)), 1, height))
            w = int(np.clip(round(np.sqrt(area * skew)), 1, width))
            top, left = int(y * (height - h + 1)), int(x * (width - w + 1))
            out.append(self._scaled(image[None, :, top : top + h, left : left + w], (self.size, self.size)))
        return torch.cat(out)


def build_transform(
    task: ImageTask,
    train: bool = False,
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    augment: str | Iterable[str] | None = None,
    channels: int | None = None,
    resize: int | None = None,
    interpolation: str | None = None,
) -> ImageTransform:
    """
    The transform of a training task; arguments that are not given are the task's.

    Args:
        task (`ImageTask`):
            The training task. OOD datasets use its transform too.
        train (`bool`, *optional*, defaults to `False`):
            Include augmentation.
        size (`int`, *optional*):
            Height and width of the output, for instance that of a pretrained ViT; `resize` is scaled with it.
        mean, std (`Sequence[float]`, *optional*):
            Normalisation per channel.
        augment (`str` or `Iterable[str]`, *optional*):
            Names as in `ImageTransform`; `"none"` or `[]` for none.
        channels (`int`, *optional*):
            Input channels of the backbone.
        resize (`int`, *optional*):
            Length of the short side before the crop.
        interpolation (`str`, *optional*):
            As in `ImageTransform`.
    """
    words = task.augment if augment is None else augment
    if isinstance(words, str):
        words = () if words == "none" else (words,)
    if resize is None and task.resize is not None:
        resize = task.resize if size is None else round(task.resize * size / task.size)
    channels = channels or task.channels
    given = (task.mean if mean is None else mean, task.std if std is None else std)
    if channels != task.channels:  # statistics of RGB images for grey ones, or the reverse
        given = tuple(_per_channel(tuple(values), channels, "mean") for values in given)  # type: ignore[assignment]
    return ImageTransform(
        size=size or task.size,
        channels=channels,
        mean=tuple(given[0]),
        std=tuple(given[1]),
        resize=resize,
        keep_native=task.keep_native,
        augment=tuple(words) if train else (),
        padding=max(1, round((size or task.size) / 8)),  # 4 pixels for CIFAR's 32, in proportion for other sizes
        interpolation=interpolation or task.interpolation,
    )


def to_channels(images: Tensor, channels: int) -> Tensor:
    """Convert uint8 images `[B, C, H, W]` to 1 channel (luma) or 3 channels (repeated)."""
    import torch

    if images.shape[1] == channels:
        return images
    if channels == 3:
        return images.expand(-1, 3, -1, -1)
    weights = torch.tensor(_LUMA, device=images.device)[:, None, None]
    return (images.float() * weights).sum(1, keepdim=True).round_().clamp_(0, 255).to(images.dtype)


def random_crop(images: Tensor, size: int, padding: int, chance: np.ndarray) -> Tensor:
    """
    Crop a square at a random position of each image.

    Args:
        images (`Tensor`):
            `[B, C, H, W]`.
        size (`int`):
            Height and width of the crop.
        padding (`int`):
            Zero padding on every side before the crop.
        chance (`np.ndarray`):
            Random numbers `[B, 2]` in [0, 1): vertical and horizontal position.
    """
    import torch

    pixels = images.numpy()
    if padding:
        height, width = pixels.shape[-2:]
        padded = np.zeros((*pixels.shape[:2], height + 2 * padding, width + 2 * padding), dtype=pixels.dtype)
        padded[..., padding : padding + height, padding : padding + width] = pixels
        pixels = padded
    room = np.array([side - size + 1 for side in pixels.shape[-2:]])
    out = np.empty((*pixels.shape[:2], size, size), dtype=pixels.dtype)
    for i, (top, left) in enumerate((chance * room).astype(int).tolist()):  # slices are faster than a gather
        out[i] = pixels[i, :, top : top + size, left : left + size]
    return torch.from_numpy(out)


def _flipped(images: Tensor, chosen: np.ndarray) -> Tensor:
    import torch

    pixels = images.numpy().copy()  # NumPy's indexing is several times faster here than torch's
    pixels[chosen] = pixels[chosen, ..., ::-1]
    return torch.from_numpy(pixels)


def _rotated(images: Tensor, chance: np.ndarray) -> Tensor:
    import torch
    from torchvision.transforms import v2

    angles = (2 * chance - 1) * 15
    return torch.stack([v2.functional.rotate(image, float(a)) for image, a in zip(images, angles, strict=True)])


def _per_channel(values: tuple[float, ...], channels: int, name: str) -> tuple[float, ...]:
    if len(values) == channels:
        return tuple(float(v) for v in values)
    if len(values) == 1:
        return tuple(float(v) for v in values) * channels
    if channels == 1 and len(values) == 3:
        return (sum(values) / 3,)
    raise UserError(f"{name} has {len(values)} values for {channels} channels: {list(values)}")


def _pillow_pixels(image: Image) -> np.ndarray:
    from .data.images import as_grey_or_rgb

    pixels = np.array(as_grey_or_rgb(image, "image"))
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
