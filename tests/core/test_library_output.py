"""Other libraries' bars and messages."""

import logging
import os
import subprocess
import sys

from tqdm.auto import tqdm
from transformers.utils import logging as library

from dappr_llm.core import library_output
from dappr_llm.core.terminal import show

NOISY = "bitsandbytes.backends.cpu.ops"


def test_one_useless_message_is_dropped_and_others_are_not(caplog):
    library_output.drop_useless_messages()
    with caplog.at_level(logging.WARNING, NOISY):
        logging.getLogger(NOISY).warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "x")
        logging.getLogger(NOISY).warning("something that matters")
    assert [record.getMessage() for record in caplog.records] == ["something that matters"]
    library_output.drop_useless_messages()
    assert len(logging.getLogger(NOISY).filters) == 1


def test_weights_load_without_bars_in_files(model_folder, capfd):
    from dappr_llm.text.lm import load_lm

    load_lm(str(model_folder))
    assert capfd.readouterr().err == ""
    assert library.is_progress_bar_enabled()  # others' loads are left alone


def test_weights_load_with_a_bar_in_terminals(model_folder, capfd, monkeypatch):
    from dappr_llm.text.lm import load_lm

    monkeypatch.setattr(library_output, "in_terminal", lambda: True)
    load_lm(str(model_folder))
    assert "Loading weights" in capfd.readouterr().err


def test_bars_that_were_switched_off_stay_off(model_folder):
    from dappr_llm.text.lm import load_lm

    library.disable_progress_bar()
    try:
        load_lm(str(model_folder))
        assert not library.is_progress_bar_enabled()
    finally:
        library.enable_progress_bar()


def test_a_verb_in_a_file_has_no_bars_of_any_library():
    code = (
        "from dappr_llm.commands.main import main\nmain(['recipes'])\n"
        "from datasets.utils import tqdm as one\nfrom tqdm.auto import tqdm as two\n"
        "list(one(range(9))); list(two(range(9)))"
    )
    env = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stderr == ""


def test_text_is_shown_above_a_bar(capsys):
    with tqdm(total=3, file=sys.stderr) as bar:
        bar.update(1)
        capsys.readouterr()
        show("a line", sys.stderr)
        found = capsys.readouterr().err
    before, _, after = found.partition("a line\n")
    assert before.endswith("\r") and "1/3" in after
