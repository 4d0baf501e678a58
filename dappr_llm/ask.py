"""`dappr ask`: questions in the terminal, answers with bars."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from .errors import UserError
from .pipeline import Answer

_BAR = 30
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HELP = (
    "Type a question, then one choice per line and an empty line; or all in one line: question | choice | choice.\n"
    "Ctrl-D ends."
)


def bar(share: float, width: int = _BAR) -> str:
    """A bar for a share between 0 and 1, fine to an eighth of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def render(answer: Answer, names: list[str]) -> str:
    """One answer as lines for the terminal."""
    width = max(map(len, answer.choices))
    lines = []
    for name, choice, prob in zip(names, answer.choices, answer.probs, strict=True):
        inside = " " if answer.prediction_set is None or name not in answer.prediction_set else "•"
        lines.append(f"  {inside} {name}) {choice:<{width}}  {bar(prob)} {100 * prob:5.1f} %")
    lines.append("")
    for name, value in (("aleatoric", answer.aleatoric), ("epistemic", answer.epistemic)):
        lines.append(f"    {name:<{width + 3}}  {bar(value)} {value:7.3f}")
    if answer.prediction_set is not None:
        lines.append(f"\n  • in the prediction set: {', '.join(answer.prediction_set) or 'none'}")
    if answer.abstain:
        lines.append("  → abstains: too uncertain for the risk it was calibrated for")
    else:
        lines.append(f"  → {answer.letter}) {answer.answer}")
    return "\n".join(lines)


def ask(pipe: Any, read: Callable[[str], str] = input, out: TextIO | None = None) -> int:
    """
    Questions and answers until the input ends; a bad question is told and the next one asked.

    Args:
        pipe (`UncertaintyPipeline`):
            What answers.
        read (`Callable`, *optional*):
            Reads a line after showing a prompt.
        out (`TextIO`, *optional*):
            Where answers go.

    Returns:
        `int`: How many questions were answered.
    """
    out = out or sys.stdout
    print(_HELP + "\n", file=out)
    answered = 0
    while True:
        try:
            question, choices = _question(read)
        except EOFError:
            print(file=out)
            return answered
        if not question:
            continue
        try:
            answer = pipe(question, choices=choices)
        except UserError as error:
            print(f"  {error}\n", file=out)
            continue
        names = pipe.run.backend.option_names(pipe.run.backend.items([{"question": question, "choices": choices}])[0])
        print(f"\n{render(answer, names)}\n", file=out)
        answered += 1


def _question(read: Callable[[str], str]) -> tuple[str, list[str]]:
    line = read("Question: ").strip()
    if "|" in line:
        question, *choices = (part.strip() for part in line.split("|"))
        return question, choices
    choices = []
    while line:
        choice = read(f"  choice {len(choices) + 1}: ").strip()
        if not choice:
            break
        choices.append(choice)
    return line, choices
