"""
The model card: text and metadata, from the files of a checkpoint folder alone. No metric is computed here.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from ..core import checkpoint
from ..core.errors import UserError
from ..decisions import rule as calibration
from ..decisions.rule import Decision
from ..evaluation.reporting import figures as report

TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"
PAPER = "https://arxiv.org/abs/2605.00600"
TAGS = ("dappr_llm", "uncertainty", "calibration")
_TASK_TYPES = {"text": "multiple-choice", "vision": "image-classification"}
_PICTURES = {"reliability.png": "reliability diagram", "alpha0.png": "total evidence in and out of distribution"}
# (key, the Hub's name of the metric, how the card calls it)
_ID_METRICS = (
    ("accuracy", "accuracy", "Accuracy"),
    ("nll", "nll", "Negative log-likelihood"),
    ("ece", "expected_calibration_error", "Expected calibration error, 15 bins"),
    ("brier", "brier_score", "Brier score"),
    ("conf_aupr", "average_precision", "AUPR of right against wrong answers by aleatoric uncertainty"),
)
_OOD_METRICS = (
    ("auroc", "roc_auc", "AUROC of in- against out-of-distribution items by epistemic uncertainty"),
    ("aupr", "average_precision", "AUPR of in- against out-of-distribution items by epistemic uncertainty"),
    ("accuracy", "accuracy", "Accuracy"),
)
_LOG_LINES = 12


def hub_id(name: str | None) -> str | None:
    """A base model's Hub id, or `None` for a path of this machine, which is of no use to anybody else."""
    from ..text.bundled_model import public_name

    name = public_name(name)
    return name if name and re.fullmatch(checkpoint.HUB_ID, name) and not Path(name).exists() else None


def load_intervals(path: str | Path) -> dict[str, tuple[float, float]]:
    """The intervals of a results file, as far as it has any."""
    found = json.loads(Path(path).read_text(encoding="utf-8")).get("intervals") or {}
    pairs = {key: value for key, value in found.items() if isinstance(value, list) and len(value) == 2}
    return {key: (low, high) for key, (low, high) in pairs.items() if low is not None and high is not None}


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Trainer's log of a run, from the last checkpoint inside its folder."""
    last = checkpoint.last_checkpoint(folder)
    for place in (folder, Path(last) if last else folder):
        if (place / "trainer_state.json").is_file():
            return json.loads((place / "trainer_state.json").read_text(encoding="utf-8")).get("log_history", [])
    return []


def render_card(folder: str | Path, repo_id: str, license: str | None = None) -> str:
    """
    The text of a checkpoint's `README.md`.

    Args:
        folder (`str` or `Path`):
            The checkpoint.
        repo_id (`str`):
            Where it will be: the snippet loads it from there.
        license (`str`, *optional*):
            A license id of the Hub.
    """
    from huggingface_hub import ModelCard

    folder = Path(folder)
    _, config = checkpoint.load_sidecar(folder)
    path = folder / checkpoint.RESULTS
    results, meta = report.load_results(path) if path.is_file() else ({}, {})
    intervals = load_intervals(path) if path.is_file() else {}
    rule = Decision.load(folder) if (folder / calibration.FILE).is_file() else None
    base = hub_id(config.get("base_model"))
    recipe = _recipe(folder)
    card = ModelCard.from_template(
        card_data=_metadata(config, base, recipe, results, meta, intervals, repo_id, license),
        template_path=str(TEMPLATE),
        title=repo_id.split("/")[-1],
        intro=_intro(config, base),
        paper=PAPER,
        snippet=_snippet(config, base, repo_id, rule),
        facts=_facts(config, base, recipe, meta),
        prompt=_prompt(config),
        decision=render_decision(rule) if rule else "",
        results=report.render_markdown(results).strip() if results else "",
        intervals=_interval_table(results, intervals),
        command=portable(meta.get("command") or ""),
        pictures=[(name, text) for name, text in _PICTURES.items() if (folder / name).is_file()],
        log=_log_table(read_log(folder)),
        num_choices=config["num_choices"],
        is_text=config["modality"] == "text",
        versions=", ".join(f"{name} {version}" for name, version in config.get("versions", {}).items()),
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).strip() + "\n"


