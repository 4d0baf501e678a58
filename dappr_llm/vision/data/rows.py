"""`ImageRows`: a map-style dataset of labelled images with batched access, and its collate function."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import UserError
from ...core.files import cache_dir, write_text
from .images import ArrayImages, FileImages, HubImages, Images
from .seeded_random import draws

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

UNKNOWN = -1
_BAR_FROM = 500  # images from which verification shows a progress bar; also how many it decodes between two updates


class RowBatch(Sequence):
    """A sequence of rows that is stored stacked, in `batch`, so that [`collate_rows`] need not stack them again."""

    def __init__(self, batch: dict[str, Any]):
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["row"])

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        return {
            "pixel_values": self.batch["pixel_values"][i],
            "labels": int(self.batch["labels"][i]),
            "row": int(self.batch["row"][i]),
        }


class ImageRows:
    """
    A map-style dataset of images. A row is `{"pixel_values": tensor, "labels": int, "row": int}`.

    Without a transform `pixel_values` is uint8 `[C, H, W]`. Images in memory are transformed as a batch, without
    Pillow; files and Hub rows are decoded on access.

    Args:
        images (`ArrayImages`, `FileImages` or `HubImages`):
            The pixels.
        labels (`np.ndarray`):
            Class index of each image, -1 if unknown.
        ids (`Sequence[str]`):
            Unique name of each image.
        class_names (`Sequence[str]`, *optional*):
            Names of the classes.
        num_classes (`int`, *optional*):
            Number of classes; by default that of the names, or the largest label + 1.
        name (`str`, *optional*, defaults to `"images"`):
            Name of the rows in error messages.
        seed (`int`, *optional*, defaults to 0):
            Seed of the augmentation.
    """

    def __init__(
        self,
        images: Images,
        labels: np.ndarray,
        ids: Sequence[str],
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        name: str = "images",
        seed: int = 0,
    ):
        self.images = images
        self.labels = np.asarray(labels, dtype=np.int64)
        self.ids = list(ids)
        if not len(images) == len(self.labels) == len(self.ids):
            raise UserError(f"{name}: {len(images)} images, {len(self.labels)} labels and {len(self.ids)} ids")
        found = int(self.labels.max(initial=UNKNOWN)) + 1
        self.num_classes = num_classes or (len(class_names) if class_names else found)
        self.class_names = list(class_names) if class_names else [str(i) for i in range(self.num_classes)]
        self.name, self.seed = name, seed
        self.transform: Callable[..., Any] | None = None
        self._epoch: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"ImageRows({self.name}: {len(self)} images, {self.num_classes} classes)"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i = int(i) % len(self)
        return {"pixel_values": self._pixels(np.array([i]))[0], "labels": int(self.labels[i]), "row": i}

    def __getitems__(self, indices: Sequence[int]) -> RowBatch:
        import torch

        rows = np.asarray(indices, dtype=np.int64)
        return RowBatch(
            {
                "pixel_values": self._pixels(rows),
                "labels": torch.from_numpy(self.labels[rows]),
                "row": torch.from_numpy(rows),
            }
        )

    def _pixels(self, rows: np.ndarray) -> Tensor | list[Tensor]:
        """Transformed pixels of rows: one tensor, or a list of tensors if their shapes differ."""
        import torch

        transform: Any = self.transform
        if transform is None or hasattr(transform, "finish"):
            chance = self._chance(rows)
            if isinstance(self.images, ArrayImages):
                pixels = torch.from_numpy(self.images.batch(rows))
                return pixels if transform is None else transform.finish(transform.frame(pixels, chance), chance)
            if transform is None:
                return _stacked([_as_tensor(self.load(i)) for i in rows])
            framed = []
            for k, i in enumerate(rows):
                with self._named(i):
                    framed.append(transform.frame(_as_tensor(self.load(i))[None], chance[k : k + 1]))
            return transform.finish(torch.cat(framed), chance)
        return _stacked([transform(self.load(i)) for i in rows])

    def _named(self, i: int) -> _Named:
        return _Named(self.images.place(i))

    def _chance(self, rows: np.ndarray) -> np.ndarray:
        import torch

        count = getattr(self.transform, "num_draws", 0)
        if not count:
            return np.zeros((len(rows), 0))
        if self._epoch is None:  # no `set_epoch` yet: new numbers at every call, from torch's global generator
            return draws(rows, count, int(torch.randint(2**62, ())), -1)
        return draws(rows, count, self.seed, int(self._epoch))

    def set_epoch(self, epoch: int) -> None:
        """
        Make augmentation a function of seed, epoch and row only. Called by Accelerate's data loaders.

        Args:
            epoch (`int`):
                The epoch, from 0.
        """
        import torch

        if self._epoch is None:
            self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # for persistent workers
        self._epoch.fill_(int(epoch))

    def load(self, i: int) -> Image:
        """Image `i` as a Pillow image, grey or RGB, untransformed."""
        return self.images.load(int(i))

    def with_transform(self, transform: Callable[..., Any] | None) -> ImageRows:
        """
        The same rows with a transform that is applied on access.

        Args:
            transform (`ImageTransform` or `Callable`):
                From [`build_transform`], or any function from a Pillow image to a tensor.
        """
        rows = copy.copy(self)
        rows.transform, rows._epoch = transform, None
        return rows

    def select(self, indices: Sequence[int] | np.ndarray) -> ImageRows:
        """
        Select rows by index, in the given order; `row` counts from 0 again.

        Args:
            indices (`Sequence[int]`):
                Row numbers.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        rows = copy.copy(self)
        rows.images, rows.labels = self.images.take(chosen), self.labels[chosen]
        rows.ids, rows._epoch = [self.ids[i] for i in chosen], None
        return rows

    def without_labels(self) -> ImageRows:
        """The same rows with labels -1, for datasets with other classes than the model's."""
        rows = copy.copy(self)
        rows.labels = np.full(len(self), UNKNOWN, dtype=np.int64)
        return rows

    def class_counts(self) -> np.ndarray:
        """Rows per class, `[K]`."""
        return np.bincount(self.labels[self.labels >= 0], minlength=self.num_classes)

    def verify(self, most: int = 10) -> None:
        """
        Decode every image once and raise a `UserError` that names the unreadable ones.

        Decoding runs in threads. A set without unreadable images is remembered in the cache folder by its fingerprint
        (files: paths, sizes, modification times), so that only the first training on it pays. Arrays in memory are
        decoded already and return at once.

        Args:
            most (`int`, *optional*, defaults to 10):
                How many unreadable images to collect before giving up.
        """
        if isinstance(self.images, ArrayImages):
            return
        marker = cache_dir() / "verified_images" / self.images.fingerprint()
        if marker.is_file():
            return
        bad = _unreadable(self.images, most, f"Verifying {self.name}")
        if bad:
            count = f"at least {most}" if len(bad) == most else str(len(bad))
            raise UserError(f"{self.name}: {count} unreadable image{'s' * (len(bad) > 1)}:\n" + "\n".join(bad))
        with contextlib.suppress(UserError):  # a read-only cache folder: verify again next time
            write_text(marker, f"{self.name}: {len(self)} images\n")


