"""Recipe or checkpoint → method, model, backend and data. The only place that chooses text or vision."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import checkpoint, manifest
from ..core.errors import UserError
from ..core.recipe import Recipe, check_keys
from ..methods import Method, get_method
from ..vision import build as run_vision

if TYPE_CHECKING:
    from datasets import Dataset

    from ..core.outputs import Prediction
    from ..text.backend import TextBackend
    from ..text.prompt import Prompt
    from ..training.config import DAPPrConfig

_PEFT_DEFAULTS = {"task_type": "CAUSAL_LM"}


@dataclass
class Run:
    """Everything a training or prediction needs; `train` and `validation` are empty for a loaded checkpoint."""

    method: Method
    model: Any
    backend: Any  # TextBackend or ImageBackend
    folder: str = ""
    train: Any = None
    validation: Any = None
    auxiliary: Any = None
    tasks: dict[str, Any] = field(default_factory=dict)

    def predict(self, question: Any, choices: list[Any] | None = None, extra_letters: bool = False) -> Prediction:
        """
        Probabilities and uncertainties for a question or an image, or for several.

        Args:
            question (`str` or `list[str]`):
                One question, or a list of them; for an image classifier images, as paths or Pillow's.
            choices (`list[str]` or `list[list[str]]`, *optional*):
                The question's options, or a list of options per question (equally many each).
            extra_letters (`bool`, *optional*, defaults to `False`):
                Read more options than letters were trained; otherwise such questions are refused.
        """
        from .passes import predict_batch

        return predict_batch(self, *self.encoded(question, choices, extra_letters))

    def encoded(
        self, question: Any, choices: list[Any] | None = None, extra_letters: bool = False
    ) -> tuple[list[dict[str, Any]], int]:
        """What `predict` gives to the model, as rows for `collate`, and how many choices each offers."""
        from ..text.data.items import Columns, parse_item

        self.model.eval()
        if self.backend.modality == "vision":
            images = [question] if self.backend.as_row(question, choices) else list(question)
            return self.backend.encode(self.backend.items(images)), self.backend.num_choices
        if choices is None:
            raise UserError("A question needs its choices")
        questions, options = ([question], [choices]) if isinstance(question, str) else (question, choices)
        rows = [{"question": q, "choices": list(o)} for q, o in zip(questions, options, strict=True)]
        counts = {len(parse_item(row, Columns(), f"question {i}", str(i)).options) for i, row in enumerate(rows)}
        if len(counts) != 1:
            raise UserError("Questions given together need equally many choices; use predict_table for mixed ones")
        if max(counts) > (self.backend.num_choices or max(counts)) and not extra_letters:
            raise UserError(
                f"{max(counts)} choices, but only {self.backend.num_choices} letters are trained; offer fewer, or "
                "pass extra_letters=True to read letters that were never trained"
            )
        return list(self.backend.prepare(rows, labelled=False)), counts.pop()


def build_method(recipe: Recipe) -> Method:
    """The method of a recipe."""
    options = dict(recipe.method)
    return get_method(options.pop("name"), **options)


def build_args(recipe: Recipe) -> DAPPrConfig:
    """The recipe's `train` section as `DAPPrConfig`."""
    from ..training.config import DAPPrConfig

    valid = {f.name for f in fields(DAPPrConfig) if f.init}
    check_keys(recipe.train, valid, recipe.name, "train.")
    values = {"report_to": "none", **recipe.train, "output_dir": str(recipe.output_dir)}
    try:
        return DAPPrConfig(**values)
    except (ValueError, TypeError) as error:
        raise UserError(f"{recipe.name}: the train section is not valid: {str(error).splitlines()[0]}") from None


def build_lora(recipe: Recipe) -> Any:
    """The recipe's `lora` section as `peft.LoraConfig`."""
    from peft import LoraConfig

    valid = set(inspect.signature(LoraConfig).parameters)
    check_keys(recipe.lora, valid, recipe.name, "lora.")
    return LoraConfig(**{**_PEFT_DEFAULTS, **recipe.lora})


def load_split(recipe: Recipe, split: str, limit: int | None) -> Dataset:
    """Rows of the recipe's own task."""
    from ..text.data.tasks import load_task

    return load_task(recipe.data.train, split, recipe.data.root, limit)


def build_data(recipe: Recipe) -> tuple[Dataset, Dataset | None]:
    """Training and validation rows; only training rows are ever turned into naming questions."""
    from ..text.data.tasks import with_naming

    data = recipe.data
    validation = None
    if data.streaming:
        return _stream(recipe)
    train = load_split(recipe, data.train_split, data.max_train_samples)
    if data.validation_fraction:
        halves = train.train_test_split(data.validation_fraction, seed=0)
        train, validation = halves["train"], halves["test"]
    elif data.validation_split is not None:
        validation = load_split(recipe, data.validation_split, data.max_validation_samples)
    return with_naming(train, data.naming_share), validation


