"""Loading a sequence classifier: transformers' own class, its head in float32, and an adapter that saves that head."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ..core.errors import UserError, explained
from . import lm

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..methods import Method

_MOST_MISSING = 3  # names of weights in an error


def is_encoder(config: PretrainedConfig) -> bool:
    """Whether a model of this config reads a text in both directions and pools it by itself (BERT and its kin)."""
    from transformers.models.auto import modeling_auto as auto

    kind = type(config)
    return kind in auto.MODEL_FOR_MASKED_LM_MAPPING or kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING


def is_classifier(model: Any) -> bool:
    """Whether a model, with an adapter or not, is one of transformers' sequence classifiers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__name__ in set(NAMES.values())


def load_classifier_config(
    name: str, labels: Sequence[str], method: Method, tokenizer: PreTrainedTokenizerBase, **kwargs: Any
) -> PretrainedConfig:
    """
    A base model's config with these labels; models that cannot classify are refused.

    Args:
        name (`str`):
            Hub id, local folder, or `"smollm2-135m"`.
        labels (`Sequence[str]`):
            Names of the classes.
        method (`Method`):
            Says how many outputs there are per class.
        tokenizer (`PreTrainedTokenizerBase`):
            Its pad token tells transformers' own pooling where a text ends.
        kwargs:
            Passed on to `AutoConfig.from_pretrained` (`revision`, `trust_remote_code`).
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    kwargs.setdefault("trust_remote_code", False)
    path = lm.located(name, kwargs)
    with explained(f"Could not load the config of {name!r}"):
        config = AutoConfig.from_pretrained(path, **kwargs)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{name!r} is an encoder–decoder ({config.model_type}), which is not supported; take an encoder (BERT, "
            "ModernBERT, DeBERTa) or a decoder (SmolLM2, Qwen, Llama, Mistral)"
        )
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not getattr(config, "auto_map", None):
        raise UserError(
            f"{name!r} ({config.model_type}): transformers has no sequence classifier for this architecture, which "
            "model.readout: head needs; take another model, or model.readout: tokens if it is a causal LM"
        )
    return labelled_config(config, labels, method, tokenizer)


def labelled_config(
    config: PretrainedConfig, labels: Sequence[str], method: Method, tokenizer: PreTrainedTokenizerBase
) -> PretrainedConfig:
    """The config with names of all outputs, the classes first, and the tokenizer's pad token."""
    names = output_names(labels, method)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    config.get_text_config().pad_token_id = tokenizer.pad_token_id
    config.problem_type = "single_label_classification"
    config.use_cache = False
    return config


def output_names(labels: Sequence[str], method: Method) -> list[str]:
    """Names of a method's outputs: the labels, then for methods that read more per class each label with a number."""
    blocks = method.num_outputs(len(labels)) // len(labels)
    return [*labels, *(f"{label} [{block}]" for block in range(2, blocks + 1) for label in labels)]


def load_classifier(
    name: str,
    config: PretrainedConfig,
    dtype: str | torch.dtype | None = "auto",
    quantization: Mapping[str, Any] | BitsAndBytesConfig | None = None,
    whole: bool = False,
    frozen: bool = True,
    **kwargs: Any,
) -> PreTrainedModel:
    """
    Load a base model with a classification head, which is new and random unless the model has one of its size.

    Args:
        name (`str`):
            Hub id, local folder, or `"smollm2-135m"`.
        config (`PretrainedConfig`):
            From [`load_classifier_config`].
        dtype, quantization:
            Of the base model, see [`lm.load_lm`]; the head is never quantised.
        whole (`bool`, *optional*, defaults to `False`):
            A classifier that was trained as a whole: no weight may be missing.
        frozen (`bool`, *optional*, defaults to `True`):
            Whether the base model will not be trained, see [`lm.load_lm`].
        kwargs:
            Passed on to `from_pretrained` (`revision`, `attn_implementation`, …).
    """
    from transformers import AutoModelForSequenceClassification

    kwargs.setdefault("trust_remote_code", False)
    path = lm.located(name, kwargs)
    options = lm.weight_options(dtype, quantization, frozen)
    if options["quantization_config"] is not None:
        skipped = options["quantization_config"].llm_int8_skip_modules or []
        options["quantization_config"].llm_int8_skip_modules = [*skipped, *_head_names_of(config)]
    with explained(f"Could not load the model {name!r}{lm.at_revision(kwargs)}"), _quiet_report():
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, config=config, output_loading_info=True, ignore_mismatched_sizes=not whole, **options, **kwargs
        )
    changed = {entry[0] for entry in info["mismatched_keys"]}
    new = {*info["missing_keys"], *changed}
    model.new_weights = _check_new(model, new, name, whole)
    model.new_head = any(key.startswith(tuple(f"{head}." for head in head_names(model))) for key in new)
    lm.remember_revision(model, kwargs.get("revision"))
    return model


