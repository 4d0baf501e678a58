"""Rank 0 prints; others do not."""

from dappr_llm.core.files import is_main_process, say


def test_only_rank_0_prints(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert is_main_process()
    say("alone")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert is_main_process() == (rank == "0")
        say(f"rank {rank}")
    assert capsys.readouterr().out == "alone\nrank 0\n"
