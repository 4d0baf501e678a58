"""Noise images as auxiliary rows: they are from no dataset, hence from no OOD test set either."""

from __future__ import annotations

import numpy as np

from .images import ArrayImages
from .rows import ImageRows

NOISE = "noise"
_ROWS = 10_000
_BYTES = 128 << 20


def noise_rows(channels: int, size: int, seed: int = 0) -> ImageRows:
    """
    Unlabelled images with standard normal pixels, clipped to [0, 1].

    Args:
        channels, size (`int`):
            Shape of the images.
        seed (`int`, *optional*, defaults to 0):
            Seed of the noise.
    """
    count = int(np.clip(_BYTES // (channels * size * size), 100, _ROWS))
    draw = np.random.default_rng(seed)
    shape = (channels, size, size)
    pixels = np.empty((count, *shape), dtype=np.uint8)
    for image in pixels:
        image[:] = np.rint(255 * draw.standard_normal(shape, dtype=np.float32).clip(0, 1))
    ids = [f"{NOISE}-{i}" for i in range(count)]
    return ImageRows(ArrayImages(pixels, NOISE), np.full(count, -1), ids, name=NOISE)
