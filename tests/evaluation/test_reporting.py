"""The report from tables alone: right numbers, escaped words, no model, no network."""

import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from random_tables import make_table

from dappr_llm.commands.main import main
from dappr_llm.core.errors import UserError
from dappr_llm.evaluation.bootstrap import wilson
from dappr_llm.evaluation.evaluators import evaluate_tables
from dappr_llm.evaluation.item_texts import ItemText, item_texts_path, load_item_texts, save_item_texts
from dappr_llm.evaluation.ood_baselines import trivial_sides
from dappr_llm.evaluation.prediction_table import PredictionTable
from dappr_llm.evaluation.reporting import write_report
from dappr_llm.evaluation.reporting.cases import case_groups, refusal_groups
from dappr_llm.evaluation.reporting.charts import accuracy_by_quantile, reliability
from dappr_llm.evaluation.reporting.run_data import RunData
from dappr_llm.evaluation.reporting.svg import Plot, log_ticks, ticks
from dappr_llm.evaluation.reporting.tables import Cell, Table, interval_text, number, to_latex, to_markdown
from dappr_llm.evaluation.results import save_results
from dappr_llm.evaluation.runs import load_run

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = '<script>alert("x")</script> & {{ 7 * 7 }} <img src=x onerror=alert(1)>'


def write_run(folder, seed=0, texts=True, task="obqa", alpha=True):
    """A run's folder as `dappr train` leaves it, without any model."""
    tables = {
        task: make_table(120, seed=seed, task=task, alpha=alpha),
        "arc_c": make_table(90, seed=seed + 50, task="arc_c", sharp=1.0, options=4, alpha=alpha),
    }
    for name, table in tables.items():
        path = folder / "predictions" / f"{name}-test.npz"
        table.save(path)
        if texts:
            rows = [{"id": i, "question": f"Question {i}? {HOSTILE}", "options": [HOSTILE, "b", "c", "d"]} for i in table.ids]  # fmt: skip
            save_item_texts(rows, path)
    meta = {"id": task, "ood": ["arc_c"], "split": "test", "method": "dappr"}
    save_results(evaluate_tables(tables[task], {"arc_c": tables["arc_c"]}), meta, folder / "results.json")
    return folder


