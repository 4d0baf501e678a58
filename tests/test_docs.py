"""What README and docs show must be true: code compiles, recipes load, commands and files exist."""

import re
from pathlib import Path

import pytest
import torch

from dappr_llm.commands.main import build_parser
from dappr_llm.core.recipe import find_recipe, load_recipe

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_compiles_and_names_exist(page):
    import dappr_llm

    for block in blocks(page, "python"):
        compile(block.replace("->", "#"), str(page), "exec")
        for names in re.findall(r"from dappr_llm import (.+)", block):
            assert all(hasattr(dappr_llm, name.strip()) for name in names.split(","))


def test_the_readmes_loss_example_runs():
    from dappr_llm import dappr_loss, dappr_uncertainty

    scope = {"logits": torch.randn(4, 3), "labels": torch.tensor([0, 1, 2, 0])}
    block = next(b for b in blocks(ROOT / "README.md", "python") if "dappr_loss" in b)
    exec(block, {"dappr_loss": dappr_loss, "dappr_uncertainty": dappr_uncertainty}, scope)
    assert scope["loss"].isfinite() and scope["out"].probs.shape == (4, 3)


def test_the_readmes_own_data_recipe_loads(tmp_path):
    from dappr_llm.text.build import build_lora
    from dappr_llm.text.data.tasks import get_task
    from dappr_llm.training import build as run

    path = tmp_path / "my.yaml"
    path.write_text(blocks(ROOT / "README.md", "yaml")[0])
    recipe = load_recipe(path)
    run.build_method(recipe)
    build_lora(recipe)
    run.build_args(recipe)
    assert get_task(recipe.data.train).name == "exam"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_are_real(page):
    """Every `dappr …` line is read by the real parser, and the recipes it names exist."""
    for block in blocks(page, "bash"):
        for line in block.splitlines():
            match = re.search(r"(?:^dappr|-m dappr_llm) (\w.*)", line.split("  #")[0])
            if match:
                args = build_parser().parse_args(
                    re.sub(r"'([^']*)'", r"\1", match[1].strip()).replace(": true", ":true").split()
                )
                if args.verb == "train" and args.recipe != "my.yaml":
                    find_recipe(args.recipe)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page}: {target}"


# --- files that the pages name ---------------------------------------------------------------------------------------

PACKAGE = ROOT / "dappr_llm"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
OUTSIDE = ("tests", "scripts", "recipes", "docs", "dappr_llm")  # folders of the repository; others are the package's


def named_files(text):
    """Paths `folder/file.py` that a page names; `foo` stands for what a reader would add."""
    paths = re.findall(r"(?<![\w./*-])((?:\w+/)+\w+\.py)\b", text)
    return sorted({path for path in paths if "foo" not in Path(path).stem})


def missing_files(text):
    return [p for p in named_files(text) if not ((ROOT if p.split("/")[0] in OUTSIDE else PACKAGE) / p).is_file()]


def files_in_tree(text):
    """Files in a picture of the tree: four spaces per level, folders end in `/`, words follow after two spaces."""
    folders, found = [], []
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 4
        names = re.split(r" {2,}", line.strip())[0].split()
        if names and names[0].endswith("/"):
            folders = [*folders[:depth], names[0]]
        else:
            found += ["".join(folders[:depth]) + name for name in names]
    return found


def test_names_of_missing_files_are_found():
    text = "`core/files.py`, tests/test_docs.py, `methods/foo.py`, `core/gone.py`, <br>scripts/gone.py, `docs/a.md`"
    assert named_files(text) == ["core/files.py", "core/gone.py", "scripts/gone.py", "tests/test_docs.py"]
    assert missing_files(text) == ["core/gone.py", "scripts/gone.py"]
    assert files_in_tree("core/   words\n    a.py b.py  more words\n    sub/  words\n        c.py\nd/\n    e.py") == [
        "core/a.py", "core/b.py", "core/sub/c.py", "d/e.py",
    ]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_files_exist(page):
    assert missing_files(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_modules_exist(page):
    """`dappr_llm.folder.module`, a name in it, or a public name of the package."""
    import dappr_llm

    for path in set(re.findall(r"\bdappr_llm((?:\.\w+)+)", page.read_text())):
        parts = path.strip(".").split(".")
        if parts[0] in dappr_llm.__all__:
            continue
        places = [PACKAGE.joinpath(*parts[:count]) for count in range(len(parts), 0, -1)]
        assert any(place.with_suffix(".py").is_file() for place in places[:2]) or places[0].is_dir(), path


def test_the_tree_names_every_file_of_the_package_once():
    there = [p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if not p.name.startswith("__")]
    (picture,) = blocks(ARCHITECTURE, "text")
    named = files_in_tree(picture)
    assert set(named) ^ set(there) == set()
    assert len(named) == len(there)
