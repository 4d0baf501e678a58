"""What the README shows must be true: its code compiles, its recipe loads, its commands exist."""

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
