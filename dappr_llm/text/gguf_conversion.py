"""
A GGUF file → a folder with safetensors, config and tokenizer, complete or not there.

The bundled model and `scripts/offline_models.py` convert with it. transformers does the reading; what is ours is that
a tensor is unpacked in slices, and that a folder gets its name when it is whole.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError
from ..core.library_output import no_bars_in_files

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

WEIGHTS = "model.safetensors"
_SLICE = 2**20  # values unpacked at once: 4 MB, which malloc reuses instead of giving them back to the kernel


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """
    A temporary folder that becomes `target` when the block ends; an error or Ctrl-C in it leaves nothing.

    Of two processes that write the same folder the first wins, and the other's is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        yield scratch
        try:
            scratch.rename(target)
        except OSError:
            if not (target / WEIGHTS).is_file():  # another process was first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def convert_gguf(source: Path, target: Path, dtype: torch.dtype, name: str) -> PreTrainedModel:
    """
    Unpack a GGUF file into a folder: weights as safetensors, config, and tokenizer with its chat template.

    Args:
        source (`Path`):
            The GGUF file.
        target (`Path`):
            An existing folder, see [`whole_folder`].
        dtype (`torch.dtype`):
            Of the saved weights. Each tensor is unpacked in float32 and rounded once.
        name (`str`):
            The Hub id of the original weights, for the config.

    Returns:
        `PreTrainedModel`: The model.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"Reading {source.name} needs the gguf package: pip install gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    with no_bars_in_files(), unpacked_in_slices():
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, quantization_config=GgufConfig(dequantize=True), dtype=dtype, **where
        )
        model.config._name_or_path = name
        tokenizer.save_pretrained(target)
        model.save_pretrained(target)
    return model


@contextmanager
def unpacked_in_slices() -> Iterator[None]:
    """
    Let gguf unpack a tensor in slices, into one buffer that all tensors share.

    By itself it collects the float32 values of a whole tensor in small pieces and then joins them, all in new memory
    for every tensor. Of the page faults that this costs (465,120 for 24 feed-forward matrices of 13.8 million 4-bit
    weights) 181,584 are left, and those are the result's own.
    """
    import gguf

    whole = gguf.dequantize
    gguf.dequantize = _Slices(whole)  # type: ignore[assignment]
    try:
        yield
    finally:
        gguf.dequantize = whole


class _Slices:
    """`gguf.dequantize`, with a result that is valid until the next call; transformers copies it at once."""

    def __init__(self, whole: Callable[..., Any]):
        self.whole = whole
        self.buffer: np.ndarray | None = None

    def __call__(self, data: np.ndarray, kind: Any) -> np.ndarray:
        import numpy as np
        from gguf import quant_shape_from_byte_shape

        if data.dtype != np.uint8 or data.ndim != 2:  # numbers that need no unpacking
            return self.whole(data, kind)
        rows, columns = quant_shape_from_byte_shape(data.shape, kind)
        if self.buffer is None or self.buffer.size < rows * columns:
            self.buffer = np.empty(rows * columns, np.float32)
        values = self.buffer[: rows * columns].reshape(rows, columns)
        step = max(1, _SLICE // columns)
        for start in range(0, rows, step):
            values[start : start + step] = self.whole(data[start : start + step], kind)
        return values
