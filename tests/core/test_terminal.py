import ast
import logging

import pytest
from source_imports import PACKAGE

from dappr_llm.commands.ask import render
from dappr_llm.commands.main import main
from dappr_llm.core.files import say
from dappr_llm.core.terminal import PrintableFormatter, printable, show
from dappr_llm.evaluation.reporting.text_tables import render_results
from dappr_llm.inference.pipeline import Answer

TRICKS = {
    "clear": "\x1b[2J", "title": "\x1b]0;owned\x07", "c1": "\x9b2J", "return": "\rfake", "backspace": "\x08\x08",
    "override": "\u202egnp.exe", "isolate": "\u2066x\u2069", "delete": "\x7f", "null": "\x00", "surrogate": "\ud800",
    "separator": "\u2028",
}  # fmt: skip


def clean(text):
    return not any(
        code < 32 and code not in (9, 10) or 127 <= code < 160 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
        or code in (0x2028, 0x2029) or 0xD800 <= code < 0xE000
        for code in map(ord, text)
    )  # fmt: skip


@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS)
def test_control_characters_are_shown_as_escapes(trick, capsys):
    text = printable(f"a{trick}b")
    assert clean(text) and "\\" in text and text.startswith("a") and text.endswith("b")
    show(f"a{trick}b")
    say(f"a{trick}b")
    assert capsys.readouterr().out == f"{text}\n{text}\n"


def test_other_text_is_left_alone():
    text = "naïve λ 日本 🎻 \u05d0\u200f\n\tindented"
    assert printable(text) == text
    assert printable("a\tb\nc", one_line=True) == "a\\tb\\nc"


def test_nothing_prints_past_the_terminal_module():
    """`print` and `sys.stdout.write` elsewhere would let control characters through."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called != "print" and not called.endswith(("stdout.write", "stderr.write")), (
                    f"{path}, line {node.lineno}: use core.terminal.show"
                )


def test_errors_log_messages_and_arguments_are_clean(tmp_path, capsys):
    assert main(["train", f"no{TRICKS['clear']}\ndappr: all is well.yaml"]) == 2
    found = capsys.readouterr().err
    assert clean(found) and "\\x1b[2J" in found and found.count("\ndappr:") == 0
    with pytest.raises(SystemExit):
        main(["ask", "x", f"--no{TRICKS['title']}", "--token=abcdef"])
    found = capsys.readouterr().err
    assert clean(found) and "abcdef" not in found
    record = logging.LogRecord("dappr_llm.x", logging.INFO, "", 0, "row %s of hub_token=abc", (TRICKS["clear"],), None)
    found = PrintableFormatter().format(record)
    assert clean(found) and "abc" not in found


def test_messages_of_our_loggers_are_clean(monkeypatch, capsys):
    from dappr_llm.commands import recipes

    def run(args):
        logging.getLogger("dappr_llm.some.module").warning(f"row {TRICKS['clear']} skipped, hub_token=abcdef")
        return 0

    monkeypatch.setattr(recipes, "run", run)
    assert main(["recipes"]) == 0
    found = capsys.readouterr().err
    assert "skipped" in found and clean(found) and "abcdef" not in found


def test_secrets_are_not_shown(capsys, tmp_path):
    (tmp_path / "r.yaml").write_text("data: {train: everyday}\n")
    assert main(["train", str(tmp_path / "r.yaml"), "--set", "train.hub_token=[abcdef"]) == 2
    assert main(["train", str(tmp_path / "r.yaml"), "--set", "train.hub_token=abcdef"]) == 2
    found = capsys.readouterr()
    assert "abcdef" not in found.out + found.err and "hf auth login" in found.err


def test_answers_and_tables_are_clean(capsys):
    answer = Answer(
        id="x", answer=TRICKS["clear"], letter="A", choices=[TRICKS["clear"], "two\nlines"], probs=[0.9, 0.1],
        aleatoric=0.1, epistemic=0.1, alpha=None, prediction_set=None, abstain=None,
    )  # fmt: skip
    drawn = render(answer, ["A", "B"])
    assert "two\\nlines" in drawn
    show(drawn)
    show(render_results({"id/accuracy": 0.5, f"ood/{TRICKS['title']}/auroc": 0.5}))
    assert clean(capsys.readouterr().out)
