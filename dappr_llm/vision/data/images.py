"""Storage of images (a uint8 array, files, or a column of a `datasets.Dataset`), and decoding."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

_ORIENTATION = 0x0112
_WIDE = ("I", "I;16", "I;16B", "I;16L")  # Pillow's modes of more than 8 bits


class ArrayImages:
    """
    Images of one shape in memory.

    Args:
        pixels (`np.ndarray`):
            uint8, `[N, H, W]`, `[N, H, W, C]` or `[N, C, H, W]` with C of 1 or 3.
        place (`str`):
            Name of the source in error messages.
        index (`np.ndarray`, *optional*):
            Selected rows of `pixels`; by default all of them.
    """

    def __init__(self, pixels: np.ndarray, place: str, index: np.ndarray | None = None):
        self.pixels = _channels_first(pixels, place) if index is None else pixels
        self.index = np.arange(len(pixels)) if index is None else index
        self.name = place

    def __len__(self) -> int:
        return len(self.index)

    def place(self, i: int) -> str:
        """Source and row of image `i`, for error messages."""
        return f"{self.name}, row {self.index[i]}"

    def take(self, indices: np.ndarray) -> ArrayImages:
        """Select images by index; the pixels are shared, not copied."""
        return ArrayImages(self.pixels, self.name, self.index[indices])

    def joined(self, others: ArrayImages) -> ArrayImages:
        """Concatenate with other images of the same shape."""
        return ArrayImages(np.concatenate([self.pixels[self.index], others.pixels[others.index]]), self.name)

    def batch(self, indices: np.ndarray) -> np.ndarray:
        """uint8 pixels `[B, C, H, W]`."""
        return self.pixels[self.index[indices]]

    def load(self, i: int) -> Image:
        """Image `i` as a Pillow image."""
        from PIL import Image

        pixels = self.pixels[self.index[i]]
        return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))


class FileImages:
    """Image files, decoded on access. Paths are strings: a million `Path` objects would take much more memory."""

    def __init__(self, paths: Sequence[str]):
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def place(self, i: int) -> str:
        """Path of image `i`."""
        return self.paths[i]

    def take(self, indices: np.ndarray) -> FileImages:
        """Select files by index."""
        return FileImages([self.paths[i] for i in indices])

    def joined(self, others: FileImages) -> FileImages:
        """Concatenate with other files."""
        return FileImages(self.paths + others.paths)

    def fingerprint(self) -> str:
        """SHA-256 of the paths, sizes and modification times: changes whenever a file is added or written again."""
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                facts = os.stat(path)
                digest.update(f"{os.path.abspath(path)} {facts.st_size} {facts.st_mtime_ns}\n".encode())
            except OSError:
                digest.update(f"{os.path.abspath(path)} missing\n".encode())
        return digest.hexdigest()

    def load(self, i: int) -> Image:
        """Image `i`, grey or RGB."""
        return decode(Path(self.paths[i]), self.place(i))


class HubImages:
    """
    The image column of a `datasets.Dataset`, decoded on access.

    Args:
        dataset (`datasets.Dataset`):
            The dataset.
        column (`str`):
            Its image column.
        place (`str`):
            Name of the source in error messages.
        index (`np.ndarray`, *optional*):
            Selected rows; by default all of them.
    """

    def __init__(self, dataset: Dataset, column: str, place: str, index: np.ndarray | None = None):
        import datasets

        self.dataset, self.column, self.name = dataset.select_columns([column]), column, place
        self.index = np.arange(len(dataset)) if index is None else index
        if isinstance(dataset.features[column], datasets.Image):
            self.dataset = self.dataset.cast_column(column, datasets.Image(decode=False))

    def __len__(self) -> int:
        return len(self.index)

    def place(self, i: int) -> str:
        """Dataset, split and row of image `i`, for error messages."""
        return f"{self.name}, row {self.index[i]}"

    def take(self, indices: np.ndarray) -> HubImages:
        """Select rows by index."""
        return HubImages(self.dataset, self.column, self.name, self.index[indices])

    def joined(self, others: HubImages) -> HubImages:
        """Concatenate with rows of another dataset."""
        import datasets

        both = datasets.concatenate_datasets([self.dataset, others.dataset])
        index = np.concatenate([self.index, others.index + len(self.dataset)])
        return HubImages(both, self.column, self.name, index)

    def fingerprint(self) -> str:
        """SHA-256 of the dataset's own fingerprint, the column and the selected rows."""
        digest = hashlib.sha256(f"{self.dataset._fingerprint} {self.column}\n".encode())
        digest.update(np.asarray(self.index, dtype=np.int64).tobytes())
        return digest.hexdigest()

    def load(self, i: int) -> Image:
        """Image `i`, grey or RGB."""
        value = self.dataset[int(self.index[i])][self.column]
        place = self.place(i)
        if isinstance(value, dict):
            if value.get("bytes") is not None:
                return decode(value["bytes"], place)
            return decode(Path(value.get("path") or ""), place)
        if isinstance(value, bytes):
            return decode(value, place)
        if isinstance(value, str):
            return decode(Path(value), place)
        if hasattr(value, "convert"):
            return as_grey_or_rgb(value, place)
        raise UserError(f"{place}: the column {self.column!r} holds {type(value).__name__}, not an image")


