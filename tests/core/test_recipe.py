"""Recipes: inheritance, overrides, unknown keys, and every shipped file."""

from pathlib import Path

import pytest
import yaml

from dappr_llm.core.errors import UserError
from dappr_llm.core.recipe import find_recipe, list_recipes, load_recipe, recipes_dir

SHIPPED = [name for name, _, _ in list_recipes()]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_inheritance_and_overrides(tmp_path):
    write(
        tmp_path / "base.yaml", "data: {train: obqa}\nmethod: {name: ce, passes: 3}\ntrain: {seed: 1, max_steps: 5}\n"
    )
    path = write(
        tmp_path / "mine.yaml", "base: base.yaml\nmethod: {name: dappr, reg_weight: 2e-4}\ntrain: {seed: 2}\n"
    )
    recipe = load_recipe(path, ["train.seed=3", "data.ood=[arc_c]", "model.quantization.load_in_4bit=true"])
    assert recipe.method == {"name": "dappr", "reg_weight": 2e-4}  # another method's options do not carry over
    assert recipe.train == {"seed": 3, "max_steps": 5}
    assert recipe.data.train == "obqa" and recipe.data.ood == ["arc_c"]
    assert recipe.model.quantization == {"load_in_4bit": True}
    assert recipe.output_dir == Path("runs") / f"{tmp_path.name}-mine"


def test_numbers_without_a_dot_are_numbers(tmp_path):
    path = write(tmp_path / "r.yaml", "data: {train: obqa}\ntrain: {learning_rate: 5e-5, weight_decay: 1E-3}\n")
    recipe = load_recipe(path, ["train.max_grad_norm=2e1"])
    assert recipe.train == {"learning_rate": 5e-5, "weight_decay": 1e-3, "max_grad_norm": 20.0}


def test_words_stay_words(tmp_path):
    path = write(tmp_path / "r.yaml", "data: {train: obqa}\ntrain: {save_strategy: no, bf16: true, seed: 0}\n")
    assert load_recipe(path).train == {"save_strategy": "no", "bf16": True, "seed": 0}


def test_resolved_recipe_reads_back(tmp_path):
    recipe = load_recipe(find_recipe("obqa_mistral7b/dappr"))
    again = load_recipe(write(tmp_path / "recipe.yaml", recipe.to_yaml()))
    assert again == recipe


@pytest.mark.parametrize(
    "text, words",
    [
        ("data: {train: obqa}\nmodle: {}\n", "unknown key 'modle'.*'model'"),
        ("data: {train: obqa, odd: []}\n", "unknown key 'data.odd'.*'ood'"),
        ("model: {nmae: x}\ndata: {train: obqa}\n", "'model.nmae'.*'name'"),
        ("data: {train: obqa}\nmethod: {reg_weight: 1}\n", "method section needs a name"),
        ("model: {name: x}\n", "data.train is missing"),
        ("- a\n", "mapping of sections"),
        ("data: [1\n", "line 2: not valid YAML"),
        ("data: obqa\n", "section 'data' must be a mapping"),
        ("base: nowhere.yaml\n", "its base 'nowhere.yaml' does not exist"),
        ("base: r.yaml\n", "leads back to itself"),
    ],
)
def test_mistakes(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        load_recipe(write(tmp_path / "r.yaml", text))


@pytest.mark.parametrize("override", ["seed", "=3", "train.seed=[", "name.x=1"])
def test_bad_overrides(tmp_path, override):
    path = write(tmp_path / "r.yaml", "name: n\ndata: {train: obqa}\n")
    with pytest.raises(UserError, match="--set"):
        load_recipe(path, [override])


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(UserError, match="obqa_mistral7b/dappr"):
        load_recipe("obqa_mistral7b/dapr")


def test_shipped_recipes_are_described():
    assert {"quickstart", "obqa_mistral7b/dappr", "obqa_mistral7b/ce", "obqa_smollm2/dappr"} <= set(SHIPPED)
    assert all(description for _, description, _ in list_recipes())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_builds(name):
    """All sections reach their real classes: method, LoraConfig, DAPPrConfig, tasks."""
    from dappr_llm.inference import loading as run
    from dappr_llm.inference.modality import find_task

    recipe = load_recipe(name)
    recipe.train.pop("bf16", None)  # refused without a GPU
    run.build_method(recipe)
    run.build_lora(recipe)
    run.build_args(recipe)
    for task in (recipe.data.train, *recipe.data.ood):
        find_task(task, "vision" if recipe.model.backbone else "text")


def test_mistral_recipes_hold_the_published_configuration():
    dappr, ce = load_recipe("obqa_mistral7b/dappr"), load_recipe("obqa_mistral7b/ce")
    assert dappr.lora["target_modules"] == ["q_proj", "v_proj", "lm_head"] and dappr.lora["r"] == 8
    assert dappr.train["max_steps"] == 10080 and dappr.train["learning_rate"] == 5e-5
    assert (dappr.train["weight_decay"], dappr.train["max_grad_norm"]) == (1e-3, 20.0)
    assert (ce.train["weight_decay"], ce.train["max_grad_norm"]) == (0.0, 1.0)
    assert dappr.method == {"name": "dappr", "reg_weight": 2e-4, "schedule": "warmup", "warmup_epochs": 10}
    assert ce.method == {"name": "ce"}


@pytest.mark.parametrize("path", sorted(recipes_dir().glob("accelerate/*.yaml")), ids=lambda p: p.stem)
def test_launch_files_are_read_by_accelerate(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]


@pytest.mark.parametrize(
    "section, words",
    [("train: {learning_rat: 1}", "'train.learning_rat'.*'learning_rate'"), ("lora: {rank: 3}", "'lora.rank'"),
     ("train: {eval_strategy: sometimes}", "train section is not valid"), ("method: {name: daper}", "'dappr'")],
)  # fmt: skip
def test_sections_are_checked_against_their_classes(tmp_path, section, words):
    from dappr_llm.inference import loading as run

    recipe = load_recipe(write(tmp_path / "r.yaml", f"data: {{train: obqa}}\n{section}\n"))
    with pytest.raises(UserError, match=words):
        run.build_method(recipe)
        run.build_lora(recipe)
        run.build_args(recipe)


def test_mistral_methods_hold_their_coefficients():
    wanted = {
        "mc_dropout": {"name": "mc_dropout", "passes": 10},
        "edl": {"name": "edl", "reg_weight": 1.0, "schedule": "warmup", "warmup_epochs": 3},
        "iedl": {"name": "iedl", "fisher_weight": 0.05, "reg_weight": 1.0, "schedule": "warmup", "warmup_epochs": 3},
        "redl": {"name": "redl", "prior": 0.1, "reg_weight": 1.0, "schedule": "warmup", "warmup_epochs": 3},
        "ib_edl": {"name": "ib_edl", "beta": 1e-5, "draws": 20},
    }
    for name, method in wanted.items():
        recipe = load_recipe(f"obqa_mistral7b/{name}")
        assert recipe.method == method
        clip = 1.0 if name == "mc_dropout" else 20.0
        assert recipe.train["max_grad_norm"] == clip and recipe.lora["lora_dropout"] == 0.1
