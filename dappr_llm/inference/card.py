"""
The model card, `README.md`: a short one whenever a model is saved, the full one when it is uploaded to the Hub.

Text and metadata come only from the files of a checkpoint folder; no metric is computed here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import checkpoint
from ..core.errors import UserError
from ..core.files import read_json, write_text
from ..core.local_names import portable, portable_values
from ..core.secrets import mask
from ..decisions import rule as calibration
from ..decisions.rule import Decision
from ..evaluation.metric_columns import MATCHED, Metric, find
from ..evaluation.reporting.markdown import markdown_table
from ..evaluation.reporting.text_tables import render_markdown
from ..evaluation.results import Intervals, ResultsFile
from ..evaluation.runs import load_run
from .card_parts import facts, intro, shown_prompt, snippet, task_name
from .modality import known_tasks, public_base

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
PAPER = "https://arxiv.org/abs/2605.00600"
TAGS = ("dappr_llm", "uncertainty", "calibration")
_TASK_TYPES = {"text": "multiple-choice", "vision": "image-classification"}
_PICTURES = {
    "reliability.png": "reliability diagram",
    "alpha0.png": "total evidence in and out of distribution",
    "confusion.png": "confusion matrix",
}
_LOG_LINES = 12


def hub_id(name: str | None) -> str | None:
    """Hub id of a base model; `None` for a local path, which others cannot use."""
    name = public_base(name)
    return name if name and re.fullmatch(checkpoint.HUB_ID, name) and not Path(name).exists() else None


def read_log(folder: Path) -> list[dict[str, Any]]:
    """`log_history` of a run, from `trainer_state.json` in its folder or its last checkpoint; empty if none."""
    last = checkpoint.last_checkpoint(folder)
    for place in (folder, Path(last) if last else folder):
        if (place / "trainer_state.json").is_file():
            return read_json(place / "trainer_state.json", 2**28, allow_nan=True).get("log_history", [])
    return []


@dataclass(frozen=True)
class _Source:
    """Content of a checkpoint folder that goes into a card; for the short card only `config`, the sidecar."""

    config: Mapping[str, Any]
    recipe: dict[str, Any] = field(default_factory=dict)
    content: ResultsFile = field(default_factory=lambda: ResultsFile({}, {}))
    rule: Decision | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    pictures: tuple[tuple[str, str], ...] = ()

    @property
    def base(self) -> str | None:
        """Hub id of the base model, if it has one."""
        return hub_id(self.config.get("base_model"))

    @property
    def is_text(self) -> bool:
        """Whether the model is an adapter for multiple choice; otherwise it is an image classifier."""
        return self.config["modality"] == "text"


def save_card(folder: str | Path, config: Mapping[str, Any]) -> None:
    """
    Write the short card of a model that is being saved, instead of PEFT's unfilled template.

    Args:
        folder (`str` or `Path`):
            The checkpoint. A results file in it would belong to an older model, so no results are shown.
        config (`Mapping`):
            The content of its sidecar.
    """
    write_text(Path(folder) / "README.md", _render(_Source(config), None, None))


def render_card(folder: str | Path, repo_id: str, license: str | None = None) -> str:
    """
    The text of a published checkpoint's `README.md`.

    Args:
        folder (`str` or `Path`):
            The checkpoint.
        repo_id (`str`):
            The repository that the code snippet loads from.
        license (`str`, *optional*):
            A license id of the Hub.
    """
    folder = Path(folder)
    source = _Source(
        config=checkpoint.load_sidecar(folder)[1],
        recipe=raw_recipe(folder),
        content=load_run(folder, require="nothing").content,
        rule=Decision.load(folder) if (folder / calibration.FILE).is_file() else None,
        log=read_log(folder),
        pictures=tuple((name, text) for name, text in _PICTURES.items() if (folder / name).is_file()),
    )
    return _render(source, repo_id, license)


def _render(source: _Source, repo_id: str | None, license: str | None) -> str:
    """Render the template; without a repository id, in its short form."""
    from huggingface_hub import ModelCard

    config, content = source.config, source.content
    title = "Uncertainty-aware " + ("adapter" if source.is_text else "image classifier")
    card = ModelCard.from_template(
        card_data=_metadata(source, repo_id, license),
        template_path=str(TEMPLATE),
        short=repo_id is None,
        title=repo_id.split("/")[-1] if repo_id else title,
        intro=intro(config, source.base),
        paper=PAPER,
        snippet=snippet(config, source.base, repo_id or "this folder or repository", source.rule),
        facts=markdown_table(["", ""], facts(source.config, source.base, source.recipe, source.content.meta), "ll"),
        prompt=shown_prompt(config) if repo_id else "",
        decision=render_decision(source.rule) if source.rule else "",
        results=_results(content),
        intervals=_interval_table(portable_values(content.results), portable_values(content.intervals)),
        command=mask(portable(content.meta.get("command") or "")),
        pictures=source.pictures,
        log=_log_table(source.log),
        num_choices=config["num_choices"],
        is_text=source.is_text,
        labels=bool(config.get("labels")),
        sidecar=checkpoint.SIDECAR,
        versions=", ".join(f"{name} {version}" for name, version in config.get("versions", {}).items()),
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).strip() + "\n"


def _results(content: ResultsFile) -> str:
    """Metrics, baselines and classes as Markdown; empty without results."""
    if not content.results:
        return ""
    classes = content.classes
    if classes is not None:
        classes = replace(classes, names=[portable(name) for name in classes.names])
    results, intervals = portable_values(content.results), portable_values(content.intervals)
    return render_markdown(results, intervals, classes, content.meta).strip()


def _metadata(source: _Source, repo_id: str | None, license: str | None) -> ModelCardData:
    from huggingface_hub import ModelCardData

    config = source.config
    used = dataset_ids([str(task_name(source.recipe))]) if source.recipe else {}
    return ModelCardData(
        base_model=source.base,
        library_name="peft" if source.is_text else "transformers",
        license=license,
        datasets=sorted({path for path, _ in used.values()}) or None,
        pipeline_tag=_task_type(config),
        tags=[*TAGS, config["method"]["name"], *(["lora"] if source.is_text else [])],
        model_name=repo_id.split("/")[-1] if repo_id else None,
        eval_results=eval_results(_task_type(config), source.content) or None,
    )


def _task_type(config: Mapping[str, Any]) -> str:
    """What the Hub calls it."""
    modality = config["modality"]
    return (
        "text-classification" if modality == "text" and config.get("labels") else _TASK_TYPES.get(modality, modality)
    )


def _hub_metric(key: str) -> Metric | None:
    """The metric behind a result key if model cards list it: it has a name on the Hub, in the matched reading."""
    place, _, name = key.rpartition("/")
    found = find(key)
    if not key.startswith(("id/", "ood/")):  # of a baseline
        return None
    if found is None or found[0].hub is None or found[1] != MATCHED or place.endswith("/options"):
        return None
    # For OOD tasks only accuracy and detection: more would bury the metrics of the ID task.
    return found[0] if place == "id" or found[0].detection or name == "accuracy" else None


def eval_results(task_type: str, content: ResultsFile) -> list[EvalResult]:
    """The metrics of a results file, unrounded, as `model-index` entries of the Hub."""
    from huggingface_hub import EvalResult

    meta = content.meta
    known = dataset_ids([meta.get("id"), *(meta.get("ood") or [])])
    found = []
    for key, value in content.results.items():
        metric = _hub_metric(key)
        if metric is None or not math.isfinite(value):
            continue
        is_id = key.startswith("id/")
        task = str(meta.get("id")) if is_id else key.partition("/")[2].rpartition("/")[0]
        path, settings = known.get(task, (portable(task), None))
        task = portable(task)
        interval = _interval(content.intervals, key, ".4g")
        found.append(
            EvalResult(
                task_type=task_type,
                dataset_type=path,
                dataset_name=task if is_id else f"{task} (out of distribution)",
                dataset_config=settings,
                dataset_split=meta.get("split") or "test",
                metric_type=metric.hub,
                metric_name=metric.description + (f" ({interval})" if interval else ""),
                metric_value=value,
            )
        )
    return found


def _interval(intervals: Intervals, key: str, digits: str) -> str:
    low, high = intervals.get(key, (math.nan, math.nan))
    return f"95 % interval {low:{digits}} to {high:{digits}}" if math.isfinite(low) and math.isfinite(high) else ""


def eval_files(folder: str | Path, repo_url: str) -> dict[str, str]:
    """Content of `.eval_results/*.yaml`: one file with the accuracy on each task that is a dataset of the Hub."""
    import yaml
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    run = load_run(folder, require="nothing")
    results, meta = run.results, run.meta
    files = {}
    for task, (dataset, settings) in dataset_ids([meta.get("id"), *(meta.get("ood") or [])]).items():
        key = "id/accuracy" if task == meta.get("id") else f"ood/{task}/accuracy"
        if not math.isfinite(results.get(key, math.nan)):
            continue
        notes = f"accuracy, {meta.get('split') or 'test'} split, {results.get(key.replace('accuracy', 'n'))} items"
        interval = _interval(run.intervals, key, ".4f")
        notes += f", {interval}" if interval else ""
        notes += "" if task == meta.get("id") else f", out of distribution: trained on {meta.get('id')}"
        entry = EvalResultEntry(
            dataset_id=dataset, task_id=settings or "default", value=results[key], source_url=repo_url,
            source_name="Model card", notes=notes,
        )  # fmt: skip
        text = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True)
        files[f".eval_results/{re.sub(r'[^A-Za-z0-9_.-]', '_', task)}.yaml"] = text
    return files


def dataset_ids(names: Iterable[object]) -> dict[str, tuple[str, str | None]]:
    """Hub id and configuration of those built-in tasks among `names` that are datasets of the Hub."""
    return {name: (task.path, task.config) for name, task in known_tasks(names).items() if task.path}


def raw_recipe(folder: Path) -> dict[str, Any]:
    """The values of a checkpoint's `recipe.yaml` as they stand there; empty without one."""
    import yaml

    path = folder / checkpoint.RECIPE
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or not isinstance(content.get("data", {}), dict):
        raise UserError(f"{path} is damaged: it must be a mapping of sections, and its data section too")
    return content


