"""The files of a trained text checkpoint → model, tokenizer, prompt and readout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import checkpoint
from ..core.errors import UserError
from . import classifier, lm
from .adapter_files import base_revision, check_adapter, compare_ids
from .precision import trained_dtype
from .prompt import LabelPrompt, Prompt, TokenPrompt, choice_token_ids
from .readouts.base import Readout
from .readouts.head import HeadReadout
from .readouts.tokens import TokenReadout, compare_tokens, saved_answers

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from ..methods import Method


def load_trained(
    folder: str,
    config: Mapping[str, Any],
    method: Method,
    base_model: str | None,
    dtype: str | torch.dtype | None,
    quantization: Any,
) -> tuple[nn.Module, PreTrainedTokenizerBase, Prompt, Readout | None]:
    """
    What a checkpoint holds; all that is small is checked before gigabytes are loaded.

    Args:
        folder, config, method, base_model, dtype, quantization:
            As for [`TextBackend.from_pretrained`].

    Returns:
        `tuple`: Model, tokenizer, prompt, and the readout unless it is the letters', which the backend makes itself.
    """
    is_adapter = (Path(folder) / "adapter_config.json").is_file()
    dtype = trained_dtype(dtype, config) if quantization is None else dtype
    base = base_model or config.get("base_model")
    if base is None and is_adapter:
        raise UserError(f"{folder} does not name its base model; pass base_model (--base)")
    sidecar = Path(folder) / checkpoint.SIDECAR
    tokenizer = lm.load_tokenizer(folder)
    if is_adapter:
        check_adapter(folder, values=False)
    revision = base_revision(sidecar, config, base_model) if is_adapter else None
    source = base if is_adapter and base else folder
    given: dict[str, Any] = {"revision": revision} if is_adapter and base else {}
    if config.get("readout") == HeadReadout.name:
        model = _load_head(source, config["labels"], tokenizer, method, dtype, quantization, not is_adapter, **given)
    elif config.get("readout") == TokenReadout.name:
        compare_tokens(sidecar, config, tokenizer)
        model = lm.load_lm(source, dtype, quantization, **given)
    else:
        prompt = Prompt(**config["prompt"])
        letters = choice_token_ids(tokenizer, config["num_choices"], prompt.ending, prompt.spaces)
        compare_ids(sidecar, config, "letter_token_ids", letters)
        model = lm.load_lm(source, dtype, quantization, **given)
    if is_adapter:
        model = lm.load_adapter(model, folder, base_name=base)
    if config.get("readout") == TokenReadout.name:
        tokens = TokenReadout(model, tokenizer, saved_answers(config))
        return model, tokenizer, TokenPrompt(**config["prompt"]), tokens
    if config.get("readout") != HeadReadout.name:
        return model, tokenizer, prompt, None
    readout = HeadReadout(model, tokenizer, config["labels"], method)
    return model, tokenizer, LabelPrompt(**config["prompt"]), readout


def _load_head(
    name: str,
    labels: list[str],
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    dtype: str | torch.dtype | None,
    quantization: Any,
    whole: bool,
    **kwargs: Any,
) -> Any:
    """A sequence classifier: trained as a whole, or the base of an adapter, whose head is loaded with it."""
    shape = classifier.load_classifier_config(name, labels, method, tokenizer, **kwargs)
    model = classifier.load_classifier(name, shape, dtype, quantization, whole, **kwargs)
    if not whole:
        classifier.keep_head_precise(model)
    return model
