"""What pyproject.toml declares: every library that the package imports, each once, and every file in the wheel."""

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_imports import PACKAGE, imports

tomllib = pytest.importorskip("tomllib")  # Python 3.11 and later

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NOT_FOR_USERS = {"dev", "docs"}
# Imported names that differ from their distribution's.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "prometheus_client": "prometheus-client",
}


def declared(lines):
    """Names in a list of requirements, those of this project's own extras left out."""
    names = [canonicalize_name(Requirement(line).name) for line in lines]
    return [name for name in names if name != PROJECT["name"]]


def imported():
    """Third-party modules that the package imports anywhere, and a file that does; type checking does not count."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in sorted({module.split(".")[0] for module in imports(path)}):
            if name not in sys.stdlib_module_names and name != "dappr_llm":
                found.setdefault(name, path.relative_to(ROOT).as_posix())
    return found


def test_every_imported_library_is_declared():
    lists = [PROJECT["dependencies"], *(lines for extra, lines in EXTRAS.items() if extra not in NOT_FOR_USERS)]
    known = {name for lines in lists for name in declared(lines)}
    modules = imported()
    missing = {
        name: path for name, path in modules.items() if canonicalize_name(DISTRIBUTIONS.get(name, name)) not in known
    }
    assert not missing, f"declare these in pyproject.toml: {missing}"
    assert {"torch", "pyarrow", "PIL"} <= set(modules)  # the walk above really finds imports


@pytest.mark.parametrize("section", ["dependencies", *EXTRAS])
def test_nothing_is_declared_twice(section):
    names = declared(PROJECT["dependencies"] if section == "dependencies" else EXTRAS[section])
    assert len(set(names)) == len(names)
    if section != "dependencies":
        assert not set(names) & set(declared(PROJECT["dependencies"])), "an extra repeats a dependency"


def test_the_all_extra_is_every_extra_for_users():
    (line,) = EXTRAS["all"]
    assert Requirement(line).extras == set(EXTRAS) - NOT_FOR_USERS - {"all"}


def requirements():
    """Every declared requirement, without this project's own extras."""
    lines = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    found = [Requirement(line) for line in lines]
    return [wanted for wanted in found if canonicalize_name(wanted.name) != PROJECT["name"]]


@pytest.mark.parametrize("wanted", requirements(), ids=str)
def test_installed_versions_are_within_the_declared_bounds(wanted):
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{wanted.name} is not installed")
    assert version in wanted.specifier


def test_libraries_whose_internals_are_read_have_an_upper_bound():
    bounds = {wanted.name: str(wanted.specifier) for wanted in requirements()}
    for name in ("peft", "transformers", "huggingface_hub", "datasets", "timm"):
        assert "<" in bounds[name], f"{name} needs an upper bound"


# The last versions with a known hole that reaches us: none may be allowed again.
@pytest.mark.parametrize("line", ["torch==2.9.1", "jinja2==3.1.5", "pillow==12.2.0", "pyarrow==23.0.0", "timm==1.0.25",
                                  "filelock==3.20.2", "tqdm==4.66.2", "pyyaml==5.3.1"])  # fmt: skip
def test_versions_with_known_holes_are_not_allowed(line):
    name, _, version = line.partition("==")
    (wanted,) = (each for each in requirements() if each.name == name)
    assert version not in wanted.specifier


def test_constraints_name_each_version_once_and_fit_the_declared_ranges():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}
    assert len(pinned) == len(lines)
    for line in [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]:
        wanted = Requirement(line)
        pin = pinned.get(canonicalize_name(wanted.name))
        if pin is not None:
            (version,) = (part.version for part in pin.specifier)
            assert version in wanted.specifier, f"{line}: constraints.txt has {version}"


def test_make_targets_that_ci_and_help_name_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    named = re.findall(r"\bmake ([a-z-]+)", makefile + (ROOT / "README.md").read_text())
    commands = re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), flags=re.M)
    assert commands == ["quality", "test", "wheel-check"]
    assert {*named, *commands} <= targets, f"no such target: {({*named, *commands}) - targets}"
