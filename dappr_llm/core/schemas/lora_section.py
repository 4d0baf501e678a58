"""`lora:` of a recipe, and what an `adapter_config.json` may ask for: the fields of `peft.LoraConfig`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, with_config
from typing_extensions import TypedDict

from ..errors import UserError
from ..regexes import check_regex
from .types import STRICT, Count, Dropout, Name, Natural, Options, Positive, Text

MOST_RANKS = 4096
Rank = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Layer = Annotated[int, Field(ge=0, le=100_000)]


def _pattern(text: str) -> str:
    try:
        check_regex(text, "", "it")
    except UserError as error:
        raise ValueError(str(error).removeprefix(": ")) from None
    return text


def _initial(value: Any) -> Any:
    known = ("gaussian", "eva", "olora", "pissa", "corda", "loftq", "orthogonal", "mica", "lora_ga")
    number = str(value).removeprefix("pissa_niter_") if isinstance(value, str) else ""
    if isinstance(value, bool) or value in known or (value != number and number.isdigit() and len(number) < 5):
        return value
    raise ValueError(f"allowed: true, false, {', '.join(known)} or pissa_niter_N")


Pattern = Annotated[str, Field(max_length=1000), AfterValidator(_pattern)]
Patterns = Annotated[list[Name], Field(max_length=10_000)]
TokenRows = Annotated[list[Natural], Field(min_length=1)]  # PEFT trains with none until the first step fails


@with_config(STRICT)
class LoraSection(TypedDict, total=False):
    """All that `lora:` may say; see `peft.LoraConfig` for what each key means."""

    task_type: Literal["CAUSAL_LM", "SEQ_CLS", "FEATURE_EXTRACTION"] | None
    peft_type: Literal["LORA"] | None
    auto_mapping: Options | None
    peft_version: Name | None
    base_model_name_or_path: Text | None
    revision: Name | None
    inference_mode: bool
    r: Rank
    target_modules: Pattern | Patterns | None
    exclude_modules: Pattern | Patterns | None
    lora_alpha: Positive
    lora_dropout: Dropout
    fan_in_fan_out: bool
    bias: Literal["none", "all", "lora_only"]
    use_rslora: bool
    modules_to_save: Patterns | None
    init_lora_weights: Annotated[Any, BeforeValidator(_initial)]
    layers_to_transform: Layer | Annotated[list[Layer], Field(max_length=10_000)] | None
    layers_pattern: Pattern | Annotated[list[Pattern], Field(max_length=10_000)] | None  # each is matched
    rank_pattern: Annotated[dict[Pattern, Rank], Field(max_length=10_000)] | None
    alpha_pattern: Annotated[dict[Pattern, Positive], Field(max_length=10_000)] | None
    megatron_config: Options | None
    megatron_core: Name | None
    trainable_token_indices: TokenRows | dict[str, TokenRows] | None
    loftq_config: Options | None
    eva_config: Options | None
    corda_config: Options | None
    lora_ga_config: Options | None
    use_dora: bool
    velora_config: Options | None
    alora_invocation_tokens: list[Natural] | None
    use_qalora: bool
    qalora_group_size: Count
    monteclora_config: Options | None
    layer_replication: list[tuple[Layer, Layer]] | None
    runtime_config: Options
    lora_bias: bool
    target_parameters: Patterns | None
    use_bdlora: Options | None
    arrow_config: Options | None
    kasa_config: Options | None
    ensure_weight_tying: bool
