"""The cases of scripts/fuzz.py: from a random generator and a folder of runs to a command line."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import yaml
from fuzz_mutations import mutate_bytes, mutate_text, mutate_value, mutate_words

VERBS: dict[str, list[str]] = {
    "train": ["run/recipe.yaml", "--output-dir", "out", "--set", "train.max_steps=1"],
    "predict": ["run", "--task", "data/test.jsonl", "--out", "answers.jsonl", "--limit", "3"],
    "evaluate": ["run", "--id", "data/test.jsonl", "--limit", "3", "--out", "evaluated", "--resamples", "10"],
    "report": ["run", "--out", "page"],
    "audit": ["run", "--task", "data/test.jsonl", "--limit", "3"],
    "ask": ["run"],
    "calibrate": ["run", "--task", "data/validation.jsonl", "--out", "calibrated"],
    "plan": ["run/recipe.yaml"],
    "combine": ["run", "run", "--out", "combined"],
    "sweep": ["table.yaml", "--dry-run"],
    "recipes": ["quickstart"],
    "config-schema": ["decision"],
}
# What reads the files of a checkpoint.
READERS = (
    ["predict", "run", "--task", "data/test.jsonl", "--out", "answers.jsonl", "--limit", "3"],
    ["evaluate", "run", "--id", "data/test.jsonl", "--limit", "3", "--out", "evaluated", "--resamples", "10"],
    ["report", "run", "--out", "page"],
    ["ask", "run"],
    ["calibrate", "run", "--task", "data/validation.jsonl", "--out", "calibrated"],
    ["combine", "run", "run", "--out", "combined"],
    ["audit", "run", "--task", "data/test.jsonl", "--limit", "3"],
    ["evaluate", "images", "--id", "digits", "--limit", "4", "--out", "evaluated", "--resamples", "10"],
    ["train", "resumed.yaml", "--resume"],
)
ONE_STEP = ["--set", "train.max_steps=1", "--set", "train.num_train_epochs=1", "--set", "train.disable_tqdm=true"]


def recipe(draw: random.Random, folder: Path) -> tuple[list[str], str]:
    """A damaged recipe, trained for a step or planned; or a damaged `--set`."""
    source = draw.choice(("run/recipe.yaml", "run/recipe.yaml", "image.yaml"))
    text = (folder / source).read_text()
    values = yaml.safe_load(text)
    out = ["--output-dir", "out"]
    if draw.random() < 0.25:
        section = draw.choice(("train", "model", "data", "method", "lora"))
        key = draw.choice((*values.get(section, {}), "r", "learning_rate", "x", ""))
        setting = f"{section}.{key}={mutate_text(draw, json.dumps(mutate_value(draw, [0])))}".replace("\x00", "")
        return ["train", source, *out, *ONE_STEP, "--set", setting], f"--set {setting[:200]!r}"
    if draw.random() < 0.4:
        damaged = mutate_text(draw, text)
    else:
        damaged = yaml.safe_dump(mutate_value(draw, values), allow_unicode=True)
    path = folder / "damaged.yaml"
    path.write_bytes(damaged.encode("utf-8", "surrogatepass"))
    if draw.random() < 0.3:
        return ["plan", path.name], f"damaged {source}"
    return ["train", path.name, *out, *ONE_STEP], f"damaged {source}"


def argument(draw: random.Random, folder: Path) -> tuple[list[str], str]:
    """A damaged command line of any verb."""
    from dappr_llm.commands.main import build_parser

    verb = draw.choice(list(VERBS))
    (folder / "table.yaml").write_text("seeds: [0]\nrows: [{recipe: run/recipe.yaml, name: a}]\n")
    verbs: Any = build_parser(verb)._subparsers._group_actions[0]  # type: ignore[union-attr]
    options = [option for action in verbs.choices[verb]._actions for option in action.option_strings]
    options = [option for option in options if option not in ("-h", "--help", "--launch", "--launch-args")]
    words = mutate_words(draw, VERBS[verb], options)
    if verb == "train":
        words += ONE_STEP if "recipe" in " ".join(words) else []
    return [verb, *words], "damaged arguments"


def checkpoint(draw: random.Random, folder: Path) -> tuple[list[str], str]:
    """One damaged file of a checkpoint, and a verb that reads it; manifests are left, removed or made to fit."""
    command = list(draw.choice(READERS))
    home = folder / {"train": "resumed"}.get(command[0], command[1])
    files = sorted(p for p in home.rglob("*") if p.is_file() and p.suffix not in (".png", ".md", ".lock"))
    if command[0] == "train":
        newest = sorted(home.glob("checkpoint-*"))[-1]
        files = [p for p in files if newest in p.parents]
    path = draw.choice(files)
    what = _damage(draw, path)
    manifests = draw.choice(("left", "removed", "removed", "fitted", "fitted"))
    for manifest in {home / "manifest.json", path.parent / "manifest.json"}:
        _treat(manifest, manifests, path)
    return command, f"{path.relative_to(folder)}: {what}, manifests {manifests}"


def _damage(draw: random.Random, path: Path) -> str:
    if draw.random() < 0.05:
        kind = draw.choice(("gone", "folder", "FIFO", "link to /dev/zero", "link to nothing"))
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "FIFO":
            os.mkfifo(path)
        elif kind.startswith("link"):
            path.symlink_to("/dev/zero" if "zero" in kind else "nowhere")
        return kind
    data = path.read_bytes()
    if path.suffix in (".json", ".yaml") and draw.random() < 0.65:
        values = json.loads(data) if path.suffix == ".json" else yaml.safe_load(data)
        changed = mutate_value(draw, values)
        if path.name == "decision.json" and isinstance(changed, dict) and draw.random() < 0.7:
            changed = _signed(changed)
        text = json.dumps(changed, default=str) if path.suffix == ".json" else yaml.safe_dump(changed)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        return "values changed"
    path.write_bytes(mutate_bytes(draw, data))
    return "bytes changed"


def _signed(content: dict[Any, Any]) -> dict[Any, Any]:
    """A decision with a checksum that fits, as an attacker would write it."""
    rest = {str(key): value for key, value in content.items() if key != "checksum"}
    text = json.dumps(rest, sort_keys=True)
    return {**rest, "checksum": hashlib.sha256(text.encode()).hexdigest()}


def _treat(manifest: Path, how: str, damaged: Path) -> None:
    if manifest == damaged or not manifest.is_file() or how == "left":
        return
    if how == "removed":
        manifest.unlink()
        return
    content = json.loads(manifest.read_text())
    content.pop("checksum", None)
    name = damaged.relative_to(manifest.parent).as_posix() if manifest.parent in damaged.parents else ""
    if name in content.get("files", {}) and damaged.is_file() and not damaged.is_symlink():
        data = damaged.read_bytes()
        content["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({**content, "checksum": checksum}))


MAKE = {"recipes": recipe, "arguments": argument, "checkpoints": checkpoint}