def _metadata(
    config: dict[str, Any],
    base: str | None,
    recipe: dict[str, Any],
    results: dict[str, Any],
    meta: dict[str, Any],
    intervals: dict[str, tuple[float, float]],
    repo_id: str,
    license: str | None,
) -> Any:
    from huggingface_hub import ModelCardData

    is_adapter = config["modality"] == "text"
    used = dataset_ids([str(_task_name(recipe))]) if recipe else {}
    return ModelCardData(
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        license=license,
        datasets=sorted({path for path, _ in used.values()}) or None,
        pipeline_tag=_TASK_TYPES.get(config["modality"]),
        tags=[*TAGS, config["method"]["name"], *(["lora"] if is_adapter else [])],
        model_name=repo_id.split("/")[-1],
        eval_results=eval_results(config["modality"], results, meta, intervals) or None,
    )


def eval_results(
    modality: str, results: dict[str, Any], meta: dict[str, Any], intervals: dict[str, tuple[float, float]]
) -> list[Any]:
    """The figures of a results file as the Hub's `model-index` entries; values are those of the file, unrounded."""
    from huggingface_hub import EvalResult

    known = dataset_ids([meta.get("id"), *(meta.get("ood") or [])])
    found = []
    for key, value in results.items():
        group, _, rest = key.partition("/")
        task, _, name = rest.rpartition("/")
        metrics = {metric: (kind, text) for metric, kind, text in (_ID_METRICS if group == "id" else _OOD_METRICS)}
        if name not in metrics or "options/" in rest or (group == "id") != (task == "") or not math.isfinite(value):
            continue
        task = task or str(meta.get("id"))
        path, settings = known.get(task, (task, None))
        kind, text = metrics[name]
        low_high = intervals.get(key)
        if low_high:
            text += f" (95 % interval {low_high[0]:.4g} to {low_high[1]:.4g})"
        found.append(
            EvalResult(
                task_type=_TASK_TYPES.get(modality, modality),
                dataset_type=path,
                dataset_name=task if group == "id" else f"{task} (out of distribution)",
                dataset_config=settings,
                dataset_split=meta.get("split") or "test",
                metric_type=kind,
                metric_name=text,
                metric_value=value,
            )
        )
    return found


def eval_files(folder: str | Path, repo_url: str) -> dict[str, str]:
    """`.eval_results/*.yaml`: accuracy on datasets of the Hub, a file for each; other tasks have no place there."""
    import yaml
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    path = Path(folder) / checkpoint.RESULTS
    if not path.is_file():
        return {}
    results, meta = report.load_results(path)
    intervals = load_intervals(path)
    files = {}
    for task, (dataset, settings) in dataset_ids([meta.get("id"), *(meta.get("ood") or [])]).items():
        key = "id/accuracy" if task == meta.get("id") else f"ood/{task}/accuracy"
        if not math.isfinite(results.get(key, math.nan)):
            continue
        notes = f"accuracy, {meta.get('split') or 'test'} split, {results.get(key.replace('accuracy', 'n'))} items"
        notes += f", 95 % interval {intervals[key][0]:.4f} to {intervals[key][1]:.4f}" if key in intervals else ""
        notes += "" if task == meta.get("id") else f", out of distribution: trained on {meta.get('id')}"
        entry = EvalResultEntry(
            dataset_id=dataset, task_id=settings or "default", value=results[key], source_url=repo_url,
            source_name="Model card", notes=notes,
        )  # fmt: skip
        text = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True)
        files[f".eval_results/{re.sub(r'[^A-Za-z0-9_.-]', '_', task)}.yaml"] = text
    return files


def dataset_ids(names: list[Any]) -> dict[str, tuple[str, str | None]]:
    """Hub id and configuration of the tasks that come from the Hub."""
    from ..text.data.tasks import TASKS
    from ..vision.data.catalogue import IMAGE_TASKS

    every: dict[str, Any] = {**TASKS, **IMAGE_TASKS}
    known = {name: every[name] for name in names if isinstance(name, str) and name in every}
    return {name: (task.path, task.config) for name, task in known.items() if task.path}


def _recipe(folder: Path) -> dict[str, Any]:
    import yaml

    path = folder / checkpoint.RECIPE
    if not path.is_file():
        return {}
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def _task_name(recipe: dict[str, Any]) -> Any:
    task = (recipe.get("data") or {}).get("train")
    return task.get("name") or task.get("path") if isinstance(task, dict) else task


def portable(text: str) -> str:
    """A text without paths of this machine: of each, only the last name stays."""
    return re.sub(r"(?<![\w.:/~-])[~.]{0,2}/(?:[^\s/'\"=,]+/)*([^\s/'\"=,]+)", r"\1", text)


