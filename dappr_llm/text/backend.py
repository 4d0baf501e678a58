"""
Questions and texts on a language model: what trainer, predictor and pipeline need to know about text.

The trained object stays a native `PeftModel` or `PreTrainedModel`; this class holds only what surrounds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core import checkpoint
from ..core.backend import Backend, Batch, Row, is_stream
from ..core.data_frames import as_rows
from ..core.errors import UserError
from ..core.outputs import Outputs
from ..methods import Method, name_of, served_by
from . import asking, lm
from .content_tokens import count_tokens, every_token
from .data.columns import guess
from .data.items import Columns, ItemParser, MCQItem
from .data.streams import most_options, prepare_stream
from .loading import load_trained
from .model_reader import ModelReader
from .packing.layers import keep_differentiable
from .packing.mixed_adapters import can_mix, fits, read_members
from .pooled_states import group_names
from .precision import precision
from .prompt import LabelPrompt, Prompt
from .readouts.base import Readout
from .readouts.letters import LetterReadout
from .tokenising import fingerprint, prepare_rows, tokenize_items

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SERVED = frozenset({"auxiliary_rows"})


def check_method(method: Method) -> None:
    """Refuse a method that needs what text models do not offer, naming those that work."""
    unserved = method.needs - _SERVED
    if unserved:
        raise UserError(
            f"Method {name_of(method)!r} needs {', '.join(sorted(unserved))}, which text models do not offer: it is "
            "made for class-conditional features, distances or densities of classes in a space that an image "
            "classifier learns for them alone, while a language model's hidden state serves its whole vocabulary and "
            f"is only adapted; on text use one of: {', '.join(served_by(_SERVED))}"
        )


class TextBackend(Backend):
    """
    Reads K logits of a prompt, by way of a readout.

    Args:
        model (`nn.Module`):
            A causal LM, a sequence classifier, or a `PeftModel` around one.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer; left-padding for causal models.
        method (`Method`):
            The method, asked how many outputs it reads per choice.
        num_choices (`int`, *optional*):
            K: the letters trained on. `None`: the most options of the first rows given to `check_options`.
        prompt (`Prompt`, *optional*):
            Layout of the prompt.
        max_length (`int`, *optional*, defaults to 300):
            Longer prompts lose words of their question.
        evidence_offset (`float`, *optional*, defaults to 0.0):
            Added to every answer logit; see `DAPPrConfig.evidence_offset`.
        extra_token_ids (`list[list[int]]`, *optional*):
            For methods with more than one output per choice: the vocabulary rows of each further block, as a
            checkpoint stores them. By default the last rows of the vocabulary.
        packing (`bool`, *optional*, defaults to `True`):
            Compute batches without padding, where the model allows it.
        share_prefix (`bool`, *optional*, defaults to `True`):
            In packed batches, compute common prefixes once.
        readout (`Readout`, *optional*):
            How the logits are read; by default from answer letters.
        truncation (`str`, *optional*):
            Which words a text that is too long loses; by default the readout's own choice.
    """

    modality = "text"
    pretrained = True
    chooses_start = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        method: Method,
        num_choices: int | None = None,
        prompt: Prompt | None = None,
        max_length: int = 300,
        evidence_offset: float = 0.0,
        base_model: str | None = None,
        extra_token_ids: Sequence[Sequence[int]] | None = None,
        packing: bool = True,
        share_prefix: bool = True,
        readout: Readout | None = None,
        truncation: str | None = None,
    ):
        check_method(method)
        if getattr(model, "is_loaded_in_4bit", False):
            keep_differentiable(model)
        if readout is None and tokenizer.padding_side != "left":
            raise UserError("The tokenizer must pad on the left: tokenizer.padding_side = 'left'")
        self.processing_class = self.tokenizer = tokenizer
        self.method = method
        labels = None if readout is None else readout.labels
        self.labels: tuple[str, ...] | None = labels  # of every row; also set where fixed labels are read by letters
        self.class_names, self.num_choices = labels, num_choices if labels is None else len(labels)
        self.prompt = (prompt or (Prompt() if labels is None else LabelPrompt())).settled(tokenizer)
        context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        self.max_length: int = min(max_length, context) if context else max_length
        self.evidence_offset = evidence_offset
        self.base_model = base_model
        self.base_revision, self.precision = lm.resolved_revision(model), precision(model)
        self.readout: Readout = readout or LetterReadout(
            model, tokenizer, self.prompt.ending, self.prompt.spaces, extra_token_ids
        )
        self.answers_untrained = self.readout.name != "head"
        self.truncation = truncation or self.readout.truncation
        self.reader = ModelReader(
            model,
            tokenizer.pad_token_id or 0,
            self.readout.check_tokens(),
            lambda device: self.readout.call(method, 2, device, None),
            self.readout.causal,
            packing,
            share_prefix,
        )

    @classmethod
    def from_pretrained(
        cls,
        folder: str,
        config: Mapping[str, Any],
        method: Method,
        base_model: str | None = None,
        dtype: str = "auto",
        quantization: Any = None,
        device: Any = None,
    ) -> tuple[nn.Module, TextBackend]:
        """
        Model and backend of a trained checkpoint, ready to predict.

        Args:
            folder (`str`):
                The checkpoint.
            config (`Mapping`):
                Its `uncertainty_config.json`.
            method (`Method`):
                The method that the config names.
            base_model (`str`, *optional*):
                Another place of the base model than the config names.
            dtype, quantization:
                How the base model is loaded; see [`lm.load_lm`].
            device (`str` or `torch.device`, *optional*):
                Where to put the model; by default the GPU if there is one.
        """
        model, tokenizer, prompt, readout = load_trained(folder, config, method, base_model, dtype, quantization)
        if quantization is None:
            model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        backend = cls(
            model,
            tokenizer,
            method,
            num_choices=config["num_choices"],
            prompt=prompt,
            max_length=config["max_length"],
            evidence_offset=config["evidence_offset"],
            base_model=config.get("base_model"),
            readout=readout,
            truncation=config.get("truncation"),
        )
        backend.labels = tuple(config.get("labels") or ()) or None
        backend.readout.check_saved(Path(folder) / checkpoint.SIDECAR, config, method)
        return model, backend

    # --- the model ------------------------------------------------------------------------------------------------

    def read(
        self,
        model: nn.Module,
        inputs: Batch,
        width: int | None = None,
        hidden_states: bool = False,
        gate: bool = False,
        adapters: Sequence[str] | None = None,
    ) -> Outputs:
        """
        One forward pass; logits are `[B, method.num_outputs(width)]` in float32, the answers' with the offset.

        Besides the arguments of [`Backend.read`]: `adapters`, an adapter name per row (a padded batch is needed).
        """
        width = width or self.num_choices or 2
        call = self.readout.call(self.method, width, inputs["input_ids"].device, adapters)
        logits = self.reader.read(model, inputs, call, gate)
        features = call.hidden if hidden_states else None
        logits = self.readout.select(logits, width)
        if self.evidence_offset:
            answers, rest = logits.split([width, logits.shape[-1] - width], dim=-1)
            logits = torch.cat([answers + self.evidence_offset, rest], dim=-1)
        pooled = None if call.pooling is None else call.pooling.features(call.hidden)
        return Outputs(logits=logits, features=features, gate=pooled)

    def collate(self, rows: Sequence[Row], pack: bool = True, gate: bool = False) -> dict[str, Any]:
        return self.reader.collate(rows, pack, self.method.passes > 1, gate)

    def gate_groups(self, model: nn.Module) -> tuple[str, ...]:
        return group_names(model, self.readout.causal)

    def content_lengths(self, rows: Any) -> list[int]:
        if isinstance(rows, list):
            return [count_tokens(row.get("content") or every_token(len(row["input_ids"]))) for row in rows]
        if "content" not in rows.column_names:
            return [count_tokens(every_token(size)) for size in rows["length"]]
        return [count_tokens(spans) for spans in rows["content"]]

    def repeated(self, inputs: Batch, times: int) -> dict[str, Any]:
        return self.reader.repeated(inputs, times)

    def read_adapters(
        self, model: nn.Module, rows: Sequence[Row], adapters: Sequence[str], width: int
    ) -> Tensor | None:
        if not fits(rows, len(adapters)) or not can_mix(model, adapters):
            return None
        return read_members(self, model, rows, adapters, width)

    # --- rows -----------------------------------------------------------------------------------------------------

    def prepare(self, dataset: Any, labelled: bool = True, name: str = "dataset") -> Any:
        """
        Rows of any accepted layout → tokenised rows.

        Args:
            dataset (`Dataset`, `DataFrame` or `list[dict]`):
                Prepared rows (`input_ids`, `labels`), items (`id`, `question`, `options`, `label`), or raw rows
                with question, choices and answer under their usual names.
            labelled (`bool`, *optional*, defaults to `True`):
                Refuse rows without an answer.
            name (`str`, *optional*, defaults to `"dataset"`):
                How error messages call it.
        """
        how = {**self._tokenising, "labels": self.readout.labels}
        dataset = as_rows(dataset)
        if is_stream(dataset):
            return prepare_stream(dataset, name, lambda: self.num_choices, **how)
        return prepare_rows(dataset, self.num_choices, labelled, name, **how)

    @property
    def _tokenising(self) -> dict[str, Any]:
        """What [`tokenize_items`] is told besides the rows."""
        return {
            "tokenizer": self.tokenizer,
            "prompt": self.prompt,
            "max_length": self.max_length,
            "truncation": self.truncation,
        }

    def row_keys(self, prepared: Any) -> list[bytes]:
        return [np.asarray(ids, dtype=">u4").tobytes() for ids in prepared["input_ids"]]

    def as_row(self, question: Any, choices: Sequence[Any] | None = None) -> Mapping[str, Any] | None:
        """One question as a row; `None` for anything that holds several."""
        if isinstance(question, Mapping):
            return question
        if not isinstance(question, str):
            return None
        if self.readout.labels is not None and choices is not None:
            raise UserError("This model has fixed labels: leave choices out, or train one that reads options")
        if choices is None and self.labels is not None:
            return {"question": question, "choices": list(self.labels)}
        if choices is None:
            raise UserError('A question given as text needs its choices: pipe("…?", choices=["…", "…"])')
        if isinstance(choices, str):
            raise UserError("choices must be a list of texts, not one text")
        return {"question": question, "choices": list(choices)}

    def fingerprints(self, prepared: Any) -> list[str] | None:
        """A short hash of every prompt's tokens."""
        return [fingerprint(ids) for ids in prepared["input_ids"]]

    @property
    def ask_help(self) -> str:  # type: ignore[override]
        return asking.ask_help(self.labels)

    def ask_row(self, read: Callable[[str], str]) -> Mapping[str, Any] | None:
        return asking.ask_row(read, self.labels)

    def items(self, rows: Sequence[Mapping[str, Any]], start: int = 0, name: str = "item") -> list[MCQItem]:
        """Raw rows, or items, as parsed items; `start` counts on in names and ids where rows come in portions."""
        own, fixed = ItemParser(Columns()), ItemParser(Columns(options=self.labels, foreign=True))
        found = []
        for number, row in enumerate(rows, start):
            row = (self.as_row(row) if isinstance(row, str) else None) or row
            choices = guess("choices", row)
            if choices is not None and self.readout.labels is not None:
                self._check_choices(row[choices], f"{name} {number}")
            is_text = self.labels is not None and (choices is None or self.readout.labels is not None)
            found.append((fixed if is_text else own)(row, f"{name} {number}", str(number)))
        return found

    def _check_choices(self, choices: Any, where: str) -> None:
        """A row may repeat the fixed labels, as parsed items do, but not bring others."""
        labels = list(self.readout.labels or ())
        if isinstance(choices, Sequence) and [str(choice) for choice in choices] != labels:
            raise UserError(
                f"{where} has choices of its own, but this model was trained on {len(labels)} fixed "
                "labels: leave the choices out, or train a model that reads options (model.readout: letters)"
            )

    def encode(self, items: Sequence[MCQItem]) -> list[dict[str, Any]]:
        """Items → rows for `collate`, each with its `num_options`, its `length` and whether it was `truncated`."""
        columns: dict[str, list[Any]] = {
            "id": [item.id for item in items],
            "question": [item.question for item in items],
            "options": [item.options for item in items],
            "label": [item.label for item in items],
        }
        encoded = tokenize_items(columns, **self._tokenising)
        return [{key: values[i] for key, values in encoded.items()} for i in range(len(items))]

    def content_key(self, item: MCQItem) -> str:
        """What an item says, as one text: equal for equal questions, wherever they stand."""
        return json.dumps([item.question, list(item.options)], ensure_ascii=False, allow_nan=False)

    def option_names(self, item: MCQItem) -> list[str]:
        """What the options of an item are called in answers."""
        return self.readout.option_names(len(item.options))

    def check_options(self, prepared: Any, name: str) -> None:
        """Settle K if it is still open; refuse rows that offer more options than letters are trained."""
        # A stream's later rows are checked as they come.
        if self.readout.labels is not None:
            return
        counts = [most_options(prepared)] if is_stream(prepared) else list(prepared["num_options"])
        if self.num_choices is None:
            self.num_choices = max(counts)
        for row, count in enumerate(counts):
            if count > self.num_choices:
                raise UserError(
                    f"{name}, row {row}: {count} options, but only {self.num_choices} letters are trained; set "
                    f"train.num_choices: {max(counts)}"
                )

    # --- checkpoints and speed ------------------------------------------------------------------------------------

    def save_processor(self, folder: str | Path) -> None:
        before, self.tokenizer.padding_side = self.tokenizer.padding_side, self.readout.padding_side
        try:
            self.tokenizer.save_pretrained(folder)
        finally:
            self.tokenizer.padding_side = before

    def score_layer(self, model: nn.Module) -> nn.Linear | None:
        return self.readout.score_layer(model)

    @property
    def table_facts(self) -> Mapping[str, Any]:
        # Beyond 26 labels, rows do not repeat them.
        return {} if self.readout.labels is None else {"class_names": list(self.readout.labels)}

    @property
    def packs(self) -> bool:
        return self.reader.packing

    def compile_blocks(self, model: nn.Module, **options: Any) -> None:
        self.reader.compile_blocks(model, **options)

    def use_frozen_layers_cache(self, model: nn.Module, folder: str) -> None:
        self.reader.use_frozen_layers_cache(model, folder)

    def config(self) -> dict[str, Any]:
        """What is needed to read this checkpoint's logits again."""
        assert self.num_choices is not None, "K is settled when the first rows are checked"
        return {
            "modality": self.modality,
            "base_model": self.base_model,
            "base_revision": self.base_revision,
            "data_revisions": dict(self.data_revisions),
            "precision": self.precision,
            "num_choices": self.num_choices,
            **self.readout.config(self.method, self.num_choices),
            **({"labels": list(self.labels)} if self.labels and self.readout.labels is None else {}),
            "prompt": self.prompt.to_dict(),
            "max_length": self.max_length,
            **({"truncation": self.truncation} if self.truncation != "start" else {}),
            "evidence_offset": self.evidence_offset,
        }
