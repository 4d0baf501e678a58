"""`dappr ask` in the terminal."""

import io

import pytest

from dappr_llm import UncertaintyPipeline
from dappr_llm.commands.ask import ask, bar


@pytest.fixture(scope="module")
def pipe(trained):
    return UncertaintyPipeline.from_pretrained(trained / "run", batch_size=2)


def test_ask_in_the_terminal(pipe):
    lines = iter(
        ["Which one is a fruit ? | hammer | plum", "", "Which ?", "saw", "saw", "", "Which ?", "fig", "sky", ""]
    )

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    out = io.StringIO()
    assert ask(pipe, read, out) == 2
    text = out.getvalue()
    assert "plum" in text and "%" in text and "█" in text and "aleatoric" in text and "epistemic" in text
    assert "are the same" in text and "→" in text


def test_bars():
    assert bar(0, 4) == "    " and bar(1, 4) == "████" and bar(0.5, 4) == "██  " and bar(2, 4) == "████"
    assert bar(1 / 32, 4) == "▏   " and all(len(bar(x / 50)) == 30 for x in range(51))