class _Named:
    """Context manager that adds the image's place to a `UserError` of its transform."""

    def __init__(self, place: str):
        self.place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UserError) and self.place not in str(error):
            raise UserError(f"{self.place}: {error}") from None


def collate_rows(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """
    Collate rows of [`ImageRows`] into a batch of tensors.

    Args:
        rows (`RowBatch` or `Sequence[dict]`):
            A batch from `__getitems__`, already stacked, or single rows.

    Returns:
        `pixel_values` `[B, C, H, W]`, `labels` `[B]` and `row` `[B]`.
    """
    import torch

    batch = getattr(rows, "batch", None)
    if batch is None:
        batch = {
            "pixel_values": [row["pixel_values"] for row in rows],
            "labels": torch.as_tensor([row["labels"] for row in rows]),
            "row": torch.as_tensor([row["row"] for row in rows]),
        }
    if isinstance(batch["pixel_values"], list):
        shapes = {tuple(pixels.shape) for pixels in batch["pixel_values"]}
        if len(shapes) > 1:
            raise UserError(f"Images of different sizes in one batch: {sorted(shapes)}; use a transform that crops")
        batch = {**batch, "pixel_values": torch.stack(batch["pixel_values"])}
    return batch


def _as_tensor(image: Image) -> Tensor:
    import torch

    pixels = np.array(image)
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _stacked(pixels: list[Tensor]) -> Tensor | list[Tensor]:
    import torch

    return torch.stack(pixels) if len({tuple(p.shape) for p in pixels}) == 1 else pixels


def _unreadable(images: FileImages | HubImages, most: int, title: str) -> list[str]:
    """Error messages of the first `most` images that cannot be decoded, in the order of the images."""
    from concurrent.futures import ThreadPoolExecutor

    from tqdm.auto import tqdm

    def problem(i: int) -> str | None:
        try:
            images.load(i)
        except UserError as error:
            return str(error)
        return None

    bad: list[str] = []
    count = len(images)
    hidden = None if count > _BAR_FROM else True  # None: shown in terminals only
    # Threads and not processes, since Pillow releases the GIL while it decodes.
    with ThreadPoolExecutor() as pool, tqdm(total=count, desc=title, disable=hidden) as bar:
        for start in range(0, count, _BAR_FROM):  # not all at once: a million futures would fill the memory
            found = list(pool.map(problem, range(start, min(start + _BAR_FROM, count))))
            bad += [message for message in found if message is not None]
            bar.update(len(found))
            if len(bad) >= most:
                break
    return bad[:most]
