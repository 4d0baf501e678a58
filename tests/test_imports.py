"""Directions of import between the folders of the package, read from the source. docs/architecture.md explains them."""

import ast
import subprocess
import sys

import pytest
from source_imports import PACKAGE, imports

FILES = sorted(PACKAGE.rglob("*.py"))
# Each folder may import itself and the folders named here, nothing else of ours.
MAY_IMPORT = {
    "core": set(),
    "methods": {"core"},
    "text": {"core", "methods"},
    "vision": {"core", "methods"},
    "evaluation": {"core"},
    "decisions": {"core", "evaluation"},
    "inference": {"core", "methods", "text", "vision", "evaluation", "decisions"},
    "training": {"core", "methods", "text", "vision", "evaluation", "decisions", "inference"},
    "scale": {"core", "methods", "text", "vision", "evaluation", "decisions", "inference", "training"},
    "commands": {"core", "methods", "text", "vision", "evaluation", "decisions", "inference", "training", "scale"},
}
MODALITIES = {"text", "vision"}
# The only files that choose between text and vision: the first for those who read, the second for those who train.
CHOOSE = {"inference/modality.py", "training/build.py"}
HEAVY = {
    "torch",
    "transformers",
    "peft",
    "datasets",
    "accelerate",
    "timm",
    "bitsandbytes",
    "matplotlib",
    "torchvision",
}
# Nothing in these may need torch, not even inside a function.
NEVER_TORCH = {"evaluation", "decisions"}


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def folder_of(path):
    return path.relative_to(PACKAGE).parts[0]


def ours(found):
    return {name.split(".")[1] for name in found if name.startswith("dappr_llm.")} & set(MAY_IMPORT)


def libraries(found):
    return {name.split(".")[0] for name in found}


def test_the_package_has_ten_folders_and_no_loose_modules():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", [path for path in FILES if path.parent != PACKAGE], ids=name_of)
def test_folders_import_in_one_direction(path):
    folder = folder_of(path)
    assert ours(imports(path)) <= MAY_IMPORT[folder] | {folder}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_few_files_choose_between_text_and_vision(path):
    """What differs between modalities is the backend's to say."""
    if path.parent != PACKAGE and folder_of(path) not in MODALITIES and name_of(path) not in CHOOSE:
        assert not ours(imports(path)) & MODALITIES


@pytest.mark.parametrize("path", sorted((PACKAGE / "methods").glob("*.py")), ids=name_of)
def test_methods_see_tensors_only(path):
    found = imports(path)
    core = {name.split(".")[2] for name in found if name.startswith("dappr_llm.core.")}
    assert core <= {"errors", "outputs", "schemas"}
    assert not libraries(found) & (HEAVY - {"torch"})


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_libraries_with_one_home(path):
    found = imports(path)
    if folder_of(path) != "training":
        assert not {"transformers.Trainer", "transformers.TrainerCallback"} & found
    if folder_of(path) != "scale":
        assert "ray" not in libraries(found)
    if folder_of(path) in NEVER_TORCH and "evaluate_modules" not in path.parts:
        assert not libraries(found) & (HEAVY - {"matplotlib"})


def test_help_and_reports_import_no_torch():
    """Verbs import what is slow when they run: help, argument errors and reports must not wait for it."""
    modules = [
        ".".join(("dappr_llm", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in FILES
        if folder_of(path) in {"commands", "decisions", "evaluation"} and "evaluate_modules" not in path.parts
    ]
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    code += f"print(sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_outside_methods_branches_on_a_methods_name():
    """A comparison with a registry name, or a match on one, belongs into the contract."""
    from dappr_llm.methods import METHODS

    for path in FILES:
        if path.parent.name == "methods":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            parts += [node.value] if isinstance(node, ast.MatchValue) else []
            texts = [leaf.value for part in parts for leaf in ast.walk(part) if isinstance(leaf, ast.Constant)]
            assert not set(METHODS) & {text for text in texts if isinstance(text, str)}, f"{path}, line {node.lineno}"


def test_nobody_sniffs_at_backends():
    """A backend says what it can do through `core.backend.Backend`; asking for attributes by name hides members."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("hasattr", "getattr"):
                asked = ast.unparse(node.args[0])
                assert not asked.split(".")[-1].endswith("backend"), f"{path}, line {node.lineno}"


def test_files_and_functions_stay_small():
    """Soft limits: past them, ask what else moved in."""
    for path in FILES:
        source = path.read_text()
        assert source.count("\n") <= 400, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"
