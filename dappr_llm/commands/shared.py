"""Arguments that several verbs take, and the loading of what they predict with. Imports nothing slow."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.recipe import settings
from ..evaluation.metric_columns import SCORES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from ..inference.ensemble import EnsemblePredictor
    from ..inference.table_predictor import TablePredictor

Options = TypeVar("Options", bound="DataclassInstance")
RECIPE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "recipe": {"help": "a YAML file, or the name of a shipped recipe (see `dappr recipes`)"},
    "--set": {"action": "append", "default": [], "metavar": "KEY=VALUE", "help": "override a recipe value"},
}


def whole(least: int = 1, most: int = 1_000_000_000) -> Callable[[str], int]:
    """An argparse type: a whole number within its limits."""

    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"[+-]?\d{1,12}", text) else None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"a whole number from {least} to {most} is needed, not {text[:60]!r}")
        return number

    return parse


def share(text: str) -> float:
    """An argparse type: a number above 0 and below 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"a number above 0 and below 1 is needed, not {text[:60]!r}")
    return number


def add_base(parser: argparse.ArgumentParser) -> None:
    """`--base`, the base model of an adapter."""
    parser.add_argument("--base", help="where the base model is, if not where the checkpoint says")


def add_data_root(parser: argparse.ArgumentParser) -> None:
    """`--data-root`."""
    parser.add_argument("--data-root", help="local folder with Hub datasets in their row layout")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """The recipe, and `--set`."""
    for name, options in RECIPE_ARGUMENTS.items():
        parser.add_argument(name, **options)


def add_overrides(parser: argparse.ArgumentParser, help: str) -> None:
    """`--set`, which may be given several times."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=help)


def overrides(args: argparse.Namespace) -> list[str]:
    """`--set` and `--data-root` as settings of a recipe, `section.key=value`."""
    return settings(args.set, {"data.root": args.data_root})


def options_from(cls: type[Options], args: argparse.Namespace, **given: Any) -> Options:
    """An options object from the parsed command line: every field that is not given is the argument of its name."""
    return cls(**{field.name: getattr(args, field.name) for field in fields(cls) if field.name not in given} | given)


def add_prediction(parser: argparse.ArgumentParser) -> None:
    """The arguments of every verb that predicts a task."""
    add_base(parser)
    add_data_root(parser)
    parser.add_argument("--batch-size", type=whole(most=100_000), default=16, help="prompts per batch (default: 16)")
    parser.add_argument("--limit", type=whole(), help="use only the first rows of every task")


def add_columns(parser: argparse.ArgumentParser, default: str = "those that the run was trained on") -> None:
    """How rows of one's own are read; [`columns`] reads it back."""
    own = parser.add_argument_group(f"columns of your own data (default: {default})")
    own.add_argument(
        "--question", "--text", metavar="COLUMN", help='of questions or texts, or a template: "{question} {passage}"'
    )
    own.add_argument(
        "--choices", nargs="+", metavar="COLUMN", help="of the options, if rows have their own; or one per option"
    )
    own.add_argument("--options", "--labels", nargs="+", metavar="NAME", help="the labels, if all rows share them")
    own.add_argument("--answer", "--label", metavar="COLUMN", help="of answers or labels")
    own.add_argument("--encoding", help="of the file, if not UTF-8")


def columns(args: argparse.Namespace) -> dict[str, Any]:
    """The columns that were given, under the keys of a task description."""
    keys = ("question", "choices", "options", "answer", "encoding")
    given = {key: getattr(args, key) for key in keys if getattr(args, key)}
    if len(given.get("choices", ())) == 1:
        given["choices"] = given["choices"][0]
    return given


def add_cache(parser: argparse.ArgumentParser) -> None:
    """`--no-cache`, for verbs that write prediction tables."""
    parser.add_argument(
        "--no-cache", action="store_true", help="compute tables again that were computed before from the same files"
    )


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """The arguments of every verb that computes metrics from tables."""
    parser.add_argument(
        "--score",
        default="epistemic",
        choices=list(SCORES),
        help="what ranks items for OOD detection (default: epistemic)",
    )
    parser.add_argument(
        "--resamples", type=whole(0, 1_000_000), default=1000, help="bootstrap resamples (default: 1000; 0: none)"
    )
    parser.add_argument("--allow-nan", action="store_true", help="accept rows with NaN or Inf, as most uncertain")


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """The arguments of every verb that answers questions; `--base` comes from `add_base` or `add_prediction`."""
    parser.add_argument("--revision", help="commit, branch or tag of a checkpoint on the Hub")
    parser.add_argument("--load-in-4bit", action="store_true", help="load the base model in 4 bits")
    parser.add_argument("--no-decision", action="store_true", help="ignore decision.json: the model's own numbers")
    parser.add_argument("--no-gate", action="store_true", help="ignore gate.json: no density, no familiarity")
    parser.add_argument("--extra-letters", action="store_true", help="read more options than letters were trained")
    parser.add_argument("--truncate", action="store_true", help="cut the start of questions that are too long")


