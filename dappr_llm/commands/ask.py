"""`dappr ask`: an interactive prompt for questions, with probabilities and uncertainties drawn as bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from ..core.errors import UserError
from ..core.terminal import printable, show
from . import shared

if TYPE_CHECKING:
    import argparse

    from ..inference.pipeline import Answer, UncertaintyPipeline

EPILOG = """examples:
  dappr ask runs/quickstart
  dappr ask runs/quickstart "Which is a fruit?" hammer plum
  dappr ask runs/tickets "The app crashes on start"          the run knows its labels
  echo "Which is a fruit? | hammer | plum" | dappr ask user/adapter --revision v1"""

_BAR = 30
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MOST = 10  # options shown at most; of more, the most probable ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("checkpoint", help="folder of a run, or Hub id")
    parser.add_argument("question", nargs="?", help="a question or text to answer; without one, questions are read")
    parser.add_argument("choice", nargs="*", help="its options, if the run has no labels of its own")
    parser.add_argument(
        "--options",
        "--labels",
        nargs="+",
        metavar="NAME",
        help="other options for every question than the run's labels",
    )
    shared.add_base(parser)
    shared.add_pipeline(parser)


def run(args: argparse.Namespace) -> int:
    """Run the verb; returns exit code 0, errors are raised."""
    shared.Sidecars([args.checkpoint])  # a wrong folder is an error before slow imports
    pipe = shared.load_pipeline(shared.PipelineOptions.from_args(args, args.checkpoint))
    if args.question is None:
        ask(pipe, labels=args.options)
        return 0
    backend = pipe.run.backend
    row = backend.as_row(args.question, args.choice or args.options)
    assert row is not None  # one text is one row
    show(render(pipe(row), backend.option_names(backend.items([row])[0])))
    return 0


def bar(share: float, width: int = _BAR) -> str:
    """A horizontal bar for a value between 0 and 1, drawn in steps of 1/8 character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def render(answer: Answer, names: list[str]) -> str:
    """Format one answer; `names` are the letters or class names of its options."""
    from ..decisions.familiarity import one_in

    options = list(zip(names, answer.choices, answer.probs, strict=True))
    if len(options) > _MOST:
        options = sorted(options, key=lambda option: -option[2])[:_MOST]
    texts = [choice if name == choice else f"{name}) {choice}" for name, choice, _ in options]
    # A line break in an option would tear the drawing apart.
    shown = [(name, printable(text, True), prob) for (name, _, prob), text in zip(options, texts, strict=True)]
    width = max(len(text) for _, text, _ in shown)
    lines = []
    for name, text, prob in shown:
        inside = " " if answer.prediction_set is None or name not in answer.prediction_set else "•"
        lines.append(f"  {inside} {text:<{width}}  {bar(prob)} {100 * prob:5.1f} %")
    if len(names) > _MOST:
        lines.append(f"    … and {len(names) - _MOST} more")
    lines.append("")
    for name, value in (("aleatoric", answer.aleatoric), ("epistemic", answer.epistemic)):
        lines.append(f"    {name:<{width}}  {bar(value)} {value:7.3f}")
    if answer.familiarity is not None:
        lines.append(f"    {'familiarity':<{width}}  {bar(answer.familiarity)} {answer.familiarity:7.3f}")
        lines.append(f"\n  {one_in(answer.familiarity)}")
    if answer.prediction_set is not None:
        lines.append(f"\n  • in the prediction set: {', '.join(answer.prediction_set) or 'none'}")
    if answer.abstain:
        lines.append("  → abstains: too uncertain for the risk it was calibrated for")
    else:
        same = answer.letter == answer.answer
        lines.append(f"  → {answer.answer}" if same else f"  → {answer.letter}) {answer.answer}")
    return "\n".join(lines)


def ask(
    pipe: UncertaintyPipeline,
    read: Callable[[str], str] = input,
    out: TextIO | None = None,
    labels: Sequence[str] | None = None,
) -> int:
    """
    Read questions and print answers until end of input; for an invalid question the error is printed instead.

    Args:
        pipe (`UncertaintyPipeline`):
            The pipeline.
        read (`Callable`, *optional*):
            Shows a prompt and reads a line, as `input` does.
        out (`TextIO`, *optional*):
            Stream to print to; by default stdout.
        labels (`Sequence[str]`, *optional*):
            Options of every question, instead of those that are asked for or that the run knows.

    Returns:
        `int`: Number of questions answered.
    """
    out = out or sys.stdout
    backend = pipe.run.backend
    show(backend.ask_help + "\n", file=out)
    answered = 0
    while True:
        try:
            row = backend.ask_row(read) if labels is None else backend.as_row(read("Text: ").strip(), labels)
        except EOFError:
            show(file=out)
            return answered
        if row is None:
            continue
        try:
            answer = pipe(row)
        except UserError as error:
            show(f"  {error}\n", file=out)
            continue
        names = backend.option_names(backend.items([row])[0])
        show(f"\n{render(answer, names)}\n", file=out)
        answered += 1
