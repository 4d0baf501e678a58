"""
One call from a question to a decision: answer, probabilities, two uncertainties, a prediction set, whether to abstain.

What differs between text and images is asked of the run's backend, what differs between methods of the method:
nothing here names either. A pipeline may be called from any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import checkpoint
from ..core.data_frames import as_rows
from ..core.errors import UserError
from ..decisions import rule as calibration
from ..decisions.rule import Decision

if TYPE_CHECKING:
    from ..core.outputs import Prediction
    from .loading import Run

_WINDOW = 16  # batches whose rows are sorted by length together; bounds the memory of a stream


@dataclass(frozen=True)
class Answer:
    """
    What is said about one question, or about one image, whose options are the classes.

    Args:
        id (`str`):
            The item's id, or its number.
        answer (`str`):
            The most probable option.
        letter (`str`):
            Its letter.
        choices (`tuple[str, ...]`):
            The options, in the order of `probs` and `alpha`.
        probs (`tuple[float, ...]`):
            Probabilities of the options, calibrated where the adapter has a decision rule.
        alpha (`tuple[float, ...]`, *optional*):
            Dirichlet parameters, for methods that have them; `alpha0` is what the model said, calibrated or not.
        aleatoric, epistemic (`float`):
            The two uncertainties.
        prediction_set (`tuple[str, ...]`, *optional*):
            Letters of the options that may be right; `None` without a decision rule.
        abstain (`bool`, *optional*):
            Whether the rule says not to answer; `None` without one.
        density (`float`, *optional*):
            How typical the question is of those that were trained on (larger: more); `None` without a gate.
        familiarity (`float`, *optional*):
            The density as a p-value in (0, 1]: 0.005 is as unusual as 1 in 200 of the questions it was trained for.
    """

    id: str
    answer: str
    letter: str
    choices: tuple[str, ...]
    probs: tuple[float, ...]
    alpha: tuple[float, ...] | None
    aleatoric: float
    epistemic: float
    prediction_set: tuple[str, ...] | None
    abstain: bool | None
    density: float | None = None
    familiarity: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        # dataclasses.asdict deep-copies every number, which is slow for a million rows.
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}


class UncertaintyPipeline:
    """
    Answers with uncertainties from a trained checkpoint.

    Args:
        run (`Run`):
            A loaded checkpoint, from `load_checkpoint`.
        decision (`Decision`, *optional*):
            Its decision rule. Without one, probabilities are the model's own, and sets and abstention stay `None`.
        batch_size (`int`, *optional*, defaults to 16):
            Prompts per forward pass; changes speed only.
        extra_letters (`bool`, *optional*, defaults to `False`):
            Read more options than the adapter was trained for. Such letters were never trained, so the probabilities
            of these questions mean little; by default they are refused.
        truncate (`bool`, *optional*, defaults to `False`):
            Cut the start of a question that is too long, instead of refusing it.

    Example:

    ```python
    >>> pipe = UncertaintyPipeline.from_pretrained("user/adapter")
    >>> out = pipe("Which of these is a fruit?", choices=["hammer", "plum", "violin", "sock"])
    >>> out.answer, out.probs, out.epistemic, out.prediction_set, out.abstain
    ```
    """

    def __init__(
        self,
        run: Run,
        decision: Decision | None = None,
        batch_size: int = 16,
        extra_letters: bool = False,
        truncate: bool = False,
    ):
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1, got {batch_size}")
        self.run = run
        self.decision = decision
        self.batch_size = batch_size
        self.extra_letters = extra_letters
        self.truncate = truncate
        run.model.eval()
        self._predictor = run.predictor()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        base_model: str | None = None,
        revision: str | None = None,
        device: Any = None,
        dtype: str = "auto",
        load_in_4bit: bool = False,
        decision: str | Path | bool = True,
        gate: bool = True,
        **kwargs: Any,
    ) -> UncertaintyPipeline:
        """
        Load an adapter and its decision rule.

        Weights are read from safetensors only, and no code of the repository runs.

        Args:
            name (`str` or `Path`):
                A folder, or a Hub id.
            base_model (`str`, *optional*):
                Another place of the base model than the one the adapter names.
            revision (`str`, *optional*):
                Commit, branch or tag on the Hub; a commit pins weights and rule together.
            device (`str` or `torch.device`, *optional*):
                By default the accelerator if there is one.
            dtype (`str`, *optional*, defaults to `"auto"`):
                Of the base model; by default the one that it was trained in.
            load_in_4bit (`bool`, *optional*, defaults to `False`):
                Load the base in 4 bits (needs bitsandbytes). A rule fitted at full precision then holds only nearly.
            decision (`bool`, `str` or `Path`, *optional*, defaults to `True`):
                `False`: ignore the rule; a path: use that `decision.json`.
            gate (`bool`, *optional*, defaults to `True`):
                `False`: ignore the gate, so that there is no familiarity.
            kwargs:
                Further arguments of [`UncertaintyPipeline`].
        """
        folder, _ = checkpoint.load_sidecar(name, revision)
        rule = None  # read before the weights, so that a damaged file is reported at once
        if decision is not False and (decision is not True or (Path(folder) / calibration.FILE).is_file()):
            rule = Decision.load(folder if decision is True else decision, checkpoint.weights_hash(folder))
        from .loading import load_checkpoint  # imports torch, which takes seconds

        quantization = {"load_in_4bit": True} if load_in_4bit else None
        run = load_checkpoint(
            folder, base_model, dtype, quantization=quantization, device=device or _device(), gate=gate
        )
        return cls(run, rule, **kwargs)

    def __call__(
        self,
        question: Any,
        choices: Sequence[Any] | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Any:
        """
        Answer one question, several, or a stream of them.

        Args:
            question (`str`, `Mapping`, `list`, `Dataset`, `DataFrame` or any iterable):
                One question, or rows with question and choices under their usual names. For an image classifier: a
                path or Pillow image, or rows with an image.
            choices (`list[str]` or `list[list[str]]`, *optional*):
                Options of a question given as text; for a list of questions, one list for all or one list each.
            batch_size (`int`, *optional*):
                Prompts per forward pass.
            progress (`bool`, *optional*):
                Show a bar; by default for more than one batch in a terminal.

        Returns:
            [`Answer`] for one question; a list of them for a list or a `Dataset`; a generator for a generator.
        """
        question = as_rows(question)
        row = self.run.backend.as_row(question, choices)
        if row is not None:
            return next(self.stream([row], 1, progress=False))
        rows = question
        if choices is not None:
            questions = list(question)
            each = [choices] * len(questions) if all(isinstance(c, str) for c in choices) else list(choices)
            if len(each) != len(questions):
                raise UserError(f"{len(questions)} questions, but choices for {len(each)}")
            rows = [{"question": q, "choices": list(c)} for q, c in zip(questions, each, strict=True)]
        answers = self.stream(rows, batch_size, progress)
        return list(answers) if isinstance(rows, Sized) else answers

    def stream(
        self, rows: Iterable[Mapping[str, Any]], batch_size: int | None = None, progress: bool | None = None
    ) -> Iterator[Answer]:
        """Answers in the order of the rows, holding a few batches of them in memory; arguments as in a call."""
        from tqdm.auto import tqdm

        rows, size = as_rows(rows), batch_size or self.batch_size
        total = len(rows) if isinstance(rows, Sized) else None
        hidden = (
            True
            if progress is False or (total is not None and total <= size)
            else (None if progress is None else False)
        )
        source, done = iter(rows), 0
        with tqdm(total=total, unit="question", disable=hidden) as bar:
            while window := list(islice(source, size * _WINDOW)):
                yield from self._answer(window, size, done, bar)
                done += len(window)

    def _answer(self, window: list[Mapping[str, Any]], size: int, start: int, bar: Any) -> list[Answer]:
        items = self.run.backend.items(window, start)
        encoded = self.run.backend.encode(items)
        for item, row in zip(items, encoded, strict=True):
            self._check(item, row)
        order = sorted(range(len(items)), key=lambda i: (encoded[i]["num_options"], -encoded[i]["length"]))
        answers: list[Answer | None] = [None] * len(items)
        while order:
            count = encoded[order[0]]["num_options"]
            batch = [i for i in order[:size] if encoded[i]["num_options"] == count]
            order = order[len(batch) :]
            ids = [items[i].id for i in batch]
            prediction = self._predictor.predict_batch([encoded[i] for i in batch], count, ids)
            for i, answer in zip(batch, self._read([items[i] for i in batch], prediction), strict=True):
                answers[i] = answer
            bar.update(len(batch))
        return answers  # type: ignore[return-value]

    def _check(self, item: Any, row: Mapping[str, Any]) -> None:
        names = self.run.backend.option_names(item)
        trained = self.run.backend.num_choices or len(names)
        if len(names) > trained and not self.extra_letters:
            raise UserError(
                f"Item {item.id!r} offers {len(names)} choices, but the adapter was trained on {trained} letters "
                f"({', '.join(names[:trained])}); offer fewer, or pass extra_letters=True (--extra-letters) to read "
                "letters that were never trained"
            )
        first: dict[str, str] = {}
        for letter, text in zip(names, item.options if row.get("own_options", True) else (), strict=False):
            if text.strip() in first:
                raise UserError(f"Item {item.id!r}: choices {first[text.strip()]} and {letter} are the same, {text!r}")
            first[text.strip()] = letter
        if row.get("truncated") and not self.truncate:
            raise UserError(
                f"Item {item.id!r}: the question is longer than the {self.run.backend.max_length} tokens the adapter "
                "reads; shorten it, or pass truncate=True (--truncate) to cut its start"
            )

    def _read(self, items: Sequence[Any], prediction: Prediction) -> list[Answer]:
        """The method's prediction, with the decision rule applied."""
        probs = prediction.probs.double().numpy()
        alpha = None if prediction.alpha is None else prediction.alpha.double().numpy()
        aleatoric, epistemic = prediction.aleatoric.double().numpy(), prediction.epistemic.double().numpy()
        counts = np.full(len(probs), probs.shape[1])
        chosen = abstain = None
        if self.decision is not None:
            probs, alpha = self.decision.scale(probs, alpha, counts)
            bad = ~np.isfinite(probs).all(axis=1)
            if bad.any():
                name = items[int(bad.argmax())].id
                raise UserError(f"The decision rule makes NaN of item {name!r}; fit it again with `dappr calibrate`")
            aleatoric = probs.sum(axis=1) - probs.max(axis=1)
            chosen = self.decision.sets(probs, alpha, counts, [self.run.backend.content_key(i) for i in items])
            abstain = self.decision.abstain(probs, epistemic)
        found = []
        for row, item in enumerate(items):
            names, best = self.run.backend.option_names(item), int(probs[row].argmax())
            found.append(
                Answer(
                    id=item.id,
                    answer=item.options[best],
                    letter=names[best],
                    choices=tuple(item.options),
                    probs=tuple(probs[row].tolist()),
                    alpha=None if alpha is None else tuple(alpha[row].tolist()),
                    aleatoric=float(aleatoric[row]),
                    epistemic=float(epistemic[row]),
                    prediction_set=None
                    if chosen is None
                    else tuple(name for name, inside in zip(names, chosen[row], strict=True) if inside),
                    abstain=None if abstain is None else bool(abstain[row]),
                    density=None if prediction.density is None else float(prediction.density[row]),
                    familiarity=None if prediction.familiarity is None else float(prediction.familiarity[row]),
                )
            )
        return found


def _device() -> Any:
    import torch

    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
