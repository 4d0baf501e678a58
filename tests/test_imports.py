"""Dependency directions: who may import whom, read from the source."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "dappr_llm"
HEAVY = {"torch", "transformers", "peft", "datasets", "accelerate", "timm", "bitsandbytes", "matplotlib"}
WITHOUT_TORCH = [
    "errors",
    "files",
    "recipe",
    "manifest",
    "checkpoint",
    "launch",
    "planning",
    "cli_scale",
    "predictions",
    "batching",
    "prediction_cache",
    "metrics",
    "evaluators",
    "weighted",
    "intervals",
    "results",
    "questions",
    "report",
    "audit",
    "conformal",
    "abstention",
    "calibration",
    "card",
    "hub",
    "batch_predict",
    "pipeline",
    "ask",
    "decide",
    "adopt",
    "hf_task",
    "commands",
    "combining",
    "task_kinds",
    "analysis",
    "cli_serve",
    "cli",
]
VISION_DATA = [
    "arrays",
    "catalogue",
    "chance",
    "digits",
    "folders",
    "images",
    "rows",
    "sources",
    "splits",
    "tasks",
    "transforms",
]


def imports(path, everywhere=True):
    """Modules imported by a file; `everywhere` counts imports inside functions too, but never type-checking ones."""
    tree = ast.parse(path.read_text())
    inside_typing = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    nodes = ast.walk(tree) if everywhere else tree.body
    package = ("dappr_llm", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in nodes:
        if id(node) in inside_typing:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


def ours(found):
    return {name.split(".")[1] for name in found if name.startswith("dappr_llm.")}


@pytest.mark.parametrize("path", sorted((PACKAGE / "methods").glob("*.py")), ids=lambda p: p.stem)
def test_methods_see_tensors_only(path):
    found = imports(path)
    assert ours(found) <= {"outputs", "errors", "methods"}
    assert not {name.split(".")[0] for name in found} & (HEAVY - {"torch"})


@pytest.mark.parametrize("path", sorted((PACKAGE / "text").glob("*.py")), ids=lambda p: p.stem)
def test_text_knows_neither_trainer_nor_vision(path):
    assert ours(imports(path)) <= {"outputs", "errors", "methods", "batching", "text"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "vision").glob("*.py")), ids=lambda p: p.stem)
def test_vision_knows_neither_trainer_nor_text(path):
    assert ours(imports(path)) <= {"outputs", "errors", "methods", "vision"}


@pytest.mark.parametrize("name", VISION_DATA)
def test_image_tasks_are_named_without_torch(name):
    """Recipes ask whether a task means images; rows and transforms import torch when they meet a tensor."""
    found = imports(PACKAGE / "vision" / f"{name}.py", everywhere=False)
    assert not {module.split(".")[0] for module in found} & (HEAVY | {"torchvision", "PIL", "sklearn", "scipy"})
    assert {m.split(".")[2] for m in found if m.startswith("dappr_llm.vision.")} <= set(VISION_DATA)


def test_the_trainer_chooses_neither_text_nor_vision():
    assert not ours(imports(PACKAGE / "trainer.py")) & {"text", "vision", "cli", "commands", "hub"}
    for name in ("durable", "nonfinite", "stepping", "tracking", "publishing"):
        assert not ours(imports(PACKAGE / f"{name}.py")) & {"text", "vision", "cli", "commands", "run"}, name


@pytest.mark.parametrize("name", ["heads", "auxiliary"])
def test_what_methods_ask_of_training_knows_neither_text_nor_vision(name):
    found = imports(PACKAGE / f"{name}.py")
    assert ours(found) <= {"errors", "methods", "outputs", "passes"}
    assert not {module.split(".")[0] for module in found} & {"peft", "datasets", "timm"}


def test_run_does_not_know_who_uses_it():
    assert not ours(imports(PACKAGE / "run.py")) & {"commands", "cli", "report", "evaluators"}


@pytest.mark.parametrize("name", ["conformal", "abstention", "calibration", "hub", "batch_predict", "pipeline", "ask"])
def test_serving_knows_neither_text_nor_vision(name):
    """Vision adapters use the same calls: what differs between modalities is the backend's to say."""
    assert not ours(imports(PACKAGE / f"{name}.py")) & {"text", "vision", "trainer", "cli", "commands"}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_import_without_torch(name):
    found = imports(PACKAGE / f"{name}.py", everywhere=False)
    assert not {module.split(".")[0] for module in found} & HEAVY
    assert not ours(found) - set(WITHOUT_TORCH) - {"__version__"}


def test_nothing_outside_methods_branches_on_a_methods_name():
    """A comparison with a registry name, or a match on one, belongs into the contract."""
    from dappr_llm.methods import METHODS

    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "methods":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            parts += [node.value] if isinstance(node, ast.MatchValue) else []
            texts = [leaf.value for part in parts for leaf in ast.walk(part) if isinstance(leaf, ast.Constant)]
            assert not set(METHODS) & {text for text in texts if isinstance(text, str)}, f"{path}, line {node.lineno}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "reporting").glob("*.py")), ids=lambda p: p.stem)
def test_the_report_reads_tables_only(path):
    found = imports(path)
    assert not {module.split(".")[0] for module in found} & HEAVY
    assert ours(found) <= {
        "__version__", "checkpoint", "errors", "evaluators", "files", "intervals", "metrics", "predictions", "questions",
        "reporting", "results",
    }  # fmt: skip


def test_files_and_functions_stay_small():
    """Soft limits: past them, ask what else moved in."""
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        assert source.count("\n") <= 400, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


def test_every_package_is_installed():
    listed = set(re.findall(r'"(dappr_llm[\w.]*)"', (PACKAGE.parent / "pyproject.toml").read_text()))
    for path in PACKAGE.rglob("__init__.py"):
        assert ".".join(path.parent.relative_to(PACKAGE.parent).parts) in listed
