"""Small random images, and writers of image files, IDX files and class folders."""

import gzip
import io
import struct

import numpy as np
from PIL import Image


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path, pixels=None, mode=None, **options):
    """Write an image; by default 12 × 10 pixels of RGB noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(noise(10, 12, 3) if pixels is None else pixels)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_idx(folder, prefix, images, labels, zipped=True):
    folder.mkdir(parents=True, exist_ok=True)
    for kind, magic, array in (("images-idx3", 2051, images), ("labels-idx1", 2049, labels)):
        data = struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.astype(np.uint8).tobytes()
        name = f"{prefix}-{kind}-ubyte"
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(data))
        else:
            (folder / name).write_bytes(data)


def class_folders(folder, classes, each=3):
    """`<folder>/<class>/<n>.png`"""
    for c, name in enumerate(classes):
        for i in range(each):
            save(folder / name / f"{i}.png", noise(10, 12, 3, seed=10 * c + i))
