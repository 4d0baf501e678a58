"""A recipe or training arguments → causal LM with its adapter, text backend, and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..core import checkpoint
from ..core.backend import is_stream
from ..core.errors import UserError, explained
from ..core.hub_revisions import model_commit
from ..core.recipe import Recipe, check_keys
from ..methods import METHODS, Method, get_method
from ..methods.base import reads_evidence
from . import classifier, lm
from .adapter_files import check_adapter, read_config
from .backend import TextBackend, check_method
from .data import tasks
from .data.items import LETTERS
from .data.streams import most_options, stream_task
from .data.tasks import (
    MCQTask,
    as_rows,
    get_task,
    inherit,
    items_of,
    labels_of,
    load_task,
    task_of_run,
    with_naming,
)
from .precision import trains_base
from .prompt import LabelPrompt, Prompt, TokenPrompt, choice_token_ids
from .readouts.answer_tokens import AnswerTokens, answer_prompt, choose_answers
from .readouts.base import Readout
from .readouts.head import HeadReadout
from .readouts.tokens import TokenReadout

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import LoraConfig, PeftModel
    from torch import nn
    from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..training.config import DAPPrConfig


def build_lora(recipe: Recipe, readout: str = "letters") -> LoraConfig | None:
    """The recipe's `lora` section as `peft.LoraConfig`; `None` for full fine-tuning."""
    from peft import LoraConfig

    if recipe.lora is None:
        if readout != "head":
            raise UserError(f"{recipe.name}: lora: null (full fine-tuning) is for model.readout: head")
        return None
    task_type = "SEQ_CLS" if readout == "head" else "CAUSAL_LM"
    with explained(f"{recipe.name}: the lora section is not valid"):
        return LoraConfig(**{"task_type": task_type, **recipe.lora})


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


def load_calibration(recipe: Recipe, task: MCQTask, seed: int = 0) -> Dataset | None:
    """The rows that are kept for calibration; `None` if there are none."""
    data = recipe.data
    return None if data.calibration_split is None else load_task(task, data.calibration_split, data.root)


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
    section, labels = recipe.model, labels_of(train)
    kind = choose_readout(section.readout, labels, recipe.name, section.answers is not None)
    lora = build_lora(recipe, kind)
    adapter, sidecar = _starting_adapter(section.adapter) if section.adapter else ("", {})
    # Resolved once, so that tokenizer and weights are of one commit.
    revision = model_commit(lm.model_path(section.name), section.revision) or section.revision
    frozen = bool(adapter) or not trains_base(lora)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": section.trust_remote_code}
    tokenizer = lm.load_tokenizer(section.name, **common)
    attention: dict[str, Any] = {"attn_implementation": kind_of} if (kind_of := section.attn_implementation) else {}
    readout: Readout | None = None
    answers = prompt = None
    if kind == "head":
        assert labels is not None
        shape = classifier.load_classifier_config(section.name, labels, method, tokenizer, **common)
        set_seed(args.seed)  # the head starts at random, as the adapter does
        model: Any = classifier.load_classifier(
            section.name, shape, section.dtype, section.quantization, frozen=frozen, **common, **attention
        )
    else:
        answers, prompt = _causal_answers(recipe, kind, labels, train, args, tokenizer)
        model = lm.load_lm(section.name, section.dtype, section.quantization, frozen, **common, **attention)
    if adapter:
        if kind == "head":
            classifier.keep_head_precise(model)
        model = lm.load_adapter(model, adapter, trainable=True, base_name=section.name, lora=recipe.lora)
    elif lora is not None:
        set_seed(args.seed)  # the adapter starts at random: the seed must decide where
        add = classifier.add_head_adapter if kind == "head" else lm.add_adapter
        model = add(model, lora, section.name)
    if kind == "head":
        assert labels is not None
        readout = HeadReadout(model, tokenizer, labels, method)
    elif answers is not None:
        readout = TokenReadout(model, tokenizer, answers)
    backend = build_backend(model, tokenizer, args, method, section.name, sidecar, readout, prompt)
    backend.labels = backend.labels or task.labels
    backend.has_new_head = not adapter and classifier.has_new_head(model)
    return model, backend


