import pytest

from dappr_llm.evaluation.reporting.markdown import escape_text, markdown_table


def test_cells_never_leave_their_row():
    text = markdown_table(["a|b", "n"], [["x\ny", "1"], ["**best**\\*", "2"]])
    assert text == "| a\\|b | n |\n| --- | ---: |\n| x y | 1 |\n| **best**\\* | 2 |"
    assert markdown_table(["a", "b", "c"], [], "lcr").splitlines()[1] == "| --- | :---: | ---: |"


def test_words_of_others_lose_their_markup():
    assert markdown_table(["t"], [["<b> `x` [y](z) a_b*"]], escape=escape_text).splitlines()[2] == (
        "| \\<b\\> \\`x\\` \\[y\\](z) a\\_b\\* |"
    )


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match="2 columns has a row of 1"):
        markdown_table(["a", "b"], [["x"]])