def _stream(recipe: Recipe) -> tuple[Any, Dataset | None]:
    """Training rows as a stream, validation rows as ever."""
    from ..text.data.streams import stream_task

    data = recipe.data
    if int(recipe.train.get("max_steps", -1)) <= 0:
        raise UserError(f"{recipe.name}: data.streaming needs train.max_steps, since a stream's length is not known")
    if data.validation_fraction or data.naming_share:
        raise UserError(f"{recipe.name}: data.streaming goes with neither validation_fraction nor naming_share")
    seed = int(recipe.train.get("seed", 42))
    rows = stream_task(data.train, data.train_split, data.root, data.max_train_samples, data.shuffle_buffer, seed)
    if data.validation_split is None:
        return rows, None
    return rows, load_split(recipe, data.validation_split, data.max_validation_samples)


def load_auxiliary(recipe: Recipe, method: Method, own: Any, seed: int) -> Any:
    """Rows of the auxiliary task, or images of noise, for a method that learns from them; `own`: the training task."""
    from ..training.auxiliary_rows import check_auxiliary, check_names
    from .modality import find_task, load_rows

    data, images = recipe.data, run_vision.is_image_recipe(recipe)
    check_auxiliary(method, recipe.method["name"], data.auxiliary is not None)
    if data.auxiliary is None:
        return None
    if images and run_vision.is_noise(data.auxiliary):
        return run_vision.noise(recipe, own, seed)
    modality = "vision" if images else "text"
    task = find_task(data.auxiliary, modality)
    check_names(recipe.name, task.name, own.name, [find_task(spec, modality).name for spec in data.ood])
    return load_rows(task, data.auxiliary_split, data.root, labelled=False, seed=seed)


def test_tasks(recipe: Recipe) -> tuple[tuple[str, Any, Any] | None, list[tuple[str, Any, Any]]]:
    """Split, rows and task of the ID test (if there is a test split) and of each OOD test, before any training."""
    from .modality import find_task, load_rows

    data, images = recipe.data, run_vision.is_image_recipe(recipe)
    modality = "vision" if images else "text"
    own = run_vision.build_task(recipe) if images else find_task(data.train, modality)
    id_rows = None
    if data.test_split:
        id_rows = (data.test_split, load_rows(own, data.test_split, data.root, data.max_test_samples), own)
    ood: list[tuple[str, Any, Any]] = []
    for spec in data.ood:
        task = find_task(spec, modality)
        if task.name in [t.name for _, _, t in ood] or task.name == own.name:
            raise UserError(f"{recipe.name}: data.ood names {task.name!r} twice, or it is the training task")
        rows = load_rows(task, data.ood_split, data.root, data.max_test_samples, labelled=False)
        ood.append((data.ood_split, rows, task))
    return id_rows, ood


def build(recipe: Recipe, args: DAPPrConfig) -> Run:
    """
    Build a run: rows first, since mistakes in them are cheap to find, then the model.

    Args:
        recipe (`Recipe`):
            The recipe.
        args (`DAPPrConfig`):
            Its training arguments, from `build_args`.
    """
    from transformers import set_seed

    from ..text import lm
    from ..text.backend import check_method
    from ..text.data.streams import most_options
    from ..text.data.tasks import get_task
    from ..text.prompt import choice_token_ids

    method = build_method(recipe)
    if run_vision.is_image_recipe(recipe):
        model, backend, train, validation, task = run_vision.build(recipe, args, method, recipe.method["name"])
        auxiliary = load_auxiliary(recipe, method, task, args.seed)
        return Run(method, model, backend, str(recipe.output_dir), train, validation, auxiliary, {"train": task})
    check_method(method)
    lora = build_lora(recipe)
    train, validation = build_data(recipe)
    task = get_task(recipe.data.train)
    auxiliary = load_auxiliary(recipe, method, task, args.seed)
    section = recipe.model
    adapter, sidecar = _starting_adapter(section.adapter) if section.adapter else ("", {})
    common = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
    tokenizer = lm.load_tokenizer(section.name, **{k: v for k, v in common.items() if v})
    widest = args.num_choices or (most_options(train) if recipe.data.streaming else max(map(len, train["options"])))
    choice_token_ids(tokenizer, widest, build_prompt(args).ending)  # letters must be there before gigabytes are loaded
    if section.attn_implementation:
        common["attn_implementation"] = section.attn_implementation
    model = lm.load_lm(section.name, section.dtype, section.quantization, **common)
    if adapter:
        model = lm.load_adapter(model, adapter, trainable=True, base_name=section.name, lora=recipe.lora)
    else:
        set_seed(args.seed)  # the adapter starts at random: the seed must decide where
        model = lm.add_adapter(model, lora, section.name)
    offset = sidecar.get("evidence_offset", 0.0)
    backend = build_text_backend(model, tokenizer, args, method, section.name, offset)
    return Run(method, model, backend, str(recipe.output_dir), train, validation, auxiliary, {"train": task})