def _learnt_evidence(sidecar: Mapping[str, Any]) -> bool:
    """Whether an adapter was trained with a method that reads logits as evidence."""
    method = sidecar.get("method", {})
    if method.get("name") not in METHODS:
        return False
    return reads_evidence(get_method(method["name"], **method["options"]))


def _causal_answers(
    recipe: Recipe,
    kind: str,
    labels: Sequence[str] | None,
    train: Any,
    args: DAPPrConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[AnswerTokens | None, Prompt]:
    """The tokens of the labels, or none for letters, with their prompt; checked before gigabytes are loaded."""
    if kind == "tokens":
        assert labels is not None
        prompt = build_token_prompt(args, labels).settled(tokenizer)
        answers = choose_answers(tokenizer, labels, recipe.model.answers, prompt, f"{recipe.name}: model.answers")
        return answers, prompt.listing(answers.listed)
    letters = build_prompt(args).settled(tokenizer)
    widest = args.num_choices or (most_options(train) if recipe.data.streaming else tasks.most_options(train))
    choice_token_ids(tokenizer, widest, letters.ending, letters.spaces)
    return None, letters


def choose_readout(wanted: str, labels: Sequence[str] | None, where: str, answers: bool = False) -> str:
    """
    The readout of `model.readout`, or what the data ask for.

    Args:
        wanted (`str`):
            `"auto"`: tokens if their texts are given, else a head for fixed labels, else letters.
        labels (`Sequence[str]`, *optional*):
            The fixed labels; `None` if rows have options of their own.
        where (`str`):
            Name of the recipe, for errors.
        answers (`bool`, *optional*, defaults to `False`):
            Whether `model.answers` is given.
    """
    if wanted in ("letters", "head") and answers:
        raise UserError(f"{where}: model.answers are for model.readout: tokens, not {wanted}; leave one of them out")
    if wanted == "auto":
        wanted = "tokens" if answers else "letters" if labels is None else "head"
    if wanted != "letters" and labels is None:
        raise UserError(
            f"{where}: model.readout: {wanted} is for fixed labels, but every row has options of its own; use "
            "model.readout: letters, or name the labels (data.train.labels)"
        )
    if wanted == "letters" and labels is not None and len(labels) > len(LETTERS):
        raise UserError(
            f"{where}: {len(labels)} labels, but there are only {len(LETTERS)} letters; use model.readout: head, or "
            "tokens"
        )
    return wanted


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


def build_prompt(args: DAPPrConfig, kind: type[Prompt] = Prompt) -> Prompt:
    """The prompt that the training arguments describe."""
    prompt = dict(args.prompt or {})  # type: ignore[arg-type]
    check_keys(prompt, {f.name for f in fields(kind)}, "the prompt", "train.prompt.")
    return kind(**prompt)


def build_token_prompt(args: DAPPrConfig, labels: Sequence[str]) -> TokenPrompt:
    """The prompt of the training arguments for labels that are read from tokens."""
    given = dict(args.prompt or {})  # type: ignore[arg-type]
    check_keys(given, {f.name for f in fields(TokenPrompt)}, "the prompt", "train.prompt.")
    return answer_prompt(given, labels)


def build_backend(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    args: DAPPrConfig,
    method: Method,
    base_name: str | None,
    sidecar: Mapping[str, Any] = MappingProxyType({}),
    readout: Readout | None = None,
    prompt: Prompt | None = None,
) -> TextBackend:
    """
    The text backend for a loaded model, as the training arguments want it.

    `sidecar` is that of the adapter that training starts from; `prompt` is settled already.
    """
    backend = TextBackend(
        model,
        tokenizer,
        method,
        num_choices=args.num_choices,
        prompt=prompt or build_prompt(args, LabelPrompt if readout is not None else Prompt),
        max_length=args.max_length,
        evidence_offset=sidecar.get("evidence_offset", 0.0),
        base_model=base_name,
        packing=args.packing,
        share_prefix=args.share_prefix,
        truncation=args.truncation,
        readout=readout,
    )
    backend.offset_is_trained = _learnt_evidence(sidecar)
    return backend


def from_objects(
    model: str | PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase | None,
    args: DAPPrConfig,
    method: Method,
    peft_config: LoraConfig | None = None,
    quantization_config: BitsAndBytesConfig | None = None,
    train_dataset: Any = None,
) -> tuple[nn.Module, TextBackend]:
    """
    What `DAPPrTrainer` builds from a model given by name or as an object; see there for the arguments.

    A sequence classifier, or a name together with rows that share their labels, gives a classifier; anything else is
    read by its answer letters.
    """
    from transformers import set_seed

    base_name = model if isinstance(model, str) else None
    if not isinstance(model, str) and tokenizer is None:
        raise UserError("A model given as an object needs its tokenizer: pass processing_class=tokenizer")
    if isinstance(model, str):
        revision = model_commit(lm.model_path(model))
        tokenizer = tokenizer or lm.load_tokenizer(model, revision=revision)
    tokenizer = lm.prepare_tokenizer(tokenizer)  # type: ignore[arg-type]
    labels = classifier_labels(model, train_dataset, method)
    if isinstance(model, str) and peft_config is None:
        from peft import LoraConfig

        task_type = "CAUSAL_LM" if labels is None else "SEQ_CLS"
        peft_config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type=task_type)
    if isinstance(model, str) and labels is not None:
        shape = classifier.load_classifier_config(model, labels, method, tokenizer, revision=revision)
        set_seed(args.seed)
        frozen = not trains_base(peft_config)
        model = classifier.load_classifier(model, shape, "auto", quantization_config, frozen=frozen, revision=revision)
    elif isinstance(model, str):
        model = lm.load_lm(model, "auto", quantization_config, not trains_base(peft_config), revision=revision)
    if peft_config is not None and not hasattr(model, "peft_config"):
        set_seed(args.seed)
        add = lm.add_adapter if labels is None else classifier.add_head_adapter
        model = add(model, peft_config, base_name)
    readout = None
    if labels is not None:
        classifier.labelled_config(lm.unwrapped_config(model), labels, method, tokenizer)
        readout = HeadReadout(model, tokenizer, labels, method)
    backend = build_backend(model, tokenizer, args, method, base_name, readout=readout)
    backend.has_new_head = classifier.has_new_head(model)
    return model, backend


def classifier_labels(model: Any, rows: Any, method: Method) -> tuple[str, ...] | None:
    """The labels of a classifier; `None` if answer letters are to be read: a causal LM, or rows with own options."""
    if not isinstance(model, str) and not classifier.is_classifier(model):
        return None
    found = None if rows is None else fixed_labels(rows)
    if isinstance(model, str):
        return found
    named = tuple(lm.unwrapped_config(model).id2label.values())
    if not all(name == f"LABEL_{number}" for number, name in enumerate(named)):
        return named[: len(named) * 2 // method.num_outputs(2)]
    if found is None:
        raise UserError("This classifier does not name its labels: load it with id2label, or give rows with labels")
    return found


def fixed_labels(rows: Any) -> tuple[str, ...] | None:
    """The labels that rows in memory share; `None` if they have options of their own, or are tokenised or streamed."""
    rows = as_rows(rows)
    own = labels_of(rows)
    if own is not None or is_stream(rows) or not len(rows):
        return own
    names = set(rows[0])
    if names & {"input_ids", "options", "choices"}:
        return None
    return items_of(rows, "train_dataset").labels


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
