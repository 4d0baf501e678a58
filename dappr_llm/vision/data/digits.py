"""
Bundled image tasks: scikit-learn's digits, and two OOD datasets for models trained on them.

`digits`: 1,797 handwritten digits of 8 × 8 pixels, each pixel the number of ink dots (0 to 16) in a 4 × 4 block.
`digits_letters`: near-OOD, capital letters rendered with random distortions and reduced to 8 × 8 in the same way.
`digits_photos`: far-OOD, random crops of scikit-learn's two bundled photographs.
"""

from __future__ import annotations

import numpy as np

from ...core.errors import UserError, nearest
from .images import ArrayImages
from .seeded_random import draws
from .splits import Split, divide, divide_test

PHOTOS = ("china", "flower")
_TEST, _VALIDATION = 0.25, 0.2
_LETTERS_EACH, _PIECES_EACH = 50, 250
_PEN = 2.0  # half the width of a stroke, in pixels of the 32 × 32 canvas

# Strokes as polylines in the unit square, x to the right and y down. Letters that resemble a digit
# (B, D, G, I, J, O, Q, S, Z) are left out.
_STROKES = {
    "A": ["0,1 .5,0 1,1", ".2,.6 .8,.6"],
    "C": ["1,.15 .6,0 .2,.2 0,.5 .2,.8 .6,1 1,.85"],
    "E": ["1,0 0,0 0,1 1,1", "0,.5 .8,.5"],
    "F": ["1,0 0,0 0,1", "0,.5 .8,.5"],
    "H": ["0,0 0,1", "1,0 1,1", "0,.5 1,.5"],
    "K": ["0,0 0,1", "1,0 0,.5 1,1"],
    "L": ["0,0 0,1 1,1"],
    "M": ["0,1 0,0 .5,.6 1,0 1,1"],
    "N": ["0,1 0,0 1,1 1,0"],
    "P": ["0,1 0,0 .7,0 1,.25 .7,.5 0,.5"],
    "R": ["0,1 0,0 .7,0 1,.25 .7,.5 0,.5", ".5,.5 1,1"],
    "T": ["0,0 1,0", ".5,0 .5,1"],
    "U": ["0,0 0,.7 .25,1 .75,1 1,.7 1,0"],
    "V": ["0,0 .5,1 1,0"],
    "W": ["0,0 .25,1 .5,.4 .75,1 1,0"],
    "X": ["0,0 1,1", "1,0 0,1"],
    "Y": ["0,0 .5,.5 1,0", ".5,.5 .5,1"],
}
LETTERS = tuple(_STROKES)


def read(name: str, split: str) -> Split:
    """
    One split of a bundled task.

    Args:
        name (`str`):
            `"digits"`, `"digits_letters"` or `"digits_photos"`; the latter two are the same in every split.
        split (`str`):
            `"train"`, `"validation"` or `"test"`.
    """
    if split not in ("train", "validation", "test"):
        raise UserError(f"Task {name!r} has no split {split!r}; {nearest(split, ('train', 'validation', 'test'))}")
    pixels, labels = _SETS[name]()
    ids = [f"{name}-{i}" for i in range(len(labels))]
    found = Split(ArrayImages(pixels, name), labels, ids, None, name)
    if name != "digits":
        return found
    train, test = divide_test(labels, _TEST)
    if split == "test":
        return found.take(test)
    found = found.take(train)
    train, validation = divide(found.labels, _VALIDATION, "stratified", 0)
    return found.take(validation if split == "validation" else train)


def _counted(dots: np.ndarray) -> np.ndarray:
    """Scale 0 to 16 dots per block to uint8."""
    return np.round(dots * (255 / 16)).astype(np.uint8)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    bundle = load_digits()
    return _counted(bundle.images), bundle.target.astype(np.int64)


def _letters() -> tuple[np.ndarray, np.ndarray]:
    labels = np.repeat(np.arange(len(LETTERS)), _LETTERS_EACH)
    hands = draws(np.arange(len(labels)), 8, seed=26)
    return np.stack([_drawn(LETTERS[c], hand) for c, hand in zip(labels, hands, strict=True)]), labels


def _drawn(letter: str, hand: np.ndarray) -> np.ndarray:
    """Render a letter with random shear, rotation, scale and shift on 32 × 32 and reduce it to 8 × 8 blocks, uint8."""
    low, high = np.array([-0.2, -0.15, 15, 23, -2, -1, 0.8, 0]), np.array([0.2, 0.15, 21, 27, 2, 1, 1.3, 1])
    slant, turn, width, height, right, down, pen, _ = low + (high - low) * hand
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    grid = np.stack(np.meshgrid(np.arange(32) + 0.5, np.arange(32) + 0.5), axis=-1)
    distance = np.full((32, 32), np.inf)
    for chain in _STROKES[letter]:
        points = np.array([[float(v) for v in point.split(",")] for point in chain.split()]) - 0.5
        points[:, 0] -= slant * points[:, 1]
        points = (points * [width, height]) @ rotation.T + [16 + right, 16 + down]
        for start, end in zip(points[:-1], points[1:], strict=True):
            along = ((grid - start) @ (end - start)) / ((end - start) @ (end - start))
            nearest_point = start + np.clip(along, 0, 1)[..., None] * (end - start)
            distance = np.minimum(distance, np.linalg.norm(grid - nearest_point, axis=-1))
    ink = distance < _PEN * pen
    return _counted(ink.reshape(8, 4, 8, 4).sum(axis=(1, 3)))


def _photos() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_sample_image

    pieces, labels = [], np.repeat(np.arange(len(PHOTOS)), _PIECES_EACH)
    places = draws(np.arange(len(labels)), 2, seed=8).reshape(len(PHOTOS), _PIECES_EACH, 2)
    for name, corners in zip(PHOTOS, places, strict=True):
        photo = load_sample_image(f"{name}.jpg").mean(axis=-1)
        for top, left in (corners * (np.array(photo.shape) - 32)).astype(int):
            piece = photo[top : top + 32, left : left + 32].reshape(8, 4, 8, 4).mean(axis=(1, 3))
            pieces.append(np.round(piece).astype(np.uint8))
    return np.stack(pieces), labels


_SETS = {"digits": _digits, "digits_letters": _letters, "digits_photos": _photos}
