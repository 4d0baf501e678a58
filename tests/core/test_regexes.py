"""Patterns that could take for ever are refused before they are run."""

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.core.regexes import MOST_CHARACTERS, check_regex


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a*)*b",
        "(a|a)*$",
        "(a|ab)+c",
        "(.*a){20}",
        "(a?){50}a{50}",
        "a?" * 30 + "a" * 30,
        "(a|a)" * 30 + "b",
        ".*.*.*.*.*!",
        r"(a)\1",
        r"(a)?(?(1)b|c)",
        "(?:){1000000000}",
        "a{99999}",
        "a" * (MOST_CHARACTERS + 1),
        "(?=(a+)+$)a",
        "(",
        "*",
        "(" * 400 + ")" * 400 + "[",
        None,
        3,
    ],
)
def test_slow_and_broken_patterns_are_refused(pattern):
    with pytest.raises(UserError, match="adapter_config.json: target_modules"):
        check_regex(pattern, "adapter_config.json", "target_modules")


@pytest.mark.parametrize(
    "pattern",
    [
        r".*attn\.(qkv|proj)",
        r"model\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj",
        r"(.*\.)?layers\.(1[6-9]|2[0-9]|3[01])\..*(q_proj|v_proj)$",
        r"^(?!.*patch_embed).*(qkv|proj|fc1|fc2).*$",
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj|"
        r"out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\."
        r"(?:(?:q_proj|k_proj)))",
        "all-linear",
        "q_proj",
    ],
)
def test_patterns_that_people_use_are_accepted(pattern):
    check_regex(pattern, "adapter_config.json", "target_modules")
