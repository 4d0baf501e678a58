"""
Writes `report.html`, `report.md`, `report.csv` and `report.tex` from the folders of runs.

Where rows have fixed classes, `classes.csv` and `confusion.csv` stand beside them.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ... import __version__
from ...core.errors import UserError
from ...core.files import write_text
from ...core.terminal import show
from ..baseline_results import baseline_facts
from ..metric_columns import SCORES
from ..runs import load_run
from . import charts
from .cases import case_groups, refusal_groups, refusal_score
from .class_tables import class_tables, classes_csv, confusion_csv, worth_table
from .confusion import confusion_chart
from .markdown import escape_text
from .ood_tables import joined, mixture_table, referee_table, scores_table
from .run_data import RunData
from .tables import Table, report_tables, to_csv, to_latex, to_markdown

if TYPE_CHECKING:
    from markupsafe import Markup

_MOST_IN_MARKDOWN = 200  # classes; the page and classes.csv have all
_FACTS = ("method", "options", "seed", "split", "checkpoint", "versions")


def write_report(
    folders: list[str],
    out: str | None = None,
    id_name: str | None = None,
    title: str = "",
    score: str = "epistemic",
    resamples: int = 1000,
    allow_nan: bool = False,
) -> Path:
    """
    Write the report of one run, or of several side by side.

    Args:
        folders (`list[str]`): Folders that `dappr train` or `dappr evaluate` wrote.
        out (`str`, *optional*): Folder to write to; by default `report` inside the run's folder, or `report` in the
            working directory for several runs.
        id_name (`str`, *optional*): The ID task, if there is no results file that names it.
        title (`str`, *optional*): Heading of the page.
        score (`str`, *optional*, defaults to `"epistemic"`): Which uncertainty ranks items; see [`evaluate_ood`].
        resamples (`int`, *optional*, defaults to 1000): Bootstrap resamples; 0 for no intervals.
        allow_nan (`bool`, *optional*, defaults to `False`): Accept rows with NaN or Inf, as most uncertain.

    Returns:
        `Path`: The HTML file.
    """
    runs = [RunData.of(load_run(folder, id_name, allow_nan), score, resamples) for folder in folders]
    _tell_apart(runs, folders)
    folder = Path(out) if out else (Path(folders[0]) / "report" if len(runs) == 1 else Path("report"))
    headline, more = report_tables(runs)
    headline += [table for table in (_of_runs(make, runs) for make in (referee_table, mixture_table)) if table]
    more += [table for table in [_of_runs(scores_table, runs)] if table]
    headline += [table for table in (_worth(run, len(runs) > 1) for run in runs) if table is not None]
    page = render_page(runs, headline, more, title or " / ".join(run.name for run in runs))
    tables = [*headline, *more]
    said = "".join(f"{escape_text(sentence)}\n\n" for sentence in _sentences(runs))
    classes = class_tables(runs, most=_MOST_IN_MARKDOWN)
    contents = {
        "report.md": said + to_markdown([*tables, *classes]),
        "report.csv": to_csv(runs),
        "report.tex": to_latex(tables),
        "report.html": page,
    }
    if classes:
        contents |= {"classes.csv": classes_csv(runs), "confusion.csv": confusion_csv(runs)}
    for name, text in contents.items():
        write_text(folder / name, text)
    beside = ".md, .csv, .tex" + (", classes.csv, confusion.csv" if classes else "")
    show(f"Report: {folder / 'report.html'} (and {beside} beside it)")
    return folder / "report.html"


def _of_runs(make: Callable[..., Table | None], runs: list[RunData]) -> Table | None:
    """A table of OOD figures with the rows of every run."""
    several = len(runs) > 1
    return joined([make(run.results, run.intervals, run.score, [run.name] if several else ()) for run in runs])


def _worth(run: RunData, several: bool) -> Table | None:
    facts, name = baseline_facts(run.baselines), run.name if several else "this run"
    return worth_table(run.results, run.intervals, facts, name)


def _sentences(runs: list[RunData]) -> list[str]:
    """What has to be said first, with the run's name where there are several."""
    several = len(runs) > 1
    return [f"{run.name}: {sentence}" if several else sentence for run in runs for sentence in run.verdicts]


def render_page(runs: list[RunData], headline: list[Table], more: list[Table], title: str) -> str:
    """The self-contained HTML page, with inline CSS and SVG; the template escapes every text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("dappr_llm.evaluation.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda value: "NaN" if math.isnan(value) else f"{100 * value:.1f} %"
    environment.filters["breakable"] = _breakable
    environment.filters["plain"] = lambda value: "NaN" if math.isnan(value) else f"{value:.3g}"
    style = Markup((Path(__file__).parent / "templates" / "report.css").read_text(encoding="utf-8"))
    together: list[charts.Chart | None] = [charts.risk_coverage(runs)]
    for task in _shared_tasks(runs):
        tested = [run for run in runs if task in run.tables]
        together += [charts.roc(tested, task), charts.mixture(tested, task)]
    compared = [chart for chart in together if chart]
    page = environment.get_template("report.html.j2").render(
        title=title,
        style=style,
        policy=content_policy(style),
        runs=[
            {
                "run": run,
                "facts": _facts(run),
                "charts": _charts(run),
                "cases": case_groups(run),
                "refusals": refusal_groups(run),
                "refused_by": SCORES[refusal_score(run)],
            }
            for run in runs
        ],
        sentences=_sentences(runs),
        headline=headline,
        tables=more,
        classes=class_tables(runs),
        confusion=[confusion_chart(run.classes, run.name) for run in runs if run.classes is not None],
        compared=compared,
        version=__version__,
    )
    return page.lstrip()


def content_policy(style: str) -> str:
    """
    The page's Content-Security-Policy: nothing is loaded, sent or run; only this style sheet counts.

    Texts from data are escaped; should one get through nevertheless, the browser does nothing with it.
    """
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"


def _breakable(text: str) -> Markup:
    """Escaped text that may wrap after an underscore, so that long task names fit a narrow screen."""
    from markupsafe import Markup, escape

    return Markup("_<wbr>").join(escape(part) for part in text.split("_"))


def _charts(run: RunData) -> list[charts.Chart]:
    found = [charts.reliability(run, run.id_name), charts.accuracy_by_quantile(run, run.id_name)]
    found += [charts.histogram(run, evidence=True), charts.histogram(run, evidence=False)]
    found += [charts.reliability(run, task) for task in run.ood_tables]
    return [chart for chart in found if chart]


def _facts(run: RunData) -> list[tuple[str, str]]:
    found = []
    for name in _FACTS:
        value = run.id_table.meta.get(name, run.meta.get(name))
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        if value not in (None, ""):
            found.append((name, str(value)))
    return found


def _shared_tasks(runs: list[RunData]) -> list[str]:
    return list(dict.fromkeys(task for run in runs for task in run.ood_tables))


def _tell_apart(runs: list[RunData], folders: list[str]) -> None:
    """Runs whose folders have the same name are shown by their path; the same folder given twice is an error."""
    paths = [Path(folder).resolve() for folder in folders]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise UserError(f"{folders[i]} is given twice")
    names = [run.name for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if names.count(run.name) > 1:
            run.name = str(folder).rstrip("/")
