"""
The files of the package that a run enters, in order: those that a newcomer opens to follow it.

    python scripts/walk.py train recipes/quickstart.yaml                 up to the first optimizer step
    python scripts/walk.py ask runs/quickstart "Which is a fruit?" plum hammer   one call of UncertaintyPipeline
    python scripts/walk.py evaluate runs/quickstart --id everyday --limit 8      to the end

A file counts as entered when one of its functions is called; importing it does not count. A re-entry is a function
that is called for the first time in a file that the walk had left before: the reader has to open that file again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType

os.environ["DAPPR_PREDICTION_CACHE"] = "0"


class _Reached(BaseException):
    """Ends the walk; derived from `BaseException`, so that no `except Exception` catches it."""


class Walk:
    """Records calls of functions that are defined below `package`."""

    def __init__(self, package: Path):
        self.package = str(package) + os.sep
        self.files: dict[str, list[str]] = {}
        self.again: list[str] = []
        self._current = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self.package):
            return
        if self._importing(frame):
            return
        file = code.co_filename[len(self.package) :]
        function = getattr(code, "co_qualname", code.co_name)
        seen = self.files.setdefault(file, [])
        if function not in seen:
            if seen and file != self._current:
                self.again.append(f"{file}: {function}")
            seen.append(function)
        self._current = file

    def _importing(self, frame: FrameType | None) -> bool:
        """Whether a call belongs to the body of a module or class, which runs when its module is imported."""
        while frame is not None:
            if frame.f_code.co_filename.startswith(self.package) and not frame.f_code.co_flags & CO_OPTIMIZED:
                return True
            frame = frame.f_back
        return False

    def follow(self, work: Callable[[], object]) -> None:
        sys.setprofile(self)
        try:
            work()
        except _Reached:
            pass
        finally:
            sys.setprofile(None)


def _train(arguments: list[str]) -> Callable[[], object]:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def reached(*_: object) -> None:
        raise _Reached

    register_optimizer_step_post_hook(reached)
    folder = tempfile.mkdtemp()
    return lambda: _main(["train", *arguments, "--set", "train.disable_tqdm=true", "--output-dir", f"{folder}/run"])


def _ask(arguments: list[str]) -> Callable[[], object]:
    from dappr_llm import UncertaintyPipeline

    name, question, *choices = arguments
    return lambda: UncertaintyPipeline.from_pretrained(name)(question, choices=choices or None)


def _main(arguments: list[str]) -> int:
    try:
        from dappr_llm.commands.main import main
    except ImportError:  # before the package had folders
        from dappr_llm.cli import main  # type: ignore[no-redef]

    return main(arguments)


def main() -> None:
    import dappr_llm

    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    verb, *rest = sys.argv[1:]
    walk = Walk(Path(dappr_llm.__file__).parent)
    walk.follow({"train": _train, "ask": _ask}.get(verb, lambda given: lambda: _main([verb, *given]))(rest))
    for number, (file, functions) in enumerate(walk.files.items(), start=1):
        print(f"{number:>3}  {file:<44} {len(functions):>3} functions, first {functions[0]}")
    print(f"{len(walk.files)} files, {len(walk.again)} re-entries")
    for text in walk.again:
        print(f"     again {text}")


if __name__ == "__main__":
    main()
