"""Recipes: inheritance, overrides, unknown keys, and every shipped file."""

from pathlib import Path

import pytest
import yaml

from dappr_llm.commands.main import main
from dappr_llm.core.errors import UserError, nearest
from dappr_llm.core.recipe import find_recipe, list_recipes, load_recipe, read_merged, read_yaml, recipes_dir

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


def test_bases_merge_from_left_to_right_and_the_file_comes_last(tmp_path):
    write(tmp_path / "base.yaml", "name: b\ndescription: d\ndata: {train: obqa}\ntrain: {seed: 1, max_steps: 5}\n")
    write(tmp_path / "methods/iedl.yaml", "method: {name: iedl, fisher_weight: 1}\ntrain: {seed: 2, bf16: true}\n")
    write(tmp_path / "methods/kl.yaml", "method: {reg_weight: 3, schedule: linear}\ntrain: {seed: 3}\n")
    text = "base: [../base.yaml, ../methods/iedl.yaml, ../methods/kl.yaml]\nmethod: {schedule: constant}\n"
    recipe = load_recipe(write(tmp_path / "bench/iedl.yaml", text))
    assert recipe.method == {"name": "iedl", "fisher_weight": 1, "reg_weight": 3, "schedule": "constant"}
    assert recipe.train == {"seed": 3, "max_steps": 5, "bf16": True}
    assert (recipe.name, recipe.description) == ("bench-iedl", "")  # a base's own are not inherited


@pytest.mark.parametrize("order", ["[base.yaml, a.yaml, kl.yaml]", "[base.yaml, kl.yaml, a.yaml]"])
def test_options_without_a_method_join_the_method_of_another_base(tmp_path, order):
    write(tmp_path / "base.yaml", "data: {train: obqa}\n")
    write(tmp_path / "a.yaml", "method: {name: edl}\n")
    write(tmp_path / "kl.yaml", "method: {reg_weight: 1}\n")
    assert load_recipe(write(tmp_path / "r.yaml", f"base: {order}\n")).method == {"name": "edl", "reg_weight": 1}


def test_options_of_another_method_in_a_list_of_bases_do_not_carry_over(tmp_path):
    write(tmp_path / "one.yaml", "data: {train: obqa}\nmethod: {name: ce, passes: 3}\n")
    write(tmp_path / "two.yaml", "method: {name: edl}\n")
    assert load_recipe(write(tmp_path / "r.yaml", "base: [one.yaml, two.yaml]\n")).method == {"name": "edl"}


def test_two_bases_may_share_a_third(tmp_path):
    write(tmp_path / "root.yaml", "data: {train: obqa}\ntrain: {seed: 1}\n")
    write(tmp_path / "left.yaml", "base: root.yaml\ntrain: {max_steps: 5}\n")
    write(tmp_path / "right.yaml", "base: root.yaml\ntrain: {bf16: true}\n")
    recipe = load_recipe(write(tmp_path / "r.yaml", "base: [left.yaml, right.yaml, root.yaml]\n"))
    assert recipe.train == {"seed": 1, "max_steps": 5, "bf16": True}


def test_a_cycle_through_other_files_names_the_file(tmp_path):
    write(tmp_path / "fine.yaml", "data: {train: obqa}\n")
    write(tmp_path / "back.yaml", "base: r.yaml\n")
    with pytest.raises(UserError, match=r"r\.yaml: its `base:` leads back to itself"):
        load_recipe(write(tmp_path / "r.yaml", "base: [fine.yaml, back.yaml]\n"))


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
        ("base: [r.yaml, nowhere.yaml]\n", "leads back to itself"),
        ("base: []\n", "data.train is missing"),
        ("base: [nowhere.yaml]\n", r"r\.yaml: its base 'nowhere.yaml' does not exist"),
        ("base: 3\n", r"r\.yaml: `base:` is a path or a list of paths, found 3"),
        ("base: [{a: b}]\n", r"r\.yaml: `base:` is a path or a list of paths, found \{'a': 'b'\}"),
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
    with pytest.raises(UserError, match="did you mean 'obqa_mistral7b/dappr' or ") as caught:
        load_recipe("obqa_mistral7b/dapr")
    assert sum(name in str(caught.value) for name in map(repr, SHIPPED)) == 5


