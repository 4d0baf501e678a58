"""Loading a causal LM, its tokenizer and a LoRA adapter."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core import checkpoint
from ..core.errors import UserError, explained, nearest
from ..core.hub_revisions import is_commit, model_commit
from ..core.library_output import no_bars_in_files
from ..core.model_names import misspelt
from ..core.schemas.check import shown
from ..core.schemas.synonyms import dtype_name
from . import bundled_model
from .adapter_files import WEIGHTS, check_adapter
from .precision import best_dtype, resolve_dtype, warn_if_slow

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# Where transformers kept the commit of a model until version 5.22, and which it still leaves out of saved configs.
_COMMIT = "_commit_hash"
_MODELS = f"give a Hub id, a folder with config.json and safetensors, or {bundled_model.NAME!r}"
# Of a lora section: what the adapter's weights do not depend on.
_MAY_DIFFER = ("lora_dropout", "inference_mode", "base_model_name_or_path", "revision", "peft_version", "auto_mapping")
_BNB_DTYPES = ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")


def model_path(name: str) -> str:
    """The folder or Hub id of a model; the name of the bundled model becomes its folder, unpacked if necessary."""
    problem = misspelt(name)
    if problem:
        raise UserError(f"Model {name!r}: {problem}")
    return str(bundled_model.load_path()) if name == bundled_model.NAME else name


def quantization_config(options: Mapping[str, Any] | BitsAndBytesConfig | None) -> BitsAndBytesConfig | None:
    """A `BitsAndBytesConfig` from the recipe's `model.quantization`; anything but a mapping is returned unchanged."""
    if options is None or not isinstance(options, Mapping):
        return options
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("A quantised base model needs bitsandbytes: pip install 'dappr-llm[quant]'")
    values = {key: dtype_name(value) if key in _BNB_DTYPES else value for key, value in options.items()}
    if values.get("load_in_4bit"):
        values.setdefault("bnb_4bit_compute_dtype", best_dtype(frozen=False))
        values.setdefault("bnb_4bit_quant_type", "nf4")
        values.setdefault("bnb_4bit_use_double_quant", True)
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":  # FSDP2 shards floating-point weights only
            values.setdefault("bnb_4bit_quant_storage", best_dtype(frozen=False))
    valid = set(BitsAndBytesConfig().to_dict()) | {"load_in_4bit", "load_in_8bit"}
    for key in values:
        if key not in valid:
            raise UserError(f"Unknown key {key!r} in model.quantization; {nearest(key, valid)}")
    return BitsAndBytesConfig(**values)


def weight_options(
    dtype: str | torch.dtype | None, quantization: Mapping[str, Any] | BitsAndBytesConfig | None, frozen: bool
) -> dict[str, Any]:
    """Arguments of `from_pretrained` for how weights are held; see [`load_lm`]."""
    found = resolve_dtype(dtype, frozen and quantization is None)
    warn_if_slow(found)
    return {"dtype": found, "quantization_config": quantization_config(quantization)}