@dataclass(frozen=True)
class PipelineOptions:
    """
    How a checkpoint is loaded to answer questions; see `UncertaintyPipeline.from_pretrained`.

    Args:
        checkpoint (`str`):
            Folder of a run, or Hub id.
        base (`str`, *optional*):
            Another place of the base model than the checkpoint names.
        revision (`str`, *optional*):
            Commit, branch or tag of a checkpoint on the Hub.
        load_in_4bit (`bool`, *optional*, defaults to `False`):
            Quantise the base model.
        decision (`bool`, *optional*, defaults to `True`):
            Apply the decision rule beside the weights.
        extra_letters, truncate (`bool`, *optional*, defaults to `False`):
            Accept more options than were trained, and questions that are too long.
        batch_size (`int`, *optional*, defaults to 16):
            Questions per batch.
        gate (`bool`, *optional*, defaults to `True`):
            Say how familiar a question is, if there is a gate beside the weights.
    """

    checkpoint: str
    base: str | None = None
    revision: str | None = None
    load_in_4bit: bool = False
    decision: bool = True
    extra_letters: bool = False
    truncate: bool = False
    batch_size: int = 16
    gate: bool = True

    @classmethod
    def from_args(cls, args: argparse.Namespace, checkpoint: str) -> PipelineOptions:
        """From the arguments of a verb with `add_base` and `add_pipeline`."""
        return cls(
            checkpoint,
            base=args.base,
            revision=args.revision,
            load_in_4bit=args.load_in_4bit,
            decision=not args.no_decision,
            gate=not args.no_gate,
            extra_letters=args.extra_letters,
            truncate=args.truncate,
            batch_size=getattr(args, "batch_size", cls.batch_size),
        )


def load_pipeline(options: PipelineOptions) -> Any:
    """The `UncertaintyPipeline` of a checkpoint."""
    from ..inference.pipeline import UncertaintyPipeline

    return UncertaintyPipeline.from_pretrained(
        options.checkpoint,
        options.base,
        options.revision,
        load_in_4bit=options.load_in_4bit,
        decision=options.decision,
        gate=options.gate,
        extra_letters=options.extra_letters,
        truncate=options.truncate,
        batch_size=options.batch_size,
    )


def load_predictor(
    names: str | Sequence[str], base: str | None, batch_size: int, **kwargs: Any
) -> TablePredictor | EnsemblePredictor:
    """
    What predicts whole datasets with a checkpoint, or with several as an ensemble.

    Args:
        names (`str` or `Sequence[str]`):
            Folders of runs, or Hub ids.
        base (`str`, *optional*):
            Another place of the base model than the checkpoint names.
        batch_size (`int`):
            Prompts per batch.
        kwargs:
            Passed on to `load_checkpoint` (`revision`, `quantization`).
    """
    from ..inference.ensemble import AdapterEnsemble, EnsemblePredictor
    from ..inference.loading import load_checkpoint
    from ..inference.table_predictor import PredictionSettings

    settings = PredictionSettings(batch_size=batch_size)
    names = [names] if isinstance(names, str) else names
    if len(names) > 1:
        return EnsemblePredictor(AdapterEnsemble.from_pretrained(names, base, **kwargs), settings)
    return load_checkpoint(names[0], base, **kwargs).predictor(settings)


class Sidecars:
    """
    The local folder and `uncertainty_config.json` of each checkpoint, read once.

    Those on this machine are read when the object is made, so that a wrong folder is an error before anything slow is
    imported; those on the Hub are downloaded when they are asked for.

    Args:
        names (`Sequence[str]`):
            Folders of runs, or Hub ids.
        revision (`str`, *optional*):
            Commit, branch or tag on the Hub.
    """

    def __init__(self, names: Sequence[str], revision: str | None = None):
        from ..core import checkpoint

        self.revision = revision
        self._read = checkpoint.check_folders(names)

    def __getitem__(self, name: str) -> tuple[str, dict[str, Any]]:
        from ..core import checkpoint

        if name not in self._read:
            self._read[name] = checkpoint.load_sidecar(name, self.revision)
        return self._read[name]
