"""A recipe or training arguments → causal LM with its adapter, text backend, and rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import checkpoint
from ..core.errors import UserError, explained
from ..core.hub_revisions import model_commit
from ..core.recipe import Recipe, check_keys
from ..methods import Method
from . import lm
from .adapter_files import check_adapter, read_config
from .backend import TextBackend, check_method
from .data import tasks
from .data.streams import most_options, stream_task
from .data.tasks import MCQTask, get_task, inherit, load_task, task_of_run, with_naming
from .prompt import Prompt, choice_token_ids

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import LoraConfig, PeftModel
    from torch import nn
    from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..training.config import DAPPrConfig

_PEFT_DEFAULTS = {"task_type": "CAUSAL_LM"}


def build_lora(recipe: Recipe) -> LoraConfig:
    """The recipe's `lora` section as `peft.LoraConfig`."""
    from peft import LoraConfig

    with explained(f"{recipe.name}: the lora section is not valid"):
        return LoraConfig(**{**_PEFT_DEFAULTS, **recipe.lora})


def find_task(spec: str | Mapping[str, Any] | MCQTask, own: MCQTask | None = None) -> MCQTask:
    """A task by its name, file or description; beside the training task `own` it inherits columns and labels."""
    return get_task(spec) if own is None else inherit(own, spec, ood=True)


def load_rows(
    task: MCQTask, split: str, root: str | None = None, limit: int | None = None, labelled: bool = True, seed: int = 0
) -> Dataset:
    """Rows of one split of a task."""
    return load_task(task, split, root, limit, labelled)


def build_task(recipe: Recipe) -> MCQTask:
    """The training task, with what its rows say where the recipe says nothing: columns, labels, splits."""
    return task_of_run(recipe)


def build_data(recipe: Recipe, task: MCQTask | None = None, seed: int = 0) -> tuple[Any, Dataset | None]:
    """Training and validation rows; only training rows are ever turned into naming questions."""
    data, task = recipe.data, task or build_task(recipe)
    if data.streaming:
        return _stream(recipe, task)
    train = load_task(task, data.train_split, data.root, data.max_train_samples)
    validation = None
    if data.validation_split is not None or data.validation_fraction:
        validation = _validation(recipe, task)
    return with_naming(train, data.naming_share), validation


def _validation(recipe: Recipe, task: MCQTask) -> Dataset:
    data = recipe.data
    return load_task(task, data.validation_split or "validation", data.root, data.max_validation_samples)


def _stream(recipe: Recipe, task: MCQTask) -> tuple[Any, Dataset | None]:
    """Training rows as a stream, validation rows as ever."""
    data = recipe.data
    if int(recipe.train.get("max_steps", -1)) <= 0:
        raise UserError(f"{recipe.name}: data.streaming needs train.max_steps, since a stream's length is not known")
    if data.validation_fraction or data.naming_share:
        raise UserError(f"{recipe.name}: data.streaming goes with neither validation_fraction nor naming_share")
    seed = int(recipe.train.get("seed", 42))
    rows = stream_task(task, data.train_split, data.root, data.max_train_samples, data.shuffle_buffer, seed)
    if data.validation_split is None:
        return rows, None
    return rows, _validation(recipe, task)


def build_model(
    recipe: Recipe, task: MCQTask, train: Any, method: Method, args: DAPPrConfig
) -> tuple[nn.Module, TextBackend]:
    """
    The causal LM of a recipe with its adapter, and its backend.

    Args:
        recipe (`Recipe`):
            Its `model` and `lora` sections are read.
        task, train:
            The task, and its training rows, which say how many letters are needed.
        method (`Method`):
            The method, which must work on text.
        args (`DAPPrConfig`):
            Prompt, number of choices and packing.
    """
    from transformers import set_seed

    check_method(method)
    lora = build_lora(recipe)
    section = recipe.model
    adapter, sidecar = _starting_adapter(section.adapter) if section.adapter else ("", {})
    # Resolved once, so that tokenizer and weights are of one commit.
    revision = model_commit(lm.model_path(section.name), section.revision) or section.revision
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": section.trust_remote_code}
    tokenizer = lm.load_tokenizer(section.name, **common)
    widest = args.num_choices or (most_options(train) if recipe.data.streaming else tasks.most_options(train))
    choice_token_ids(tokenizer, widest, build_prompt(args).ending)  # letters must be there before gigabytes are loaded
    if section.attn_implementation:
        common["attn_implementation"] = section.attn_implementation
    model: Any = lm.load_lm(section.name, section.dtype, section.quantization, **common)
    if adapter:
        model = lm.load_adapter(model, adapter, trainable=True, base_name=section.name, lora=recipe.lora)
    else:
        set_seed(args.seed)  # the adapter starts at random: the seed must decide where
        model = lm.add_adapter(model, lora, section.name)
    backend = build_backend(model, tokenizer, args, method, section.name, sidecar.get("evidence_offset", 0.0))
    backend.labels = task.labels
    return model, backend


