import json

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.core.recipe import build_recipe, load_recipe
from dappr_llm.core.secrets import MASK, find_secrets, is_secret_name, mask, refuse_secrets

# Assembled here, so that no scanner of repositories takes them for real ones.
SECRETS = {
    "hf": "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
    "hf_short": "hf_" + "abc123DEF456",
    "openai": "sk-" + "proj-abcDEF123456ghiJKL789",
    "anthropic": "sk-" + "ant-api03-" + "a1B2" * 8,
    "github": "ghp_" + "a1B2" * 9,
    "github_pat": "github_pat_" + "11ABCDEFG0" * 3,
    "aws": "AKIA" + "ABCDEFGH01234567",
    "jwt": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJ" + "zdWIiOiIxMjM0In0.abc_DEF-123",
    "wandb": "0123456789abcdef" * 2 + "01234567",
}


@pytest.mark.parametrize("name", ["hub_token", "push_to_hub_token", "token", "model.token", "--hub-token", "API_KEY",
                                  "apiKey", "openai_api_key", "password", "db_passwd", "client_secret", "accessToken",
                                  "aws_secret_access_key", "HF_TOKEN", "use_auth_token", "credentials"])  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["eval_tokens", "letter_token_ids", "extra_token_ids", "max_tokens", "tokenizer", "eos_token",
                                  "pad_token", "max_new_tokens", "num_input_tokens_seen", "token_type_ids", "keys", "seed",
                                  "include_num_input_tokens_seen", "tokens_per_second", "bos_token_id", "passes", ""])  # fmt: skip
def test_names_that_only_look_like_it(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize("secret", [SECRETS[name] for name in SECRETS if name != "wandb"])
def test_known_shapes_are_masked_wherever_they_stand(secret):
    for text in (f"see {secret}.", f'{{"x": "{secret}"}}', f"a={secret}&b=1", f"https://x/y?q={secret}", secret):
        assert secret not in mask(text) and MASK in mask(text)
        assert find_secrets(text) and find_secrets(b"\xff\x00" + text.encode() + b"\x80")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "r.yaml", "--set", "train.hub_token=SECRET word"],
        ["push", "--token", "SECRET", "x"],
        ["push", "--token=SECRET"],
        ["--set", "model={token: SECRET, name: x}"],
        ["--set", "train.hub_token='SECRET'"],
        ["--api-key", "SECRET"],
        ["x", "Authorization: Bearer SECRET1234567890"],
        ["--data", "https://user:SECRET@host.org/x"],
        ["--data", "https://SECRET@host.org/x"],
        ["--data", "https://user:p@SECRET@host.org/x"],
    ],
)
def test_commands_are_masked(arguments):
    for masked in (" ".join(mask(arguments)), mask(" ".join(arguments)), " ".join(mask(tuple(arguments)))):
        assert "SECRET" not in masked and MASK in masked, masked
    assert len(mask(arguments)) == len(arguments)
    assert mask(["train", "r.yaml", "--set", "train.seed=3"]) == ["train", "r.yaml", "--set", "train.seed=3"]


def test_mappings_and_their_texts_are_masked():
    values = {
        "train": {"hub_token": "abc", "seed": 3, "eval_tokens": 5, "note": f"with {SECRETS['hf']}"},
        "password": 12,
    }
    values["list"] = [{"api_key": "x"}, "plain"]
    masked = mask(values)
    assert masked["train"] == {"hub_token": MASK, "seed": 3, "eval_tokens": 5, "note": f"with {MASK}"}
    assert masked["password"] == MASK and masked["list"] == [{"api_key": MASK}, "plain"]
    assert values["train"]["hub_token"] == "abc"  # a copy
    for text in (json.dumps(values), json.dumps(values, indent=2), "train:\n  hub_token: abc\n  seed: 3\n"):
        assert "abc" not in mask(text) and "3" in mask(text)
    assert json.loads(mask(json.dumps(values)))["train"]["seed"] == 3


def test_hex_is_a_key_only_beside_a_name():
    key = SECRETS["wandb"]
    assert mask(f"commit {key}") == f"commit {key}" and not find_secrets(f"commit {key}")
    for text in (f"WANDB_API_KEY={key}", f'"api_key": "{key}"', f"wandb_api_key: {key}"):
        assert key not in mask(text) and find_secrets(text), text


