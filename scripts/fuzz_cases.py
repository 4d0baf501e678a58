"""The cases of scripts/fuzz.py: from a random generator and a folder of runs to a command line."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import yaml
from fuzz_mutations import HOSTILE, mutate_bytes, mutate_text, mutate_value, mutate_words

VERBS: dict[str, list[str]] = {
    "train": ["run/recipe.yaml", "--output-dir", "out", "--set", "train.max_steps=1"],
    "predict": ["run", "--task", "data/test.jsonl", "--out", "answers.jsonl", "--limit", "3"],
    "evaluate": ["run", "--id", "data/test.jsonl", "--limit", "3", "--out", "evaluated", "--resamples", "10"],
    "report": ["run", "--out", "page"],
    "audit": ["run", "--task", "data/test.jsonl", "--limit", "3"],
    "ask": ["run"],
    "calibrate": ["run", "--task", "data/validation.jsonl", "--out", "calibrated"],
    "plan": ["run/recipe.yaml"],
    "init": ["tickets.csv", "--out", "own.yaml"],
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
    ["predict", "heads", "--task", "tickets.csv", "--out", "answers.jsonl", "--limit", "3"],
    ["evaluate", "heads", "--limit", "3", "--out", "evaluated", "--resamples", "10"],
    ["ask", "tokens", "Which plum is"],
    ["report", "heads", "--out", "page"],
)
# What reads a file of one's own.
FILE_READERS = (
    ["init", "{file}", "--out", "own.yaml"],
    ["init", "{file}", "--out", "own.yaml", "--text", "text", "--label", "label"],
    ["init", "{file}", "--out", "own.yaml", "--text", "text", "--label", "stars"],
    ["train", "heads.yaml", "--output-dir", "out", "--set", "data.train.path={file}"],
    ["train", "tokens.yaml", "--output-dir", "out", "--set", "data.train.path={file}"],
    ["train", "heads.yaml", "--output-dir", "out", "--set", "data.train={file}"],
    ["predict", "heads", "--task", "{file}", "--out", "answers.csv", "--limit", "3"],
    ["evaluate", "heads", "--id", "{file}", "--limit", "3", "--out", "evaluated", "--resamples", "10"],
    ["evaluate", "tokens", "--ood", "{file}", "--limit", "3", "--out", "evaluated", "--resamples", "10"],
    ["calibrate", "heads", "--task", "{file}", "--out", "calibrated"],
)
ONE_STEP = ["--set", "train.max_steps=1", "--set", "train.num_train_epochs=1", "--set", "train.disable_tqdm=true"]


def recipe(draw: random.Random, folder: Path) -> tuple[list[str], str]:
    """A damaged recipe, trained for a step or planned; or a damaged `--set`."""
    source = draw.choice(("run/recipe.yaml", "run/recipe.yaml", "image.yaml", "heads.yaml", "tokens.yaml"))
    text = (folder / source).read_text()
    values = yaml.safe_load(text)
    out = ["--output-dir", "out"]
    if draw.random() < 0.25:
        section = draw.choice(("train", "model", "data", "method", "lora"))
        key = draw.choice((*values.get(section, {}), "r", "learning_rate", "x", ""))
        setting = f"{section}.{key}={mutate_text(draw, json.dumps(mutate_value(draw, [0])))}".replace("\x00", "")
        return ["train", source, *out, *ONE_STEP, "--set", setting], f"--set {setting[:200]!r}"
    kind = draw.random()
    if kind < 0.3:
        damaged = mutate_text(draw, text)
    elif kind < 0.7:
        damaged = yaml.safe_dump(_plausible(draw, values), allow_unicode=True)
    else:
        damaged = yaml.safe_dump(mutate_value(draw, values), allow_unicode=True)
    path = folder / "damaged.yaml"
    path.write_bytes(damaged.encode("utf-8", "surrogatepass"))
    if draw.random() < 0.3:
        return ["plan", path.name], f"damaged {source}"
    return ["train", path.name, *out, *ONE_STEP], f"damaged {source}"


def _plausible(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """A recipe with odd values of the right type, which pass the schema and meet what is behind it."""
    from dappr_llm.core.schemas.documents import document

    whole = document("recipe")
    for _ in range(draw.choice((1, 1, 2, 4))):
        section = draw.choice(("train", "train", "model", "data", "lora", "method"))
        part = whole["properties"][section]
        while "$ref" in part or "oneOf" in part:
            part = whole["$defs"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else draw.choice(part["oneOf"])
        keys = part["properties"]
        if section == "method":
            values["method"] = {"name": keys["name"]["const"]}
        key = draw.choice([key for key in keys if key not in ("name", "push_to_hub", "train")])
        values.setdefault(section, {})[key] = _typed(draw, keys[key], whole)
    return values


def _typed(draw: random.Random, part: dict[str, Any], whole: dict[str, Any]) -> Any:
    if "$ref" in part:
        return _typed(draw, whole["$defs"][part["$ref"].rsplit("/", 1)[1]], whole)
    for union in ("anyOf", "oneOf"):
        if union in part:
            return _typed(draw, draw.choice(part[union]), whole)
    if "enum" in part or "const" in part:
        return draw.choice(part.get("enum", [part.get("const")]))
    kind = part.get("type")
    if kind in ("integer", "number"):
        low = part.get("minimum", part.get("exclusiveMinimum", 0))
        high = min(part.get("maximum", part.get("exclusiveMaximum", 1000)), 1000)
        return (
            draw.choice((low, high, 0, 1, 2, 7)) if kind == "integer" else draw.choice((low, high, 1e-9, 0.1, 0.5, 1))
        )
    if kind == "array":
        return [_typed(draw, part.get("items", {}), whole) for _ in range(draw.choice((0, 1, 3)))]
    if kind == "object":
        inner = part.get("properties", {})
        return {key: _typed(draw, inner[key], whole) for key in inner if draw.random() < 0.3}
    if kind == "boolean":
        return draw.random() < 0.5
    words = (
        "",
        "x",
        "auto",
        "none",
        "data/test.jsonl",
        "data",
        "everyday",
        "run",
        "base",
        "q_proj",
        "1",
        "{question}",
    )
    return None if kind == "null" else draw.choice(words)


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


def data_file(draw: random.Random, folder: Path) -> tuple[list[str], str]:
    """A damaged file of texts and labels, and a verb that reads it."""
    name = draw.choice(("tickets.csv", "tickets.csv", "tickets.jsonl", "tickets.parquet"))
    path = folder / name
    kind = draw.random()
    if kind < 0.25 or path.suffix == ".parquet":
        path.write_bytes(mutate_bytes(draw, path.read_bytes()))
        what = "bytes changed"
    elif kind < 0.35:
        coding = draw.choice(("utf-16", "utf-16-le", "utf-8-sig", "cp1252", "utf-32"))
        path.write_bytes(path.read_text().replace("plum", "plümé").encode(coding))
        what = f"written as {coding}"
    elif kind < 0.7:
        path.write_bytes(mutate_text(draw, path.read_text()).encode("utf-8", "surrogatepass"))
        what = "text changed"
    else:
        what = _change_rows(draw, path)
    command = [word.replace("{file}", name) for word in draw.choice(FILE_READERS)]
    return command, f"{name}: {what}"


def _change_rows(draw: random.Random, path: Path) -> str:
    """Cells replaced in a file that can still be parsed, or columns gone."""
    rows = _read_rows(path)
    for _ in range(draw.choice((1, 1, 3, 30))):
        row = draw.choice(rows)
        key = draw.choice(list(row) or ["x"])
        row[key] = draw.choice(HOSTILE)
        if draw.random() < 0.1:
            del row[key]
    column = draw.choice(("text", "label", "stars"))
    what = draw.random()
    for row in rows:
        if what < 0.1:
            row.pop(column, None)
        elif what < 0.2:
            row[column] = draw.choice(HOSTILE)
        elif what < 0.3:
            row[column] = "same"
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", errors="surrogatepass")
    else:
        with path.open("w", newline="", encoding="utf-8", errors="surrogatepass") as file:
            writer = csv.DictWriter(file, ["text", "label", "stars"], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    return "cells changed"


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


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
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)  # keys that are numbers become texts
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


MAKE = {"recipes": recipe, "arguments": argument, "checkpoints": checkpoint, "files": data_file}