Images = ArrayImages | FileImages | HubImages


def decode(source: Path | bytes, place: str) -> Image:
    """
    Decode a file or bytes to a grey or RGB image; a `UserError` if that fails.

    Args:
        source (`Path` or `bytes`):
            JPEG, PNG, or any other format that Pillow reads.
        place (`str`):
            Name of the image in error messages.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            return as_grey_or_rgb(image, place)
    except FileNotFoundError:
        raise UserError(f"{place}: no such image file") from None
    except IsADirectoryError:
        raise UserError(f"{place}: a folder, not an image file") from None
    except Image.DecompressionBombError as error:
        raise UserError(f"{place}: refused, {error}") from None
    # Pillow's plugins raise various errors for damaged files.
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) and "BytesIO" not in str(error) else type(error).__name__
        raise UserError(f"{place}: not a readable image ({reason}); mend or remove it") from None


def as_grey_or_rgb(image: Image, place: str) -> Image:
    """
    Convert an image to 8-bit grey or RGB, rotated as its EXIF orientation says.

    Transparency is composited onto white, 16 bits are reduced to 8, palettes are resolved.
    """
    from PIL import Image, ImageOps

    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode in ("L", "RGB"):
        return image
    if image.mode == "1":
        return image.convert("L")
    if image.mode in _WIDE:
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise UserError(f"{place}: pixel values outside 0…65535; convert it to 8 bits")
        deep = image.mode != "I" or values.max() > 255
        return Image.fromarray((values >> 8 if deep else values).astype(np.uint8))
    if image.mode == "F":
        raise UserError(f"{place}: floating-point pixels have no known range; convert it to 8 bits")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _channels_first(pixels: np.ndarray, place: str) -> np.ndarray:
    if pixels.dtype != np.uint8:
        raise UserError(f"{place}: images must be uint8, found {pixels.dtype}")
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and pixels.shape[-1] in (1, 3):
        pixels = pixels.transpose(0, 3, 1, 2)
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3) or 0 in pixels.shape[1:]:
        raise UserError(
            f"{place}: images of shape {pixels.shape[1:] if pixels.ndim > 1 else ()}; expected [N, H, W] or "
            "[N, H, W, 3] with at least one pixel"
        )
    return np.ascontiguousarray(pixels)


def in_memory(images: Images, channels: int) -> ArrayImages:
    """Decode all images into one array; a `UserError` that names the first image of another size."""
    if isinstance(images, ArrayImages):
        return images
    pixels = None
    mode = "L" if channels == 1 else "RGB"
    for i in range(len(images)):
        image = np.asarray(images.load(i).convert(mode))
        if pixels is None:
            pixels = np.empty((len(images), *image.shape), dtype=np.uint8)
        if image.shape != pixels.shape[1:]:
            raise UserError(f"{images.place(i)}: {image.shape[:2]} pixels where others have {pixels.shape[1:3]}")
        pixels[i] = image
    if pixels is None:
        pixels = np.empty((0, 1, 1), dtype=np.uint8)
    return ArrayImages(pixels, getattr(images, "name", "images"))
