"""The JSON schema of every file, for editors and docs."""

from __future__ import annotations

from typing import Any

from .answers import AnswerRecord
from .check import json_schema
from .decision import DecisionFile
from .gate import GateFile
from .lora_section import LoraSection
from .manifest import ManifestFile
from .method_options import METHOD_OPTIONS
from .recipe import Recipe
from .results import ResultsContent, SweepTable
from .sidecar import ImageSidecar, TextSidecar
from .train_section import TrainSection
from .trainer_state import TrainerStateFile

DRAFT = "https://json-schema.org/draft/2020-12/schema"
# Name on the command line → the schema, and the file that it describes.
DOCUMENTS: dict[str, tuple[Any, str]] = {
    "recipe": (Recipe, "a recipe, for dappr train"),
    "sweep": (SweepTable, "a table of runs, for dappr sweep"),
    "decision": (DecisionFile, "decision.json"),
    "gate": (GateFile, "gate.json"),
    "results": (ResultsContent, "results.json"),
    "sidecar": (TextSidecar, "uncertainty_config.json of an adapter"),
    "image-sidecar": (ImageSidecar, "uncertainty_config.json of an image classifier"),
    "manifest": (ManifestFile, "manifest.json"),
    "trainer-state": (TrainerStateFile, "trainer_state.json"),
    "answers": (AnswerRecord, "a line of an answer file"),
}


def document(name: str) -> dict[str, Any]:
    """The JSON schema of a file by its name in `DOCUMENTS`."""
    schema, title = DOCUMENTS[name]
    found = {"$schema": DRAFT, **json_schema(schema), "title": title}
    return _with_sections(found) if schema is Recipe else found


def _with_sections(found: dict[str, Any]) -> dict[str, Any]:
    """The schema of a recipe with its open sections written out, and `base:`, which is resolved before the check."""
    properties, shared = found["properties"], found.setdefault("$defs", {})

    def part(schema: Any) -> dict[str, Any]:
        inner = json_schema(schema)
        shared.update(inner.pop("$defs", {}))
        return inner

    text = {"type": "string"}
    properties["base"] = {"anyOf": [text, {"type": "array", "items": text}]}
    properties["lora"], properties["train"] = part(LoraSection), part(TrainSection)
    forms = []
    for name, options in METHOD_OPTIONS.items():
        form = part(options)
        form["properties"] = {"name": {"const": name}, **form["properties"]}
        forms.append({**form, "title": name, "required": ["name"]})
    properties["method"] = {"oneOf": forms}
    # A file with `base:` may leave to it what a recipe needs.
    found.pop("required", None)
    for section in ("ModelSection", "DataSection"):
        shared.get(section, {}).pop("required", None)
    return found
