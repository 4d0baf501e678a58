"""A language model for `dappr plan`: built from its config on the meta device, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..core.errors import UserError, explained
from ..core.planned_model import PlannedModel, count
from ..core.recipe import Recipe
from .architectures import ARCHITECTURES, TRAIN_ROWS

PRECISIONS = ("bf16", "8-bit", "4-bit")
PRESETS = ("single_gpu", "multi_gpu", "fsdp2", "zero2", "zero3")


def plan_text(recipe: Recipe, lora: Any, length: int, config: str | None = None) -> PlannedModel:
    """
    The model of a text recipe.

    Args:
        recipe (`Recipe`):
            The recipe.
        lora (`LoraConfig`):
            Its adapter.
        length (`int`):
            Tokens per prompt.
        config (`str`, *optional*):
            The model's `config.json`, if neither a folder nor the Hub has it.
    """
    revision = {"revision": recipe.model.revision} if recipe.model.revision else {}
    shape = load_config(recipe.model.name, config, **revision)
    return meta_model(shape, lora, length, name=recipe.model.name, rows=_known_rows(recipe))


def load_config(name: str, path: str | None = None, **kwargs: Any) -> Any:
    """
    A model's config: from a file, a folder, the published shapes we know, or the Hub.

    Args:
        name (`str`):
            The recipe's `model.name`.
        path (`str`, *optional*):
            A `config.json`, or the folder it is in.
    """
    from transformers import AutoConfig

    from .lm import model_path

    if path is not None and not Path(path).exists():
        raise UserError(f"--config {path}: no such file")
    try:
        if path is None and name in ARCHITECTURES:
            values = dict(ARCHITECTURES[name])
            return AutoConfig.for_model(values.pop("model_type"), **values)
        return AutoConfig.from_pretrained(path or model_path(name), trust_remote_code=False, **kwargs)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"No config of {path or name!r} ({reason}); give the model's config.json with --config FILE"
        ) from None


def meta_model(
    config: Any, lora: Any, length: int, dtype: Any = None, name: str = "model", rows: int | None = None
) -> PlannedModel:
    """
    A causal LM on the meta device, which allocates nothing.

    Args:
        config (`PretrainedConfig`):
            The model's.
        lora (`LoraConfig`, *optional*):
            The adapter; without it everything trains.
        length (`int`):
            Tokens of each prompt.
        dtype (`torch.dtype`, *optional*, defaults to bfloat16):
            Of the base model's weights.
        name, rows (*optional*):
            As in `PlannedModel`.
    """
    import torch
    from peft import get_peft_model
    from torch import nn
    from transformers import AutoModelForCausalLM

    dtype = dtype or torch.bfloat16
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        head = model.get_output_embeddings()
        linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        largest = max(count(unit) for unit in [*_blocks(model), head, model.get_input_embeddings()])
        if lora is not None:
            with explained("The lora section does not fit this model"):
                model = get_peft_model(model, lora)
    return PlannedModel(
        name,
        model,
        run=lambda batch, autocast: forward(model, batch, length),
        example=(length,),
        precisions=PRECISIONS,
        presets=PRESETS,
        largest_unit=largest,
        linear=linear,
        blocks=_blocks(model),
        block_input=length * config.get_text_config().hidden_size * dtype.itemsize,
        # Fused attention kernels keep no attention matrix.
        ignore=lambda tensor: tensor.dim() >= 3 and tuple(tensor.shape[-2:]) == (length, length),
        rows=rows,
    )


def forward(model: Any, batch: int, length: int) -> Any:
    """A forward pass in training mode, logits of the last token alone."""
    import torch

    device = next(model.parameters()).device
    ids = torch.zeros(batch, length, dtype=torch.long, device=device)
    mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device=device)
    return model.train()(input_ids=ids, attention_mask=mask, logits_to_keep=1, use_cache=False)


def _blocks(model: Any) -> list[Any]:
    """The transformer blocks: the longest list of modules in the model."""
    from torch import nn

    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _known_rows(recipe: Recipe) -> int | None:
    """Training rows published for a task we know."""
    known = TRAIN_ROWS.get(recipe.data.train) if isinstance(recipe.data.train, str) else None
    return None if known is None else min(known, recipe.data.max_train_samples or known)