def _starting_adapter(name: str) -> tuple[str, Mapping[str, Any]]:
    """The folder of the adapter to start from; one trained elsewhere has no sidecar, which is fine."""
    folder = Path(name)
    checkpoint.check_files(folder)
    if folder.is_dir() and not (folder / checkpoint.SIDECAR).is_file():
        return name, {}
    if not folder.is_dir() and "/" not in name:
        raise UserError(f"model.adapter: {name!r} is neither a folder nor a Hub id")
    if not folder.is_dir() and len(folder.parts) != 2:
        raise UserError(f"model.adapter: no such folder {name!r}; train the recipe that makes it first")
    return checkpoint.load_sidecar(name)


def build_prompt(args: DAPPrConfig) -> Prompt:
    """The prompt that the training arguments describe."""
    prompt = dict(args.prompt or {})  # type: ignore[arg-type]
    check_keys(prompt, {f.name for f in fields(Prompt)}, "the prompt", "train.prompt.")
    return Prompt(**prompt)


def build_backend(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    args: DAPPrConfig,
    method: Method,
    base_name: str | None,
    offset: float = 0.0,
) -> TextBackend:
    """The text backend for a loaded model, as the training arguments want it."""
    return TextBackend(
        model,
        tokenizer,
        method,
        num_choices=args.num_choices,
        prompt=build_prompt(args),
        max_length=args.max_length,
        evidence_offset=offset,
        base_model=base_name,
        packing=args.packing,
        share_prefix=args.share_prefix,
    )


def from_objects(
    model: str | PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase | None,
    args: DAPPrConfig,
    method: Method,
    peft_config: LoraConfig | None = None,
    quantization_config: BitsAndBytesConfig | None = None,
) -> tuple[nn.Module, TextBackend]:
    """What `DAPPrTrainer` builds from a causal LM given by name or as an object; see there for the arguments."""
    from transformers import set_seed

    base_name = model if isinstance(model, str) else None
    if isinstance(model, str):
        revision = model_commit(lm.model_path(model))
        tokenizer = tokenizer or lm.load_tokenizer(model, revision=revision)
        model = lm.load_lm(model, "auto", quantization_config, revision=revision)
        if peft_config is None:
            from peft import LoraConfig

            peft_config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", **_PEFT_DEFAULTS)
    elif tokenizer is None:
        raise UserError("A model given as an object needs its tokenizer: pass processing_class=tokenizer")
    if peft_config is not None and not hasattr(model, "peft_config"):
        set_seed(args.seed)
        model = lm.add_adapter(model, peft_config, base_name)
    return model, build_backend(model, lm.prepare_tokenizer(tokenizer), args, method, base_name)


def adapter_backend(
    adapter: Path,
    base: str | None,
    method: Method,
    num_choices: int,
    prompt: Mapping[str, Any] | None,
    max_length: int,
) -> TextBackend:
    """A backend for an adapter that was trained elsewhere, loaded once to make sure that it fits its base model."""
    check_adapter(adapter, values=False)
    own = read_config(adapter)
    named = own.get("base_model_name_or_path")
    revision = own.get("revision") if base in (None, named) else None
    base = base or named
    if not base:
        raise UserError(f"{adapter} does not name its base model; pass --base")
    revision = model_commit(lm.model_path(base), revision) or revision
    check_keys(prompt or {}, {f.name for f in fields(Prompt)}, "the prompt", "train.prompt.")
    layout = Prompt(**(prompt or {}))
    tokenizer = lm.load_tokenizer(base, revision=revision)
    model = lm.load_adapter(lm.load_lm(base, revision=revision), str(adapter), base_name=base)
    return TextBackend(model, tokenizer, method, num_choices, layout, max_length, base_model=base)