def has_new_head(model: Any) -> bool:
    """Whether a model was loaded with a head that starts at random; not known of a model given as an object."""
    return getattr(model.get_base_model() if hasattr(model, "get_base_model") else model, "new_head", False)


def _head_names_of(config: PretrainedConfig) -> list[str]:
    import torch
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        return head_names(AutoModelForSequenceClassification.from_config(config))


def head_names(model: PreTrainedModel) -> list[str]:
    """The modules that a classifier has above its base model: `score`, `classifier`, `pooler` and `classifier`, …"""
    return [
        name
        for name, child in model.named_children()
        if name != model.base_model_prefix and any(True for _ in child.parameters())
    ]


def _check_new(model: PreTrainedModel, missing: set[str], name: str, whole: bool) -> list[str]:
    """Modules of the base model that start at random; a `UserError` if more than a pooler does."""
    above = tuple(f"{head}." for head in head_names(model))
    inside = sorted(key for key in missing if not key.startswith(above))
    lost = sorted(missing) if whole else [key for key in inside if "pooler" not in key]
    if lost:
        shown = ", ".join(lost[:_MOST_MISSING]) + (", …" if len(lost) > _MOST_MISSING else "")
        raise UserError(
            f"Could not load the model {name!r}: its files lack {len(lost)} weights of a {type(model).__name__} "
            f"({shown}), or have them in another size; give a folder that holds the whole model"
        )
    return sorted({key.rpartition(".")[0] for key in inside})


@contextmanager
def _quiet_report() -> Iterator[None]:
    """Without transformers' table of weights that are new: a head is meant to be, and others are an error of ours."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_no_report)
    try:
        yield
    finally:
        logger.removeFilter(_no_report)


def _no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


# --- adapters -------------------------------------------------------------------------------------------------------


def classifier_lora(config: LoraConfig) -> LoraConfig:
    """The LoRA section for a classifier: `SEQ_CLS`, and all linear layers if it names none."""
    if config.task_type not in (None, "SEQ_CLS"):
        raise UserError(
            f"lora.task_type is {str(getattr(config.task_type, 'value', config.task_type))!r}, but a classification "
            "head needs SEQ_CLS; leave it out"
        )
    targets = "all-linear" if config.target_modules is None else config.target_modules
    return replace(config, task_type="SEQ_CLS", target_modules=targets)


def add_head_adapter(model: PreTrainedModel, config: LoraConfig, base_name: str | None = None) -> PeftModel:
    """
    Add a new LoRA adapter to a classifier; all that is new or above the base model is trained and saved with it.

    Args:
        model (`PreTrainedModel`):
            From [`load_classifier`], or given as an object.
        config (`LoraConfig`):
            The adapter.
        base_name (`str`, *optional*):
            Name of the base model to save in the adapter's config.
    """
    config = classifier_lora(config)
    # PEFT adds `classifier` and `score` by itself; a pooler that starts at random has to be saved as well.
    always = {"classifier", "score"}
    extra = {*head_names(model), *getattr(model, "new_weights", ()), *(config.modules_to_save or ())} - always
    config.modules_to_save = sorted(extra) or None
    keep_head_precise(model)
    return lm.add_adapter(model, config, base_name)


def keep_head_precise(model: PreTrainedModel) -> None:
    """
    All that is new or above the base model in float32, whatever its weights are: half precision loses small steps.

    What enters the last layer is converted by [`HeadReadout`]'s hook, what enters other layers by one of ours.
    """
    last = score_layers(model)
    for name in (*head_names(model), *getattr(model, "new_weights", ())):
        for layer in model.get_submodule(name).float().modules():
            hooked = _enter_precise in layer._forward_pre_hooks.values()
            if isinstance(layer, nn.Linear) and not hooked and all(layer is not one for one in last):
                layer.register_forward_pre_hook(_enter_precise)


def _enter_precise(layer: nn.Linear, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a layer above the base model is given, in the layer's own dtype."""
    return (args[0].to(layer.weight.dtype) if layer.weight.is_floating_point() else args[0], *args[1:])


def score_layers(model: nn.Module) -> list[nn.Linear]:
    """
    The last linear layer of a classifier, which turns features into logits; and its copies, one for each adapter.

    Args:
        model (`nn.Module`):
            A sequence classifier or a `PeftModel` around one.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    found: dict[str, list[nn.Linear]] = {}
    for child in head_names(base):
        for name, part in getattr(base, child).named_modules(prefix=child):
            if isinstance(part, nn.Linear):
                found.setdefault(_plain_name(name), []).append(part)
    if not found:
        raise UserError(f"{type(base).__name__} has no linear layer above its base model, which a head is read from")
    return list(found.values())[-1]


def _plain_name(name: str) -> str:
    """A module's name without what PEFT puts in: `score.modules_to_save.default` is `score`."""
    parts, kept = name.split("."), []
    while parts:
        part = parts.pop(0)
        if part == "modules_to_save" and parts:
            parts.pop(0)
        elif part != "original_module":
            kept.append(part)
    return ".".join(kept)