def _starting_adapter(name: str) -> tuple[str, Mapping[str, Any]]:
    """The folder of the adapter to start from; one trained elsewhere has no sidecar, which is fine."""
    folder = Path(name)
    manifest.check(folder)
    if folder.is_dir() and not (folder / checkpoint.SIDECAR).is_file():
        return name, {}
    if not folder.is_dir() and "/" not in name:
        raise UserError(f"model.adapter: {name!r} is neither a folder nor a Hub id")
    if not folder.is_dir() and len(folder.parts) != 2:
        raise UserError(f"model.adapter: no such folder {name!r}; train the recipe that makes it first")
    return checkpoint.load_sidecar(name)


def build_prompt(args: DAPPrConfig) -> Prompt:
    """The prompt that the training arguments describe."""
    from ..text.prompt import Prompt

    prompt = dict(args.prompt or {})  # type: ignore[arg-type]
    check_keys(prompt, {f.name for f in fields(Prompt)}, "the prompt", "train.prompt.")
    return Prompt(**prompt)


def build_text_backend(
    model: Any, tokenizer: Any, args: DAPPrConfig, method: Method, base_name: str | None, offset: float = 0.0
) -> TextBackend:
    """The text backend for a loaded model, as the training arguments want it."""
    from ..text.backend import TextBackend

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


def build_backend(
    model: Any,
    tokenizer: Any,
    args: DAPPrConfig,
    method: Method,
    peft_config: Any = None,
    quantization_config: Any = None,
) -> tuple[Any, TextBackend]:
    """What `DAPPrTrainer` calls for a model given by name or as an object."""
    from transformers import set_seed

    from ..text import lm

    base_name = model if isinstance(model, str) else None
    if isinstance(model, str):
        tokenizer = tokenizer or lm.load_tokenizer(model)
        model = lm.load_lm(model, "auto", quantization_config)
        if peft_config is None:
            from peft import LoraConfig

            peft_config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", **_PEFT_DEFAULTS)
    elif tokenizer is None:
        raise UserError("A model given as an object needs its tokenizer: pass processing_class=tokenizer")
    if peft_config is not None and not hasattr(model, "peft_config"):
        set_seed(args.seed)
        model = lm.add_adapter(model, peft_config, base_name)
    return model, build_text_backend(model, lm.prepare_tokenizer(tokenizer), args, method, base_name)


def load_checkpoint(
    checkpoint_name: str | Path,
    base_model: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    quantization: Any = None,
    device: Any = None,
) -> Run:
    """
    A trained checkpoint, ready to predict.

    Args:
        checkpoint_name (`str` or `Path`):
            The folder that training wrote, or a Hub id.
        base_model (`str`, *optional*):
            Another place of the base model than the one written in the checkpoint.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Dtype of the base model.
        revision (`str`, *optional*):
            Commit, branch or tag of a checkpoint on the Hub.
        quantization (`Mapping`, *optional*):
            Load the base in 4 or 8 bits.
        device (`str` or `torch.device`, *optional*):
            Where to put the model; by default the GPU if there is one.
    """
    folder, config = checkpoint.load_sidecar(checkpoint_name, revision)
    manifest.check(folder)
    method = get_method(config["method"]["name"], **config["method"]["options"])
    if config["modality"] == "vision":
        model, backend = run_vision.load_checkpoint(folder, config, method, quantization, device)
        return Run(method, model, backend, folder)
    if config["modality"] != "text":
        raise UserError(f"{checkpoint_name}: unknown modality {config['modality']!r}")
    base = base_model or config.get("base_model")
    if base is None and (Path(folder) / "adapter_config.json").is_file():
        raise UserError(f"{checkpoint_name} does not name its base model; pass base_model (--base)")
    return _load_text(folder, config, method, base, dtype, quantization, device)


def _load_text(
    folder: str,
    config: Mapping[str, Any],
    method: Method,
    base: str | None,
    dtype: str,
    quantization: Any,
    device: Any,
) -> Run:
    import torch

    from ..text import lm
    from ..text.backend import TextBackend
    from ..text.prompt import Prompt

    is_adapter = (Path(folder) / "adapter_config.json").is_file()
    tokenizer = lm.load_tokenizer(folder)
    model = lm.load_lm(base if is_adapter and base else folder, dtype, quantization)
    if is_adapter:
        model = lm.load_adapter(model, folder, base_name=base)
    if quantization is None:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    backend = TextBackend(
        model,
        tokenizer,
        method,
        num_choices=config["num_choices"],
        prompt=Prompt(**config["prompt"]),
        max_length=config["max_length"],
        evidence_offset=config["evidence_offset"],
        base_model=config.get("base_model"),
        extra_token_ids=config.get("extra_token_ids"),
    )
    model.eval()
    return Run(method, model, backend, folder)
