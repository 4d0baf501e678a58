"""
The `dappr` command: builds the parser from one module per verb, runs the verb, maps errors to exit codes.

A verb's module holds `EPILOG`, `add_arguments(parser)` and `run(args) -> exit code`; it is imported when its verb is
used, and imports what is slow inside the functions that need it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

from .. import __version__
from ..core.errors import UserError
from ..core.library_output import hide_bars_in_files

# In the order in which `dappr --help` lists them.
VERBS = {
    "init": "Look at a file of your own (CSV, JSONL, Parquet) and write the recipe that trains on it.",
    "train": "Train a recipe, test it in and out of distribution, write tables and pictures.",
    "predict": "Predict a task or a file of questions with a trained checkpoint.",
    "evaluate": "Accuracy, NLL, ECE, and OOD AUROC, from a checkpoint or from saved tables.",
    "report": "One self-contained HTML page, and Markdown, CSV and LaTeX tables, from saved tables.",
    "audit": "Ask every question with its options rotated: does the answer follow words or letters?",
    "ask": "Ask in the terminal and see probabilities, uncertainties and the decision.",
    "calibrate": "Fit temperature, prediction sets and abstention on held-out rows (decision.json).",
    "gate": "Fit a density of hidden states that says how familiar a question is (gate.json).",
    "push": "Upload adapter, decision rule, results and a model card to the Hub, in one commit.",
    "plan": "What a recipe will take: parameters, memory per GPU, steps, tokens, coefficients.",
    "combine": "Make an ensemble of finished runs or of saved tables; needs no model.",
    "sweep": "Train methods x seeds on one task and make one table of their results.",
    "recipes": "List the recipes that ship with the package.",
    "config-schema": "Print the JSON schema of a recipe or of another file, for editors.",
}


class _Parser(argparse.ArgumentParser):
    """Whose errors, which repeat what was given, show neither control characters nor secrets."""

    def error(self, message: str) -> NoReturn:
        from ..core.secrets import mask
        from ..core.terminal import printable

        super().error(printable(mask(message), one_line=True))


def build_parser(verb: str | None = None) -> argparse.ArgumentParser:
    """
    The parser of the command line; `args.run` of what it parses is the verb's `run`.

    Args:
        verb (`str`, *optional*):
            The only verb whose arguments are needed; the others are known by name. By default all of them.
    """
    parser = _Parser(
        prog="dappr",
        description="Fine-tune uncertainty-aware adapters: train, evaluate, compare, calibrate, ask, publish.",
        epilog="examples:\n  dappr train recipes/quickstart.yaml\n  dappr evaluate runs/quickstart --id everyday "
        "--ood everyday_arithmetic\n\n`dappr VERB --help` shows more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dappr-llm {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, help in VERBS.items():
        if verb not in (None, name):
            verbs.add_parser(name, help=help)
            continue
        module: Any = import_module(f".{name.replace('-', '_')}", __package__)
        kind = argparse.RawDescriptionHelpFormatter
        own = verbs.add_parser(name, help=help, description=help, epilog=module.EPILOG, formatter_class=kind)
        module.add_arguments(own)
        own.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one verb; a mistake of the user's is one sentence and exit code 2."""
    given = sys.argv[1:] if argv is None else argv
    args = build_parser(next((word for word in given if word in VERBS), "")).parse_args(given)
    # Fewer lines of noise from the tokenizers library after a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    hide_bars_in_files()
    try:
        with _messages():
            return args.run(args)
    except UserError as error:
        _complain(error)
        return 2
    except BrokenPipeError:  # `dappr recipes | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder without rights, a name that is too long
        _complain(f"{error.strerror or error}: {str(error.filename)[:200]}" if error.filename else error)
        return 2
    except KeyboardInterrupt:
        _complain("interrupted", start="\n")
        return 130


def _complain(problem: object, start: str = "") -> None:
    """A message on stderr; further lines, which may quote others, are indented, so that they do not pass for ours."""
    from ..core.terminal import show

    show(f"{start}dappr: " + str(problem).replace("\n", "\n  "), sys.stderr)


@contextmanager
def _messages() -> Iterator[None]:
    """Our own log messages (where logits start, what was truncated) on stderr, on rank 0 only."""
    from ..core.terminal import MessageHandler, PrintableFormatter

    logger = logging.getLogger("dappr_llm")
    handler = MessageHandler()
    handler.setFormatter(PrintableFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