def load_tokenizer(name: str, **kwargs: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with left padding and a pad token."""
    from transformers import AutoTokenizer

    kwargs.setdefault("trust_remote_code", False)  # if unset, transformers asks in the terminal
    path = located(name, kwargs)
    with explained(f"Could not load the tokenizer of {name!r}{at_revision(kwargs)}", _MODELS):
        tokenizer = AutoTokenizer.from_pretrained(path, **kwargs)
    return prepare_tokenizer(tokenizer)


def located(name: str, kwargs: dict[str, Any]) -> str:
    """Folder or Hub id of a model; the revision among the arguments becomes a commit, and is dropped for a folder."""
    path = model_path(name)
    revision = kwargs.pop("revision", None)
    revision = None if Path(path).is_dir() else model_commit(path, revision) or revision
    if revision is not None:
        kwargs["revision"] = revision
    return path


def at_revision(kwargs: Mapping[str, Any]) -> str:
    """The revision among the arguments, for messages."""
    return f" at revision {kwargs['revision']}" if "revision" in kwargs else ""


def resolved_revision(model: Any) -> str | None:
    """The commit on the Hub that a model was loaded from; `None` if it was not, or is not known."""
    found = getattr(getattr(model, "config", None), _COMMIT, None)
    return found if is_commit(found) else None


def remember_revision(model: Any, commit: str | None) -> None:
    """Keep the commit of a model's files, for [`resolved_revision`]."""
    setattr(model.config, _COMMIT, commit)


def unwrapped_config(model: Any) -> Any:
    """The config of a model, with an adapter or not."""
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).config


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Set left padding, so that position -1 is the last token of every prompt, and a pad token if there is none."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def check_causal(name: str, config: PretrainedConfig) -> None:
    """Refuse a model that cannot be read by the token it says next, which letters and tokens are."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_encoder_decoder", False):
        return
    raise UserError(
        f"{name!r} ({config.model_type}) is not a causal language model: it reads a text in both directions and says "
        "no next token, from which model.readout: letters and tokens read the answer; use model.readout: head, which "
        "classifies fixed labels, or a causal model (SmolLM2, Qwen, Llama, Mistral)"
    )


def load_lm(
    name: str,
    dtype: str | torch.dtype | None = "auto",
    quantization: Mapping[str, Any] | BitsAndBytesConfig | None = None,
    frozen: bool = True,
    **kwargs: Any,
) -> PreTrainedModel:
    """
    Load a causal LM from the Hub, a folder, or the bundled model.

    Args:
        name (`str`):
            Hub id, local folder, or `"smollm2-135m"`.
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`):
            Dtype of the weights; see [`best_dtype`].
        quantization (`Mapping` or `BitsAndBytesConfig`, *optional*):
            Load the base model in 4 or 8 bits.
        frozen (`bool`, *optional*, defaults to `True`):
            Whether these weights will not be trained, which `"auto"` asks for.
        kwargs:
            Passed on to `AutoModelForCausalLM.from_pretrained` (`revision`, `attn_implementation`, …).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kwargs.setdefault("trust_remote_code", False)
    path = located(name, kwargs)
    options = weight_options(dtype, quantization, frozen)
    with explained(f"Could not load the model {name!r}{at_revision(kwargs)}", _MODELS), no_bars_in_files():
        known = {key: kwargs[key] for key in ("revision", "trust_remote_code") if key in kwargs}
        check_causal(name, AutoConfig.from_pretrained(path, **known))
        model = AutoModelForCausalLM.from_pretrained(path, **options, **kwargs)
    model.config.use_cache = False
    remember_revision(model, kwargs.get("revision"))
    return model


def _trainable_base(model: PreTrainedModel) -> PreTrainedModel:
    """The model, prepared by PEFT for k-bit training if it is quantised."""
    from peft import prepare_model_for_kbit_training

    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return model


def add_adapter(model: PreTrainedModel, config: LoraConfig, base_name: str | None = None) -> PeftModel:
    """
    Add a new LoRA adapter to a base model.

    Args:
        model (`PreTrainedModel`):
            The base model; prepared for k-bit training if it is quantised.
        config (`LoraConfig`):
            Configuration of the adapter.
        base_name (`str`, *optional*):
            Name of the base model to save in the adapter's config.
    """
    from peft import get_peft_model

    with explained(f"The lora section does not fit {type(model).__name__}"):
        peft_model = get_peft_model(_trainable_base(model), config)
    if not any(parameter.requires_grad for parameter in peft_model.parameters()):
        reason = "lora.inference_mode is true" if config.inference_mode else "it has no trainable parameter"
        raise UserError(f"The lora section trains nothing: {reason}; change it")
    _name_base(peft_model, base_name)
    return peft_model


def load_adapter(
    model: PreTrainedModel,
    adapter: str,
    trainable: bool = False,
    base_name: str | None = None,
    lora: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> PeftModel:
    """
    Load an existing adapter (safetensors only) onto a base model.

    Args:
        model (`PreTrainedModel`):
            The base model.
        adapter (`str`):
            Folder or Hub id.
        trainable (`bool`, *optional*, defaults to `False`):
            Whether the adapter will be trained further.
        base_name (`str`, *optional*):
            Name of the base model to save in the adapter's config.
        lora (`Mapping`, *optional*):
            The recipe's `lora` section: `lora_dropout` may differ from the adapter's, any other value must be equal.
        kwargs:
            Passed on to `PeftModel.from_pretrained`.
    """
    from peft import PeftModel

    folder = Path(checkpoint.local_folder(adapter, kwargs.pop("revision", None)))
    check_adapter(folder)
    if trainable:
        model = _trainable_base(model)
    with _adapter_errors(adapter):
        if lora:
            kwargs["config"] = _continued_config(model, str(folder), lora)
        peft_model = PeftModel.from_pretrained(
            model, str(folder), is_trainable=trainable, use_safetensors=True, **kwargs
        )
    _check_fit(peft_model, folder)
    _name_base(peft_model, base_name)
    return peft_model


def load_another(model: PeftModel, folder: str, name: str) -> None:
    """Load one more adapter from a folder, under a name of its own, beside those that a model has."""
    check_adapter(folder)
    with _adapter_errors(folder, name):
        model.load_adapter(folder, name, is_trainable=False, use_safetensors=True)
    _check_fit(model, Path(folder), name)


@contextmanager
def _adapter_errors(adapter: str, name: str = "default") -> Iterator[None]:
    """What PEFT raises for an adapter that does not fit, as a `UserError`."""
    try:
        with explained(f"Could not load the adapter {adapter!r} on this base model"):
            yield
    except UserError as error:  # PEFT's name of the adapter is not in the file
        raise UserError(str(error).replace(f".{name}.", ".")) from error.__cause__


def _continued_config(model: PreTrainedModel, adapter: str, lora: Mapping[str, Any]) -> PeftConfig:
    """The adapter's own config, which a recipe's `lora` section must describe too; its dropout is the recipe's."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(adapter)
    differing = [key for key, value in lora.items() if _plain(getattr(config, key, None)) != _plain(value)]
    differing = [key for key in differing if key not in _MAY_DIFFER]
    # PEFT saves the modules that it found for `all-linear`, or for other patterns.
    if "target_modules" in differing and _targets(model, config) == _targets(model, config, lora["target_modules"]):
        differing.remove("target_modules")
    if differing:
        pairs = ((key, shown(lora[key]), shown(getattr(config, key, None))) for key in differing)
        text = ", ".join(f"lora.{key} is {ours} (adapter: {own})" for key, ours, own in pairs)
        raise UserError(
            f"The lora section is not that of the adapter {adapter!r} that training starts from: {text}; "
            "leave these keys out, only lora.lora_dropout can change"
        )
    config.lora_dropout = lora.get("lora_dropout", config.lora_dropout)
    return config


def _plain(value: Any) -> Any:
    """Modules are a list in a recipe and a set in PEFT."""
    return set(value) if isinstance(value, list | tuple) and all(isinstance(v, str | int) for v in value) else value


def _targets(model: PreTrainedModel, config: PeftConfig, modules: Any = None) -> set[str]:
    """The names of the modules that get an adapter, found on a model without weights."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if modules is not None:
        config.target_modules = set(modules) if isinstance(modules, list) else modules
    with torch.device("meta"):
        empty = get_peft_model(AutoModelForCausalLM.from_config(model.config), config)
    return {name for name, module in empty.named_modules() if hasattr(module, "lora_A")}


def _check_fit(model: PeftModel, folder: Path, name: str = "default") -> None:
    """Raise a `UserError` if the adapter's weights are not those of the model; PEFT would silently skip them."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, "pt") as weights:
        found = set(weights.keys())
    wanted = set(get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False))
    for text, names in (
        ("has no place for", found - wanted),
        ("also needs", wanted - found),
    ):
        if names:
            raise UserError(
                f"Could not load the adapter {str(folder)!r} on this base model: it has another architecture or size "
                f"and {text} {len(names)} weights (such as {min(names)}); give the base model that the adapter names"
            )


def _name_base(model: PeftModel, base_name: str | None) -> None:
    """
    Name the base model in the adapter's config as others can load it: Hub id and commit, instead of a local path.

    PEFT keeps the commit under `revision` as well.
    """
    name = bundled_model.public_name(base_name)
    if name is not None:
        for config in model.peft_config.values():
            config.base_model_name_or_path = name
            config.revision = resolved_revision(model)
