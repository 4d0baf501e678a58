"""Sentences and tables of the model card that describe a checkpoint by its sidecar alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.local_names import portable

if TYPE_CHECKING:
    from ..decisions.rule import Decision

_NAMES = 20  # of labels, answers or classes


def task_name(recipe: Mapping[str, Any]) -> str | None:
    """Name or path of the training task, from the raw values of a recipe."""
    task = (recipe.get("data") or {}).get("train")
    return task.get("name") or task.get("path") if isinstance(task, dict) else task


def intro(config: Mapping[str, Any], base: str | None) -> str:
    what = (
        f"of [{base}](https://huggingface.co/{base})" if base else "of a base model that was given as a local folder"
    )
    if config["modality"] != "text":
        start = f", from the weights of [{base}](https://huggingface.co/{base})" if base else ", trained from scratch"
        return f"An image classifier (`{portable(config['backbone'])}`) with {config['num_choices']} classes{start}."
    if config.get("labels"):
        return f"A text classifier with {config['num_choices']} labels, made {what}."
    return f"A LoRA adapter {what} for multiple-choice questions with up to {config['num_choices']} options."


_EXP = (
    "exp(z) + 1, not the paper's softplus(z) + 1: cross-entropy with a level, and K/α0 ranks rows nearly as the "
    "energy of a cross-entropy model does"
)


def facts(
    config: Mapping[str, Any], base: str | None, recipe: Mapping[str, Any], meta: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What a reader looks up first: name and value."""
    options = {k: v for k, v in config["method"]["options"].items() if k != "reg_weight"}
    is_text = config["modality"] == "text"
    start = f"`{base}`" if base else "a local folder" if is_text else f"`{portable(config['backbone'])}`, from scratch"
    found = [("base model", start), ("method", f"`{config['method']['name']}`")]
    weight = config["method"]["options"].get("reg_weight")
    if weight is not None:
        found.append(("λ (`reg_weight`)", f"{weight:g}"))
    found.append(("further options", portable(", ".join(f"`{k}` {v}" for k, v in options.items())) or "none"))
    if options.get("evidence") == "exp":
        found.append(("evidence", _EXP))
    if config.get("chosen"):
        found.append(("chosen by the trainer", portable(", ".join(f"`{name}`" for name in config["chosen"]))))
    if recipe:
        split = recipe.get("data", {}).get("train_split")
        found.append(("training data", f"{portable(str(task_name(recipe)))}, {split} split"))
    if config.get("labels"):
        kind = config.get("readout", "letters")
        read = {"head": "a classification head", "tokens": "one token each"}.get(kind, kind)
        found.append(("K, labels", f"{_some(config['labels'])}, read from {read}"))
        if config.get("answers"):
            found.append(("answers", _some([f"`{text}`" for text in config["answers"]])))
    elif is_text:
        found.append(("K, answer letters", f"{config['num_choices']} ({', '.join(config.get('letters', []))})"))
    else:
        size = config["transform"]["size"]
        found.append(("K, classes", _some(config["class_names"])))
        found.append(("images", f"{size} x {size} pixels, {config['transform']['channels']} channels"))
    if config.get("evidence_offset"):
        found.append(("evidence offset", f"{config['evidence_offset']:g}"))
    if meta.get("seed") is not None:
        found.append(("seed", str(meta["seed"])))
    return found


def _some(names: Sequence[str]) -> str:
    """How many there are, and the first of them."""
    return portable(f"{len(names)} ({', '.join(names[:_NAMES])}{', …' if len(names) > _NAMES else ''})")


def shown_prompt(config: Mapping[str, Any]) -> str:
    prompt = config.get("prompt")
    if not prompt:
        return ""
    if config.get("readout"):  # letters, which are older, have none
        labels = prompt.get("listed") or ", ".join(config["labels"])
        return prompt["template"].format(instruction=prompt["instruction"], text="…", labels=labels)
    lines = [prompt["choice"].format(letter=letter, text="…") for letter in config["letters"]]
    return prompt["template"].format(instruction=prompt["instruction"], question="…", choices="\n".join(lines))


def snippet(config: Mapping[str, Any], base: str | None, repo_id: str, rule: Decision | None) -> str:
    if config["modality"] != "text":
        shown = "out.answer, out.probs, out.aleatoric, out.epistemic" + (", out.abstain" if rule else "")
        return (
            "from dappr_llm import UncertaintyPipeline\n\n"
            f'pipe = UncertaintyPipeline.from_pretrained("{repo_id}")\n'
            f'out = pipe("image.png")\nprint({shown})'
        )
    place = f'"{repo_id}"' + ("" if base else ', base_model="folder of the base model"')
    question = '"a text"'
    choices = ["hammer", "plum", "violin", "sock"][: max(2, min(4, config["num_choices"]))]
    text = ", ".join(f'"{choice}"' for choice in choices)
    shown = "out.answer, out.probs, out.aleatoric, out.epistemic" + (
        ", out.prediction_set, out.abstain" if rule else ""
    )
    if not config.get("labels"):
        question = f'"Which of these is a fruit?", choices=[{text}]'
    return (
        "from dappr_llm import UncertaintyPipeline\n\n"
        f"pipe = UncertaintyPipeline.from_pretrained({place})\n"
        f"out = pipe({question})\n"
        f"print({shown})"
    )
