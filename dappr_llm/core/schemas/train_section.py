"""`train:` of a recipe: the fields of `DAPPrConfig`, that is of `TrainingArguments` and our own, with their ranges."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, with_config
from typing_extensions import Required, TypedDict

from .types import MOST, STRICT, Count, Dropout, Name, Names, Natural, Number, Options, Positive, Seed, Text, Weight

Strategy = Literal["no", "steps", "epoch"]
Steps = Annotated[float, Field(ge=0, le=MOST)]  # below 1: a share of all steps
Batch = Annotated[int, Field(ge=1, le=1_000_000)]
Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
]  # fmt: skip
Optimizer = Literal[
    "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor", "adamw_anyprecision",
    "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "sgd", "adagrad", "adamw_bnb_8bit", "adamw_8bit",
    "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit",
    "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise",
    "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "lomo", "adalomo", "grokadamw",
    "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw", "apollo_adamw_layerwise",
    "stable_adamw",
]  # fmt: skip


def _pairs(text: str) -> str:
    for part in text.replace(" ", "").split(",") if text else []:
        key, _, value = part.partition("=")
        if not key or not value or "=" in value:
            raise ValueError(f"{part!r} is not of the form name=value; allowed: name=value,name=value, … or null")
    return text


OptimizerArguments = Annotated[Text, AfterValidator(_pairs)]  # transformers splits it at commas and equals signs
ClassWeights = Annotated[dict[str | int | float | bool, Positive], Field(min_length=1, max_length=100_000)]
LogLevel = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]


@with_config(STRICT)
class StepSchedule(TypedDict, total=False):
    """The rate times `factor` after `every` epochs."""

    kind: Required[Literal["step"]]
    every: Count
    factor: Positive


@with_config(STRICT)
class CosineSchedule(TypedDict, total=False):
    """Linear from `start` over `warmup` epochs, then a cosine down to `floor`; `lag` epochs behind."""

    kind: Required[Literal["cosine"]]
    warmup: Natural
    start: Weight
    floor: Weight
    lag: Natural


@with_config(STRICT)
class PromptSection(TypedDict, total=False):
    """Fields of `dappr_llm.text.prompt.Prompt` that a recipe may set."""

    instruction: Text
    template: Text
    choice: Text
    chat: bool
    system: Text | None


@with_config(STRICT)
class OwnArguments(TypedDict, total=False):
    """What `DAPPrConfig` adds to `TrainingArguments`, or reads in a way of its own."""

    max_length: Annotated[int, Field(ge=1, le=1_000_000)]
    truncation: Literal["start", "end", "head_tail"] | None
    num_choices: Annotated[int, Field(ge=2, le=26)] | None
    evidence_offset: Number | Literal["auto"] | None
    head_init: Literal["auto", "random", "probe"]
    prompt: PromptSection | None
    on_nonfinite: Literal["stop", "skip"]
    epoch_rows: Count | None
    monitor_ood_rows: Natural
    packing: bool
    share_prefix: bool
    eval_tokens: Natural
    trunk_cache: Text | None
    gradient_checkpointing: bool | Literal["auto"]
    epoch_schedule: Annotated[StepSchedule | CosineSchedule, Field(discriminator="kind")] | None
    class_weights: Literal["balanced"] | ClassWeights | None
    eval_every_epochs: Count | None
    metric_for_best_model: Name | None
    optim_args: OptimizerArguments | None
    remove_unused_columns: Literal[False]  # the collator reads columns that no forward() names


class TrainSection(OwnArguments, total=False):
    """All that `train:` may say; see `DAPPrConfig` for what each key means."""

    output_dir: Text | None
    per_device_train_batch_size: Batch
    num_train_epochs: Annotated[float, Field(ge=0, le=1_000_000)]
    max_steps: Annotated[int, Field(ge=-1, le=MOST)]
    learning_rate: Annotated[float, Field(ge=0, le=1e6)]
    lr_scheduler_type: Scheduler
    lr_scheduler_kwargs: Options | None
    warmup_steps: Steps
    optim: Optimizer
    weight_decay: Weight
    adam_beta1: Dropout
    adam_beta2: Dropout
    adam_epsilon: Positive
    optim_target_modules: Text | Names | None
    gradient_accumulation_steps: Batch
    average_tokens_across_devices: bool
    max_grad_norm: Weight
    label_smoothing_factor: Dropout
    bf16: bool
    fp16: bool
    bf16_full_eval: bool
    fp16_full_eval: bool
    tf32: bool | None
    gradient_checkpointing_kwargs: Options | None
    torch_compile: bool
    torch_compile_backend: Name | None
    torch_compile_mode: Name | None
    use_liger_kernel: bool
    liger_kernel_config: dict[str, bool] | None
    use_cache: bool
    neftune_noise_alpha: Weight | None
    torch_empty_cache_steps: Count | None
    auto_find_batch_size: bool
    logging_strategy: Strategy
    logging_steps: Steps
    logging_first_step: bool
    log_on_each_node: bool
    logging_nan_inf_filter: bool
    include_num_input_tokens_seen: bool | Literal["all", "non_padding", "no"]
    log_level: LogLevel
    log_level_replica: LogLevel
    disable_tqdm: bool | None
    report_to: Name | Names | None
    run_name: Text | None
    project: Name
    trackio_space_id: Name | None
    trackio_bucket_id: Name | None
    trackio_static_space_id: Name | Literal[False] | None
    eval_strategy: Strategy
    eval_steps: Steps | None
    eval_delay: Steps
    per_device_eval_batch_size: Batch
    prediction_loss_only: Literal[False]
    eval_on_start: bool
    eval_do_concat_batches: Literal[True]  # our metrics are made of whole columns
    eval_use_gather_object: bool
    eval_accumulation_steps: Count | None
    include_for_metrics: Names
    batch_eval_metrics: Literal[False]
    save_only_model: bool
    save_strategy: Literal["no", "steps", "epoch", "best"]
    save_steps: Steps
    save_on_each_node: bool
    save_total_limit: Natural | None
    enable_jit_checkpoint: bool
    push_to_hub: bool
    hub_token: None  # a secret: it comes from `hf auth login` or HF_TOKEN
    hub_private_repo: bool | None
    hub_model_id: Name | None
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"]
    hub_always_push: bool
    hub_revision: Name | None
    load_best_model_at_end: bool
    greater_is_better: bool | None
    ignore_data_skip: bool
    restore_callback_states_from_checkpoint: bool
    full_determinism: bool
    seed: Seed
    data_seed: Seed | None
    use_cpu: bool
    accelerator_config: Options | None
    parallelism_config: None  # an object of accelerate's, which a recipe cannot write down
    dataloader_drop_last: bool
    dataloader_num_workers: Annotated[int, Field(ge=0, le=128)]  # each is a process
    dataloader_pin_memory: bool
    dataloader_persistent_workers: bool
    dataloader_prefetch_factor: Annotated[int, Field(ge=1, le=10_000)] | None
    dataloader_multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None
    dataloader_in_order: bool
    label_names: Names | None
    train_sampling_strategy: Literal["random", "sequential", "group_by_length", "batch_rebalance"]
    length_column_name: Name
    ddp_find_unused_parameters: bool | None
    ddp_bucket_cap_mb: Count | None
    ddp_broadcast_buffers: bool | None
    ddp_static_graph: bool | None
    ddp_backend: Literal["nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"] | None
    ddp_timeout: Count
    fsdp: Text | None
    fsdp_config: Options | Text | None
    deepspeed: Options | Text | None
    debug: Text | list[Literal["underflow_overflow", "tpu_metrics_debug"]]
    skip_memory_metrics: bool
    do_train: bool
    do_eval: bool
    do_predict: bool
    resume_from_checkpoint: Text | None
    local_rank: Annotated[int, Field(ge=-1, le=1_000_000)]