def _intro(config: dict[str, Any], base: str | None) -> str:
    what = (
        f"of [{base}](https://huggingface.co/{base})" if base else "of a base model that was given as a local folder"
    )
    if config["modality"] != "text":
        start = f", from the weights of [{base}](https://huggingface.co/{base})" if base else ", trained from scratch"
        return f"An image classifier (`{config['backbone']}`) with {config['num_choices']} classes{start}."
    return f"A LoRA adapter {what} for multiple-choice questions with up to {config['num_choices']} options."


def _facts(
    config: dict[str, Any], base: str | None, recipe: dict[str, Any], meta: dict[str, Any]
) -> list[tuple[str, str]]:
    options = {k: v for k, v in config["method"]["options"].items() if k != "reg_weight"}
    is_text = config["modality"] == "text"
    start = f"`{base}`" if base else "a local folder" if is_text else f"`{config['backbone']}`, from scratch"
    facts = [("base model", start), ("method", f"`{config['method']['name']}`")]
    if "reg_weight" in config["method"]["options"]:
        facts.append(("λ (`reg_weight`)", f"{config['method']['options']['reg_weight']:g}"))
    facts.append(("further options", ", ".join(f"`{k}` {v}" for k, v in options.items()) or "none"))
    if recipe:
        facts.append(
            ("training data", f"{portable(str(_task_name(recipe)))}, {recipe['data'].get('train_split')} split")
        )
    if is_text:
        facts.append(("K, answer letters", f"{config['num_choices']} ({', '.join(config.get('letters', []))})"))
    else:
        names, size = config["class_names"], config["transform"]["size"]
        facts.append(("K, classes", f"{len(names)} ({', '.join(names[:20])}{', …' if len(names) > 20 else ''})"))
        facts.append(("images", f"{size} x {size} pixels, {config['transform']['channels']} channels"))
    if config.get("evidence_offset"):
        facts.append(("evidence offset", f"{config['evidence_offset']:g}"))
    if meta.get("seed") is not None:
        facts.append(("seed", str(meta["seed"])))
    return [(name, value.replace("|", "\\|")) for name, value in facts]


def _prompt(config: dict[str, Any]) -> str:
    prompt = config.get("prompt")
    if not prompt:
        return ""
    lines = [prompt["choice"].format(letter=letter, text="…") for letter in config["letters"]]
    return prompt["template"].format(instruction=prompt["instruction"], question="…", choices="\n".join(lines))


def _snippet(config: dict[str, Any], base: str | None, repo_id: str, rule: Decision | None) -> str:
    if config["modality"] != "text":
        shown = "out.answer, out.probs, out.aleatoric, out.epistemic" + (", out.abstain" if rule else "")
        return (
            "from dappr_llm import UncertaintyPipeline\n\n"
            f'pipe = UncertaintyPipeline.from_pretrained("{repo_id}")\n'
            f'out = pipe("image.png")\nprint({shown})'
        )
    place = f'"{repo_id}"' + ("" if base else ', base_model="folder of the base model"')
    choices = ["hammer", "plum", "violin", "sock"][: max(2, min(4, config["num_choices"]))]
    text = ", ".join(f'"{choice}"' for choice in choices)
    shown = "out.answer, out.probs, out.aleatoric, out.epistemic" + (
        ", out.prediction_set, out.abstain" if rule else ""
    )
    return (
        "from dappr_llm import UncertaintyPipeline\n\n"
        f"pipe = UncertaintyPipeline.from_pretrained({place})\n"
        f'out = pipe("Which of these is a fruit?", choices=[{text}])\n'
        f"print({shown})"
    )


def render_decision(rule: Decision) -> str:
    """A decision rule in words."""
    source, sets, abstention, fit = rule.calibration_set, rule.conformal, rule.abstention, rule.fit
    lines = [
        f"Fitted on {source['n']} held-out questions ({source['task']}, {source['split']} split); stored in "
        f"`{calibration.FILE}` and applied by the pipeline.",
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


def _interval_table(results: dict[str, Any], intervals: dict[str, tuple[float, float]]) -> str:
    rows = [
        f"| {key} | {results[key]:.4g} | {low:.4g} | {high:.4g} |"
        for key, (low, high) in intervals.items()
        if key in results and math.isfinite(results[key])
    ]
    return "\n".join(["| figure | value | low | high |", "| --- | ---: | ---: | ---: |", *rows]) if rows else ""


def _log_table(log: list[dict[str, Any]]) -> str:
    """At the most a dozen lines of the log, evenly spread, evaluations merged into their step."""
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
    lines = [["step", *columns], ["---:"] * (len(columns) + 1), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""