def render_decision(rule: Decision) -> str:
    """A decision rule as Markdown text."""
    source, sets, abstention, fit = rule.calibration_set, rule.conformal, rule.abstention, rule.fit
    lines = [
        f"Fitted on {source['n']} held-out questions ({portable(str(source['task']))}, {source['split']} split); "
        f"stored in `{calibration.FILE}` and applied by the pipeline.",
        "",
        f"- **Probabilities** are scaled with temperature {rule.temperature:.3g}: NLL {fit['nll_before']:.3f} → "
        f"{fit['nll_after']:.3f}, ECE {100 * fit['ece_before']:.2f} → {100 * fit['ece_after']:.2f} %.",
        f"- **Prediction sets** ({sets['score'].upper()}) hold the right answer in {100 * (1 - sets['alpha']):g} % of "
        "the cases or more.",
    ]
    if abstention["threshold"] is None:
        lines.append("- **Abstention**: no threshold keeps the promised risk, so the rule always abstains.")
    else:
        bound = f"{100 * abstention['risk_bound']:.2f} % at most with {100 * abstention['confidence']:g} % confidence"
        lines.append(
            f"- **Abstention** above {abstention['threshold']:.4g} of the {abstention['score']} uncertainty: "
            f"{100 * abstention['coverage']:.1f} % of the questions are answered, {100 * abstention['risk']:.2f} % of "
            f"these wrongly ({bound})."
        )
    return "\n".join(lines)