@pytest.mark.parametrize(
    "text",
    [
        "There is no Hub token: run `hf auth login` with a token that may write, or set HF_TOKEN",
        "the Hub refused the token (401): it needs the right to do this with a/b",
        "hf_pipeline.py hf_hub_download hf_transfer HF_HUB_OFFLINE=1 task-specific sk-learn risk-coverage",
        '{"eos_token": "</s>", "pad_token": "<pad>", "unk_token": {"content": "[UNK]"}, "image_token": "<image>"}',
        '{"vocab": {"password": 5, "token": 7, "secret=": 8, "api_key": 12345678}}',
        '"hub_token": "<HUB_TOKEN>", "hub_token": null, "push_to_hub_token": "***"',
        "letter_token_ids=[1, 2], max_tokens=512, eval_tokens: 100000",
        "https://huggingface.co/a/b@main ssh://git@github.com/x mailto:a@b.org s3://bucket/key",
        "bearer certificates of the secret ballot",
        "https://***@host/x Bearer *** hub_token=*** --token ***",
    ],
)
def test_what_is_no_secret_stays(text):
    assert not find_secrets(text)
    if "api_key" not in text:
        assert mask(text) == text


def test_found_by_line_and_kind_and_never_shown():
    found = find_secrets(f"first\nsecond {SECRETS['hf']}\n\npassword=hunter2-and-more\n")
    assert [(each.line, each.kind) for each in found] == [(2, "a Hugging Face token"), (4, "a value of 'password'")]
    assert SECRETS["hf"] not in repr(found) and "hunter2" not in repr(found)
    assert find_secrets("x my-own-words y", known=["my-own-words"])[0].line == 1


def test_a_token_of_the_environment_is_masked_whatever_it_looks_like(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "not shaped like one")
    assert mask("failed with not shaped like one.") == f"failed with {MASK}."
    assert find_secrets("failed with not shaped like one.")


@pytest.mark.parametrize(
    "values",
    [
        {"train": {"hub_token": "anything"}},
        {"train": {"push_to_hub_token": "anything"}},
        {"model": {"token": "anything"}},
        {"model": {"quantization": {"note": SECRETS["hf"]}}},
        {"data": {"ood": ["obqa", {"path": "https://user:pw@host/x.jsonl"}]}},
        {"description": f"uses {SECRETS['openai']}"},
    ],
)
def test_recipes_hold_no_secrets(values):
    for check in (lambda: refuse_secrets(values, "my.yaml"), lambda: build_recipe(values, "my.yaml")):
        with pytest.raises(UserError, match="my.yaml: .*hf auth login.*HF_TOKEN") as error:
            check()
        assert "anything" not in str(error.value) and SECRETS["hf"] not in str(error.value)


def test_neither_file_nor_base_nor_setting_holds_a_token(tmp_path):
    plain = "data: {train: everyday}\nmethod: {name: dappr}\n"
    (tmp_path / "plain.yaml").write_text(plain + "train: {hub_token: null}\n")
    (tmp_path / "with.yaml").write_text(plain + "train: {hub_token: abc}\n")
    (tmp_path / "child.yaml").write_text("base: with.yaml\n")
    assert load_recipe(tmp_path / "plain.yaml").train == {"hub_token": None}
    for name, settings in (
        ("with", []),
        ("child", []),
        ("plain", ["train.hub_token=abc"]),
        ("plain", ["model.token=abc"]),
    ):
        with pytest.raises(UserError, match="token is a secret"):
            load_recipe(tmp_path / f"{name}.yaml", settings)


def test_what_a_run_writes_down_is_masked(monkeypatch, tmp_path):
    """The command of results.json (and so of the card), and recipe.yaml of a recipe that was built in Python."""
    import sys

    import yaml

    from dappr_llm.core.recipe import DataSection, Recipe
    from dappr_llm.evaluation.prediction_table import PredictionTable
    from dappr_llm.evaluation.reporting.run_results import finish

    given = ["train", "my recipe.yaml", "--set", "train.hub_token=abcdef", "--set", f"train.run_name={SECRETS['hf']}"]
    monkeypatch.setattr(sys, "argv", ["dappr", *given])
    table = PredictionTable.from_arrays(["a", "b"], [0, 1], [[0.9, 0.1], [0.2, 0.8]], meta={"split": "test"})
    finish(tmp_path, {"mine": table}, "title", resamples=0, quiet=True)
    text = (tmp_path / "results.json").read_text()
    assert "abcdef" not in text and SECRETS["hf"] not in text
    command = json.loads(text)["meta"]["command"]
    assert command.startswith("dappr train 'my recipe.yaml' --set 'train.hub_token=***'")
    recipe = Recipe(data=DataSection(train="everyday"), train={"hub_token": "abcdef", "seed": 3})
    assert yaml.safe_load(recipe.to_yaml())["train"] == {"hub_token": MASK, "seed": 3}