def test_an_unknown_recipe_names_the_nearest_five_also_of_ones_own(tmp_path, monkeypatch):
    for name in ("tickets.yaml", "mine/tickets.yml", "mine/other.yaml"):
        write(tmp_path / name, "data: {train: obqa}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"did you mean 'tickets.yaml' or ") as caught:
        find_recipe("tikets.yaml")
    assert str(caught.value).count("'") == 2 * 5
    with pytest.raises(UserError, match=r"did you mean 'mine/tickets.yml' or "):
        find_recipe("mine/ticket.yaml")
    with pytest.raises(UserError, match=r"files here: tickets.yaml; folders: cifar10, "):
        find_recipe("zzzz")


def test_a_recipe_like_no_other_names_the_folders_only():
    with pytest.raises(UserError, match="folders: cifar10, .*mnist, .*see `dappr recipes`") as caught:
        load_recipe("zzzz")
    assert "methods" not in str(caught.value) and "/" not in str(caught.value)


def test_a_long_list_of_valid_names_is_cut():
    assert nearest("zzzz", range(12)) == "valid: 0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9"
    assert nearest("zzzz", range(170)).endswith(", …, 170 in all") and len(nearest("zzzz", range(170))) < 90


@pytest.mark.parametrize("name", ["methods/edl", "recipes/methods/edl.yaml", str(recipes_dir() / "methods/edl.yaml")])
def test_files_of_coefficients_are_no_recipes(name, capsys):
    assert main(["train", name]) == 2
    assert "holds only a method's coefficients" in capsys.readouterr().err
    assert not [shipped for shipped in SHIPPED if shipped.startswith("methods/")]


def test_methods_coefficients_stand_once():
    """A `method:` section that two recipes have in common belongs into `recipes/methods`."""
    bodies: dict[str, list[str]] = {}
    for path in recipes_dir().rglob("*.yaml"):
        method = read_yaml(path).get("method")
        if method is not None:
            bodies.setdefault(yaml.safe_dump(method), []).append(path.relative_to(recipes_dir()).as_posix())
    of_recipes = [files for files in bodies.values() if not all(file.startswith("methods/") for file in files)]
    # The quickstart is the file that newcomers open and copy, so it has its method in full.
    assert sum(len(files) for files in of_recipes) <= 5, of_recipes
    assert not [files for files in of_recipes if len(files) > 1], of_recipes


def test_every_file_of_coefficients_is_used():
    used = set()
    for path in recipes_dir().rglob("*.yaml"):
        bases = read_yaml(path).get("base") or []
        used |= {(path.parent / base).resolve() for base in ([bases] if isinstance(bases, str) else bases)}
    assert set((recipes_dir() / "methods").resolve().glob("*.yaml")) <= used


@pytest.fixture
def listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def listing(*words):
        assert main(["recipes", *words]) == 0
        return capsys.readouterr().out.splitlines()

    return listing


def test_the_listing_is_short_with_text_first(listed):
    lines = listed()
    assert len(lines) <= 44 and max(map(len, lines)) <= 80
    heads = [line.split()[0] for line in lines if line[:1].strip()]
    assert heads[:5] == ["quickstart", "binding", "obqa_mistral7b/", "obqa_smollm2/", "everyday_smollm2/"]
    names = {name.split("/")[0] + "/" for name in SHIPPED if "/" in name}
    assert {head for head in heads if head.endswith("/")} == names
    (cub,) = [line for line in lines if line.startswith("cub/")]
    assert "18 recipes, 2 tables" in cub and "CUB-200-2011 with ResNet-50" in cub


def test_the_listing_holds_every_name(listed):
    found, folder = set(), ""
    for line in listed():
        if line.startswith("  "):
            found |= {folder + word for word in line.replace(";", " ").split()}
        elif line:
            folder = line.split()[0]
            found |= {folder}
    assert {*SHIPPED, *(name for name, _, _ in list_recipes(tables=True))} <= found


def test_a_filter_shows_descriptions(listed):
    lines = listed("OBQA")
    names = [line.split()[1] for line in lines if line.startswith(("train ", "sweep "))]
    assert names[0] == "obqa_mistral7b/ce" and names[-1] == "obqa_smollm2/table" and len(names) == 15
    assert "DAPPr on OpenBookQA, Mistral-7B (one 24 GB" in "\n".join(lines) and max(map(len, lines)) <= 80
    assert "train cub/ce  " in "\n".join(listed("cub-200"))  # no name has it: descriptions are searched


def test_a_whole_name_shows_the_merged_values(listed):
    for name in ("mnist/edl", "quickstart", "cub/duq"):
        head, *rest = listed(name)
        assert head == f"dappr train {name}"
        text = "\n".join(rest[rest.index("") :])
        values = {key: value for key, value in read_merged(find_recipe(name)).items() if key != "description"}
        assert yaml.safe_load(text) == values
    assert "  - {recipe: edl, label: EDL}" in listed("mnist/ablations")


def test_a_filter_without_a_match_names_the_three_nearest(capsys):
    for wrong, near in (("obqq", "'obqa_mistral7b' or 'obqa_smollm2'"), ("mnist/edll", "'mnist/edl'")):
        assert main(["recipes", wrong]) == 2
        error = capsys.readouterr().err
        assert near in error and error.count("'") == 2 + 6


def test_shipped_recipes_are_described():
    assert {"quickstart", "obqa_mistral7b/dappr", "obqa_mistral7b/ce", "obqa_smollm2/dappr"} <= set(SHIPPED)
    assert all(description for _, description, _ in list_recipes())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_builds(name):
    """All sections reach their real classes: method, LoraConfig, DAPPrConfig, tasks."""
    from dappr_llm.inference.modality import find_task
    from dappr_llm.text.build import build_lora
    from dappr_llm.training import build as run

    recipe = load_recipe(name)
    recipe.train.pop("bf16", None)  # refused without a GPU
    run.build_method(recipe)
    build_lora(recipe)
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


def test_shipped_recipes_leave_nothing_to_the_trainer():
    """What a trainer would choose may change from one version to the next; what the recipes stand for may not."""
    from dappr_llm.methods import get_method
    from dappr_llm.methods.base import reads_evidence
    from dappr_llm.scale.sweep import job_recipe, load_table

    recipes = {name: load_recipe(name) for name, _, _ in list_recipes()}
    for name, _, _ in list_recipes(tables=True):
        recipes |= {f"{name}: {key}": job_recipe(job) for key, job in load_table(name).jobs.items()}
    checked = 0
    for name, recipe in recipes.items():
        options = dict(recipe.method)
        method = get_method(options.pop("name"), **options)
        assert recipe.chosen == [], name
        if recipe.model.backbone is None and reads_evidence(method):
            assert recipe.train.get("evidence_offset") is not None, name
            assert method.open_options() == (), name
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("path", sorted(recipes_dir().glob("accelerate/*.yaml")), ids=lambda p: p.stem)
def test_launch_files_are_read_by_accelerate(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]


@pytest.mark.parametrize(
    "section, words",
    [("train: {learning_rat: 1}", "'train.learning_rat'.*'learning_rate'"), ("lora: {rank: 3}", "'lora.rank'"),
     ("train: {eval_strategy: sometimes}", "train.eval_strategy is 'sometimes'.*no, steps, epoch"), ("method: {name: daper}", "'dappr'")],
)  # fmt: skip
def test_sections_are_checked_against_their_classes(tmp_path, section, words):
    with pytest.raises(UserError, match=words):
        load_recipe(write(tmp_path / "r.yaml", f"data: {{train: obqa}}\n{section}\n"))


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


@pytest.mark.parametrize(
    "text, words",
    [
        ("a: &a [1, 1]\n" + "\n".join(f"b{i}: &b{i} [*{'a' if i == 0 else f'b{i - 1}'}, *{'a' if i == 0 else f'b{i - 1}'}]" for i in range(40)), "more than 100,000 values with its aliases written out"),
        ("a: &a\n  b: *a\n", "line 1: an alias holds itself"),
        ("[" * 5000, "nested too deeply|not valid YAML"),
        ("a: 2026-13-45\n", "not valid YAML"),
        ("a: !!python/object/apply:os.system [true]\n", "line 1: not valid YAML"),
        ("x: " + "y" * 1_000_001, "longer than 1,000,000 characters"),
        ("? [a]\n: b\n", "line 1: not valid YAML"),
        ("a: \x00\n", "not valid YAML"),
    ],
)  # fmt: skip
def test_hostile_yaml_is_one_sentence(tmp_path, text, words):
    with pytest.raises(UserError, match=words) as caught:
        load_recipe(write(tmp_path / "r.yaml", text))
    assert "\n" not in str(caught.value)
