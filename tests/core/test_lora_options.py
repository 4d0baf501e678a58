"""LoRA options that others wrote: types, ranks, patterns, and what would load code."""

import pytest

from dappr_llm.core.errors import UserError
from dappr_llm.core.lora_options import check_lora_options, largest_rank


@pytest.mark.parametrize(
    "options",
    [
        {"r": 5000},
        {"r": 0},
        {"r": True},
        {"r": "8"},
        {"rank_pattern": {"q_proj": 10**9}},
        {"rank_pattern": {"(a+)+": 4}},
        {"rank_pattern": ["q_proj"]},
        {"alpha_pattern": {"q_proj": float("inf")}},
        {"alpha_pattern": {"(a|a)*b": 4}},
        {"target_modules": "(.*a){30}"},
        {"target_modules": 3},
        {"target_modules": [3]},
        {"target_modules": ["x"] * 20_000},
        {"exclude_modules": "(x*)*y"},
        {"layers_pattern": ["(x*)*y"]},
        {"layers_pattern": "(x*)*y"},
        {"layers_to_transform": ["1"]},
        {"modules_to_save": "lm_head"},
        {"lora_alpha": float("nan")},
        {"lora_dropout": 2.0},
        {"bias": "some"},
        {"use_dora": "yes"},
        {"megatron_config": {"x": 1}},
        {"megatron_core": "antigravity"},
        {"layer_replication": [[0, 32]] * 1000},
        {"corda_config": {"cache_file": "evil.pt"}},
    ],
)
def test_unsafe_options_are_refused_with_their_key(options):
    with pytest.raises(UserError, match=f"^a.json: {next(iter(options))}"):
        check_lora_options(options, "a.json")


def test_usual_options_are_accepted():
    check_lora_options(
        {
            "r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": {"q_proj", "v_proj"}, "bias": "none",
            "rank_pattern": {r"layers\.0\..*": 64}, "alpha_pattern": {}, "modules_to_save": ["lm_head"],
            "layers_to_transform": [0, 1], "layers_pattern": "layers", "megatron_core": "megatron.core",
            "exclude_modules": None, "loftq_config": {}, "use_rslora": True,
        },
        "a.json",
    )  # fmt: skip
    assert largest_rank({"r": 16, "rank_pattern": {"x": 64}}) == 64