def _interval_table(results: dict[str, Any], intervals: Intervals) -> str:
    rows = [
        [key, *(f"{value:.4g}" for value in (results[key], *ends))]
        for key, ends in intervals.items()
        if key in results and all(map(math.isfinite, (results[key], *ends)))
    ]
    return markdown_table(["metric", "value", "low", "high"], rows) if rows else ""


def _log_table(log: list[dict[str, Any]]) -> str:
    """At most 12 evenly spaced steps of the training log, with the evaluation metrics of the same step merged in."""
    steps: dict[int, dict[str, Any]] = {}
    for entry in log:
        steps.setdefault(entry.get("step", 0), {}).update(entry)
    columns = [c for c in ("epoch", "loss", "accuracy", "alpha0", "eval_loss", "eval_nll", "eval_accuracy", "eval_ece")
               if any(c in entry for entry in steps.values())]  # fmt: skip
    if not columns or "loss" not in columns:
        return ""
    chosen = sorted(step for step, entry in steps.items() if "loss" in entry or "eval_loss" in entry)
    if len(chosen) > _LOG_LINES:
        chosen = [chosen[round(i * (len(chosen) - 1) / (_LOG_LINES - 1))] for i in range(_LOG_LINES)]
    cells = [[str(step), *(_number(steps[step].get(column)) for column in columns)] for step in chosen]
    return markdown_table(["step", *columns], cells, "r" * (len(columns) + 1))


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""