class Page(HTMLParser):
    """Counts what a browser would see."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.problems, self.open, self.words = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture
def run_folder(tmp_path):
    return write_run(tmp_path / "run")


def test_one_page_with_everything_escaped(run_folder):
    path = write_report([str(run_folder)], resamples=50, title=f"Title {HOSTILE}")
    assert path == run_folder / "report" / "report.html"
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    page = Page(text)
    assert not page.problems and not page.open
    names = [tag for tag, _ in page.tags]
    assert "script" not in names and "img" not in names and "link" not in names
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]
    # Self-contained: nothing is fetched.
    assert not re.search(r"(?:src|href)=[\"'](?!#)|url\(|@import|https?://", text)
    assert any('<script>alert("x")' in words for words in page.words) and "{{ 7 * 7 }}" in "".join(page.words)
    for words in ("Reliability, obqa", "Total evidence", "ROC, arc_c", "Risk and coverage", "most confidently wrong"):
        assert words in text.replace("_<wbr>", "_")
    # Accessible tables and figures.
    assert names.count("caption") == names.count("table") > 4
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in page.tags if tag == "th")
    drawn = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("aria-hidden") != "true"]
    assert drawn and all(attrs.get("role") == "img" and attrs.get("aria-label") for attrs in drawn)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_the_browser_is_told_to_load_send_and_run_nothing(run_folder):
    text = write_report([str(run_folder)], resamples=20, title=HOSTILE).read_text()
    page = Page(text)
    (policy,) = (
        a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:" and "unsafe" not in policy
    assert {"script-src", "connect-src"}.isdisjoint(rules) and rules["base-uri"] == rules["form-action"] == "'none'"
    # Before anything that it governs; the one style sheet is named by its hash, and no element has styles of its own.
    assert text.index("Content-Security-Policy") < text.index("<title") < text.index("<style")
    (style,) = re.findall(r"<style>(.*?)</style>", text, flags=re.S)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert rules["style-src"] == f"'sha256-{digest}'"
    assert not [tag for tag, attrs in page.tags if "style" in attrs]
    assert 'class="bar"' in text and re.search(r'<rect width="[\d.]+%"', text)


def test_numbers_are_those_of_the_evaluators(run_folder):
    write_report([str(run_folder)], resamples=50)
    run = load_run(run_folder)
    trivial = trivial_sides(run.id_table, run.ood_tables, run.item_texts, run.id_name)
    expected = evaluate_tables(run.id_table, run.ood_tables, trivial=trivial)
    rows = list(csv.DictReader(io.StringIO((run_folder / "report" / "report.csv").read_text())))
    assert {row["key"]: float(row["value"]) for row in rows} == pytest.approx(expected, nan_ok=True)
    auroc = next(row for row in rows if row["key"] == "ood/arc_c/auroc")
    assert float(auroc["low"]) < float(auroc["value"]) < float(auroc["high"])
    shown = f"{100 * expected['id/accuracy']:.2f}"
    for ending in ("html", "md", "tex"):
        assert shown in (run_folder / "report" / f"report.{ending}").read_text()
    markdown = (run_folder / "report" / "report.md").read_text()
    assert f"{100 * expected['ood/arc_c/auroc_published']:.2f} (" in markdown
    for block in markdown.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1


def test_readings_that_coincide_are_reported_once(run_folder):
    path = run_folder / "predictions" / "arc_c-test.npz"
    table = PredictionTable.load(path)
    table.meta["task_num_choices"] = PredictionTable.load(run_folder / "predictions" / "obqa-test.npz").meta[
        "num_choices"
    ]
    table.save(path)
    write_report([str(run_folder)], resamples=20)
    for ending in ("html", "md"):
        text = (run_folder / "report" / f"report.{ending}").read_text().lower()
        assert "published" not in text and "matched" not in text and "auroc" in text


def test_runs_side_by_side_with_paired_differences(tmp_path, run_folder, capsys):
    other = write_run(tmp_path / "other", seed=0, texts=False)
    stranger = write_run(tmp_path / "stranger", seed=3, texts=False, task="obqa")
    table = PredictionTable.load(stranger / "predictions" / "obqa-test.npz")
    table.ids[0] = "alien"
    table.save(stranger / "predictions" / "obqa-test.npz")
    out = tmp_path / "out"
    command = ["report", str(run_folder), str(other), str(stranger), "--out", str(out), "--resamples", "50"]
    assert main(command) == 0
    assert "report.html" in capsys.readouterr().out
    text = (out / "report.html").read_text()
    assert "other minus run, same items" in text and "stranger minus run" in text
    assert "Not compared" in text and "alien" in text
    # The same tables: no difference, surely.
    assert re.search(
        r"accuracy</th>\s*<td class=\"num\">0\.00<span class=\"ci\">0\.0–0\.0</span></td><td class=\"num\">1\.000",
        text,
    )
    assert text.count('id="run-') == 3


def test_works_without_texts_results_alpha_or_labels(tmp_path):
    folder = write_run(tmp_path / "bare", texts=False, alpha=False)
    (folder / "results.json").unlink()
    with pytest.raises(UserError, match="does not say which task is in distribution: pass --id, one of arc_c, obqa"):
        write_report([str(folder)])
    with pytest.raises(UserError, match="no table of the task 'obq'; did you mean 'obqa'"):
        write_report([str(folder)], id_name="obq")
    table = PredictionTable.load(folder / "predictions" / "arc_c-test.npz")
    table.labels[:] = -1
    table.save(folder / "predictions" / "arc_c-test.npz")
    text = write_report([str(folder)], id_name="obqa", resamples=0).read_text()
    assert "Item obqa-" in text and "Total evidence" not in text and "Reliability, arc_c" not in text


def test_bad_folders_are_user_errors(tmp_path, run_folder, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "holds no prediction tables" in capsys.readouterr().err
    assert main(["report", str(run_folder), str(run_folder)]) == 2
    assert "given twice" in capsys.readouterr().err
    (run_folder / "predictions" / "arc_c-test.npz").write_bytes(b"broken")
    assert main(["report", str(run_folder)]) == 2
    assert "arc_c-test.npz is not a readable prediction table" in capsys.readouterr().err
    assert not (run_folder / "report").exists()


def test_broken_rows_are_refused_unless_allowed_and_then_come_first(run_folder, capsys):
    path = run_folder / "predictions" / "obqa-test.npz"
    table = PredictionTable.load(path)
    table.alpha[7], table.probs[7], table.epistemic[7], table.aleatoric[7] = np.nan, np.nan, np.nan, np.nan
    table.allow_nan = True
    table.save(path)
    assert main(["report", str(run_folder)]) == 2
    error = capsys.readouterr().err
    assert "obqa-test.npz" in error and "1 of 120 rows hold NaN or Inf (first: obqa-7)" in error
    assert main(["report", str(run_folder), "--allow-nan", "--resamples", "20"]) == 0
    text = (run_folder / "report" / "report.html").read_text()
    assert "the row holds NaN or Inf" in text
    first = case_groups(RunData.of(load_run(run_folder, allow_nan=True)))[0].cases[0]
    assert first.id == "obqa-7" and first.broken and not any(option.chosen for option in first.options)


def test_cases_are_the_most_uncertain_and_the_surest_mistakes():
    probs = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.5, 0.5]])
    table = PredictionTable.from_arrays(list("abcd"), [1, 1, 1, 0], probs, meta={"num_choices": 2})
    run = RunData("r", "t", {"t": table}, {"t": {"a": ItemText("why?", ("x", "y"))}})
    uncertain, wrong = case_groups(run, count=2)
    assert [case.id for case in uncertain.cases] == ["d", "c"]
    assert [case.id for case in wrong.cases] == ["a", "c"]
    case = wrong.cases[0]
    assert (case.question, [o.text for o in case.options]) == ("why?", ["x", "y"])
    assert [(o.right, o.chosen) for o in case.options] == [(False, True), (True, False)]
    assert wrong.cases[1].question is None


def test_reliability_bins_show_counts_and_intervals():
    probs = np.array([[0.95, 0.05]] * 10 + [[0.65, 0.35]] * 5)
    table = PredictionTable.from_arrays(np.arange(15).astype(str), [0] * 9 + [1] + [0] * 2 + [1] * 3, probs, meta={"num_choices": 2})  # fmt: skip
    chart = reliability(RunData("r", "t", {"t": table}), "t")
    assert [(names[0], cells[0].text, cells[2].text) for names, cells in chart.table.rows] == [
        ("60–67 %", "5", "40.00"),
        ("93–100 %", "10", "90.00"),
    ]
    low, high = wilson(9, 10)
    assert chart.table.rows[1][1][2].interval == f"{100 * low:.1f}–{100 * high:.1f}"
    assert chart.svg.count("<svg") == 2 and ">10</text>" in chart.svg
    assert accuracy_by_quantile(RunData("r", "t", {"t": table}), "t").table.rows[0][1][0].text == "2"


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (0, 12), (12, 12), (3, 10)])
def test_wilson_interval(right, count):
    from scipy.stats import binomtest

    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert wilson(right, count) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert wilson(float(right), float(count))[0] <= right / count <= wilson(right, count)[1]


def test_ticks_are_round():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0, 0.021) == pytest.approx([0, 0.005, 0.01, 0.015, 0.02])
    assert ticks(3, 3) == [3]
    assert log_ticks(3, 80) == [5, 10, 20, 50]
    assert log_ticks(1, 1e6) == [10.0**e for e in range(7)]


def test_a_plot_of_many_points_stays_small_and_inside():
    plot = Plot((0, 1), (0, 1), "<x>", "y")
    plot.line(((i / 1e5, 2.0) for i in range(100_000)), "line")
    drawn = plot.render('say "hi"')
    assert len(drawn) < 10_000 and "&lt;x&gt;" in drawn and "say &quot;hi&quot;" in drawn
    ys = {pair.split(",")[1] for pair in re.search(r'polyline class="line" points="([^"]+)"', drawn)[1].split()}
    assert ys == {"10.0"}


def test_texts_are_escaped_in_markdown_and_latex():
    table = Table("a|b", ["run"], ["x_y"], [(["50% & <b> $#{}~^\\"], [Cell("1", "0–2")])])
    markdown, latex = to_markdown([table]), to_latex([table])
    assert "a\\|b" in markdown and "\\<b\\>" in markdown and "1 (0–2)" in markdown
    assert r"50\% \& <b> \$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{} & 1 [0--2] \\" in latex
    assert number(float("nan"), "percent") == "–" and number(-0.00001, "percent") == "0.00"
    assert interval_text((-0.02, -0.01), "percent") == "-2.0 to -1.0"


def test_item_texts_round_trip_and_name_the_bad_line(tmp_path):
    path = tmp_path / "t.npz"
    assert load_item_texts(path) == {}
    save_item_texts([{"id": "a", "question": "wie?\nso", "options": ["ä", "b"]}], path)
    assert load_item_texts(path) == {"a": ItemText("wie?\nso", ("ä", "b"))}
    item_texts_path(path).write_text('{"id": "a", "question": "q", "options": []}\n{"id": 3}\n')
    with pytest.raises(UserError, match=r"t\.items\.jsonl, line 2"):
        load_item_texts(path)


def test_report_and_evaluate_with_torch_blocked(run_folder, tmp_path):
    """Deleting the model, and torch with it, changes nothing."""
    tables = [str(run_folder / "predictions" / f"{name}-test.npz") for name in ("obqa", "arc_c")]
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'peft', 'datasets', 'accelerate'):\n"
        "            raise ImportError(name + ' is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
        "from dappr_llm.commands.main import main\n"
        f"assert main(['evaluate', '--id', {tables[0]!r}, '--ood', {tables[1]!r}, '--out', 'figures', '--resamples', '20']) == 0\n"
        f"assert main(['report', {str(run_folder)!r}, '--out', 'page', '--resamples', '20']) == 0\n"
        "assert main(['report', 'figures', '--resamples', '20']) == 0\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page" / "report.html").is_file() and (
        tmp_path / "figures" / "report" / "report.html"
    ).is_file()


def test_what_it_refuses_is_ranked_by_density_where_there_is_one(tmp_path):
    run = RunData.of(load_run(write_run(tmp_path / "run")), resamples=0)
    ranked = run.id_table.reading(4).epistemic
    first, second = refusal_groups(run, count=3)
    assert [case.id for case in first.cases] == run.id_table.ids[np.argsort(-ranked, kind="stable")[:3]].tolist()
    other = run.tables["arc_c"].reading(4).epistemic
    assert [case.id for case in second.cases] == run.tables["arc_c"].ids[np.argsort(other, kind="stable")[:3]].tolist()
    refused = 100 * (1 - evaluate_tables(run.id_table, run.ood_tables)["ood/arc_c/fpr95"])
    assert second.title == f"arc_c: most familiar; {refused:.0f} % are refused" and first.title.startswith(
        "obqa: in dist"
    )
    assert second.cases[0].question.startswith("Question") and second.cases[0].familiarity is None

    for table in run.tables.values():
        table.density = np.arange(len(table), dtype=np.float32)
        table.familiarity = np.full(len(table), 0.25, dtype=np.float32)
    first, second = refusal_groups(run, count=2)
    assert [case.id for case in first.cases] == run.id_table.ids[:2].tolist()
    assert [case.id for case in second.cases] == run.tables["arc_c"].ids[:-3:-1].tolist()
    assert first.cases[0].familiarity == 0.25
    run.tables = {"obqa": run.id_table}
    assert refusal_groups(run) == []


def test_the_page_and_the_tables_say_what_length_and_words_alone_do(run_folder):
    write_report([str(run_folder)], resamples=20)
    page = (run_folder / "report" / "report.html").read_text()
    assert "What it refuses" in page and "Every score" in page and "Risk and coverage, with arc_c" in page
    markdown = (run_folder / "report" / "report.md").read_text()
    assert "TF-IDF neighbour" in markdown and "ID and OOD questions asked together" in markdown
