"""`dappr plan`: memory, steps and tokens of a recipe, estimated from shapes; the model is built on the meta device."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ..core.errors import UserError, explained
from ..core.planned_model import PlannedModel, count
from ..core.recipe import Recipe

if TYPE_CHECKING:
    from ..methods import Method

GIB = 1 << 30
AUTOCAST = "bf16 autocast"
QUANTISED = ("8-bit", "4-bit")
_BLOCK, _SECOND = 64, 256  # bitsandbytes 4-bit: weights per scale; scales per second-level scale (double quantization)
_OPTIMIZER_BYTES = {"sgd": 0, "adafactor": 0, "lion": 4, "adamw_bnb_8bit": 2, "paged_adamw_8bit": 2, "adamw_8bit": 2}
_CARDS = (8, 12, 16, 24, 40, 48, 80)  # GiB of common GPUs


@dataclass
class Sizes:
    """Parameter counts and bytes of a model with its adapter."""

    parameters: int
    trainable: int
    linear: int  # weights of the base model's linear layers without the head: those that bitsandbytes quantises
    linear_rows: int  # their output features, each of which has a scale in 8-bit quantisation
    largest_unit: int  # parameters of the largest transformer block, or of embedding or head
    activations: int  # bytes that a forward pass keeps for the backward pass
    activations_checkpointed: int
    activations_autocast: int | None = None  # under bfloat16 autocast, for models whose weights stay in float32


@dataclass
class Plan:
    """The estimates for one recipe; bytes are per GPU."""

    recipe: str
    model: str
    sizes: Sizes
    batch: int
    length: int | None  # tokens per prompt; none for images
    accumulation: int
    gpus: int
    checkpointing: bool
    rows: int
    steps: int
    steps_per_epoch: int
    epochs: float
    tokens: int | None
    optimizer_bytes: int
    memory: dict[str, dict[str, int | None]]
    coefficients: list[tuple[int, float]] | None
    warnings: list[str] = field(default_factory=list)
    checkpointing_auto: bool = False
    example: tuple[int, ...] = ()  # shape of one example: tokens, or channels, height and width

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)


def measure(planned: PlannedModel, batch: int) -> Sizes:
    """
    Count parameters and the bytes of activations that a forward pass keeps, without allocating memory.

    Args:
        planned (`PlannedModel`):
            The model and its forward pass.
        batch (`int`):
            Batch size of the forward pass.
    """
    from ..training.memory import kept_bytes_by_block

    model, blocks = planned.model, planned.blocks
    kept, in_blocks = kept_bytes_by_block(model, lambda: planned.run(batch, False), blocks, planned.ignore)
    autocast = None
    if AUTOCAST in planned.precisions:
        autocast = kept_bytes_by_block(model, lambda: planned.run(batch, True))[0]
    inputs = len(blocks) * batch * planned.block_input
    return Sizes(
        parameters=count(model),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        linear=sum(weight.numel() for weight in planned.linear),
        linear_rows=sum(weight.shape[0] for weight in planned.linear),
        largest_unit=planned.largest_unit,
        activations=kept,
        activations_checkpointed=kept - sum(in_blocks) + inputs + max(in_blocks, default=0),
        activations_autocast=autocast,
    )


def weight_bytes(sizes: Sizes, precision: str, double: bool = True) -> int:
    """
    Bytes of all weights, the adapter in float32.

    Args:
        sizes (`Sizes`):
            From `measure`.
        precision (`str`):
            `"bf16"`, `"8-bit"` or `"4-bit"`. Quantised bases keep embeddings, norms and head in float32 while they
            train, as PEFT prepares them. `"float32"` or `"bf16 autocast"` for models that stay in float32.
        double (`bool`, *optional*, defaults to `True`):
            4-bit only: whether the scales are quantised too (double quantization).
    """
    base = sizes.parameters - sizes.trainable
    if precision in ("float32", AUTOCAST):
        return 4 * sizes.parameters
    if precision == "bf16":
        return 2 * base + 4 * sizes.trainable
    rest = 4 * (base - sizes.linear) + 4 * sizes.trainable
    if precision == "8-bit":
        return sizes.linear + 4 * sizes.linear_rows + rest
    blocks = sizes.linear / _BLOCK
    scales = blocks + 4 * blocks / _SECOND if double else 4 * blocks
    return math.ceil(sizes.linear / 2 + scales) + rest


def gpu_memory(sizes: Sizes, precision: str, preset: str, gpus: int, state: int, activations: int) -> int | None:
    """Bytes on each GPU under a launch preset; `None` for unsupported combinations of precision and preset."""
    if precision in QUANTISED and not sizes.linear:
        return None
    weights, grads = weight_bytes(sizes, precision), 4 * sizes.trainable
    unit = round(sizes.largest_unit / sizes.parameters * weights)
    if preset == "single_gpu":
        return weights + grads + state + activations
    if preset == "multi_gpu":  # DDP keeps a second copy of the gradients in its buckets
        return weights + 2 * grads + state + activations
    if preset == "zero2":
        return weights + grads + (grads + state) // gpus + activations
    if precision == "8-bit":  # 8-bit weights of bitsandbytes cannot be sharded
        return None
    return (weights + grads + state) // gpus + 2 * unit + activations  # one gathered unit in use, the next prefetched


def plan(
    recipe: Recipe, config: str | None = None, gpus: int = 4, rows: int | None = None, length: int | None = None
) -> Plan:
    """
    Estimate memory, steps and tokens of a recipe.

    Args:
        recipe (`Recipe`):
            The recipe.
        config (`str`, *optional*):
            The model's `config.json` or its folder, instead of the model named in the recipe.
        gpus (`int`, *optional*, defaults to 4):
            Number of GPUs of the multi-GPU presets; steps and tokens are those of one GPU.
        rows (`int`, *optional*):
            Number of training rows, if the data is not available.
        length (`int`, *optional*):
            Tokens per prompt; by default `train.max_length`.
    """
    from ..inference.modality import plan_model
    from ..training.build import build_args, build_method

    args = build_args(recipe)
    method = build_method(recipe)
    planned = plan_model(recipe, args, method, config, rows, length)
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    with explained(f"{recipe.name} cannot be planned"):  # a forward pass without weights, which PEFT may refuse
        sizes = measure(planned, batch)
    rows = rows or planned.rows or _rows(recipe)
    per_epoch = steps_per_epoch(rows + _auxiliary_rows(recipe, rows), batch, accumulation, args.dataloader_drop_last)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    state = _OPTIMIZER_BYTES.get(str(getattr(args.optim, "value", args.optim)), 8) * sizes.trainable
    if steps < 1:
        raise UserError(f"{recipe.name}: train.num_train_epochs leaves no step to train; there is nothing to plan")
    coefficients, warnings = _coefficients(method, steps, per_epoch, chosen=recipe.model.backbone is None)
    tokens = planned.example[0] if len(planned.example) == 1 else None
    return Plan(
        recipe=recipe.name,
        model=planned.name,
        sizes=sizes,
        batch=batch,
        length=tokens,
        accumulation=accumulation,
        gpus=gpus,
        checkpointing=bool(args.gradient_checkpointing),
        rows=rows,
        steps=steps,
        steps_per_epoch=per_epoch,
        epochs=steps / per_epoch,
        tokens=None if tokens is None else steps * batch * accumulation * tokens,
        optimizer_bytes=state,
        memory=_memory(planned, sizes, gpus, state, bool(args.gradient_checkpointing)),
        coefficients=coefficients,
        warnings=warnings,
        checkpointing_auto=args.checkpoint_if_needed,
        example=planned.example,
    )


def _memory(
    planned: PlannedModel, sizes: Sizes, gpus: int, state: int, checkpointing: bool
) -> dict[str, dict[str, int | None]]:
    """Bytes on each GPU, by preset and precision."""
    kept = sizes.activations_checkpointed if checkpointing else sizes.activations
    activations = dict.fromkeys(planned.precisions, kept)
    if sizes.activations_autocast is not None:
        activations[AUTOCAST] = sizes.activations_autocast
    return {
        preset: {name: gpu_memory(sizes, name, preset, gpus, state, size) for name, size in activations.items()}
        for preset in planned.presets
    }


def steps_per_epoch(rows: int, batch: int, accumulation: int, drop_last: bool = False) -> int:
    """Optimizer steps per epoch on one GPU."""
    batches = rows // batch if drop_last else math.ceil(rows / batch)
    return max(1, math.ceil(batches / accumulation))


def _auxiliary_rows(recipe: Recipe, rows: int) -> int:
    """Rows that `data.auxiliary` adds to every epoch, as `training.auxiliary_rows.MixedRows` does."""
    share = recipe.data.auxiliary_share
    return 0 if recipe.data.auxiliary is None else max(round(rows * share / (1 - share)), 1)


def _rows(recipe: Recipe) -> int:
    """Number of training rows, counted in the data."""
    from ..training.build import build_rows

    try:
        return len(build_rows(recipe)[0])
    except UserError as error:
        raise UserError(f"{error} (or say how many training rows there are: --rows N)") from None


def _coefficients(
    method: Method, steps: int, per_epoch: int, chosen: bool
) -> tuple[list[tuple[int, float]] | None, list[str]]:
    """
    The regulariser's coefficient in each epoch, and warnings about it.

    `None` for methods without a schedule, and where training chooses what was not given (`chosen`).
    """
    from ..methods.base import Progress, Scheduled

    if not isinstance(method, Scheduled):
        return None, []
    if chosen and method.open_options():
        names = ", ".join(f"method.{name}" for name in method.open_options())
        return None, [f"{names}: not given, so chosen when training starts, by whether the model is at chance"]
    last = (steps - 1) // per_epoch
    epochs = math.ceil(steps / per_epoch)
    values = [(epoch, method.weight(Progress(epoch, epochs))) for epoch in range(last + 1)]
    warnings = []
    if values[-1][1] < method.reg_weight * (1 - 1e-9):
        share = values[-1][1] / method.reg_weight
        warnings.append(
            f"the {method.schedule} of the coefficient never completes: it ends at {values[-1][1]:.3g}, {share:.0%} "
            f"of reg_weight {method.reg_weight:g}; the run has {steps / per_epoch:.2f} epochs"
            + (f", warmup_epochs is {method.warmup_epochs:g}" if method.schedule == "warmup" else "")
        )
    if values[-1][1] == 0 and method.reg_weight > 0:
        warnings.append("the coefficient is 0 in every step: the regulariser does nothing; use schedule: constant")
    return values, warnings


def render(found: Plan) -> str:
    """Format a plan for the terminal."""
    sizes = found.sizes
    precisions = next(iter(found.memory.values()))
    lines = [
        f"{found.recipe}: {found.model}",
        f"  parameters        {sizes.parameters:,}, trainable {sizes.trainable:,} "
        f"({sizes.trainable / sizes.parameters:.3%})",
        f"  optimizer state   {found.optimizer_bytes / GIB:.3f} GiB, gradients {4 * sizes.trainable / GIB:.3f} GiB",
        f"  activations       {_activations(found)}",
        f"  rows, steps       {found.rows:,} rows; {found.steps:,} steps of {found.batch * found.accumulation} rows "
        f"({found.epochs:.2f} epochs of {found.steps_per_epoch:,}) on one GPU",
    ]
    lines += [f"  tokens            at most {found.tokens:,}"] if found.tokens is not None else []
    used = "" if found.length is None else f", {'with' if found.checkpointing else 'without'} gradient checkpointing"
    heads = [name if found.length is None else f"{name} base" for name in precisions]
    lines += [
        "",
        f"  GiB per GPU{used} ({found.gpus} GPUs except for single_gpu)",
        "  " + "preset".ljust(14) + "".join(f"{head:>14}" for head in heads),
    ]
    digits = 2 if found.length is None else 1  # image classifiers are small
    for preset, row in found.memory.items():
        cells = ["-" if value is None else f"{value / GIB:.{digits}f} ({_card(value)})" for value in row.values()]
        lines.append("  " + preset.ljust(14) + "".join(f"{cell:>14}" for cell in cells))
    lines.append("  in brackets: the smallest common GPU with a tenth to spare; multi_node is as multi_gpu")
    if found.checkpointing_auto and found.length is not None:
        lines.append(
            "  gradient_checkpointing: auto turns it on where a step would not fit, or weights are shared out"
        )
    if found.coefficients:
        values = found.coefficients
        shown = values if len(values) <= 12 else values[:6] + values[-3:]
        lines += ["", "  coefficient by epoch: " + ", ".join(f"{epoch}: {value:.3g}" for epoch, value in shown)]
    lines += [f"  warning: {text}" for text in found.warnings]
    return "\n".join(lines)


def _activations(found: Plan) -> str:
    """Text about the activations that one batch keeps for the backward pass."""
    sizes = found.sizes
    if sizes.activations_autocast is not None:
        shape = " x ".join(map(str, found.example))
        return (
            f"{sizes.activations / GIB:.3f} GiB at {found.batch} images of {shape}, "
            f"{sizes.activations_autocast / GIB:.3f} GiB under bf16 autocast (train.bf16)"
        )
    return (
        f"{sizes.activations / GIB:.2f} GiB at {found.batch} x {found.length} tokens, "
        f"{sizes.activations_checkpointed / GIB:.2f} GiB with gradient checkpointing"
    )


def _card(value: int) -> str:
    """Memory of the smallest common GPU that fits this many bytes, with 10 % and 0.5 GiB to spare."""
    return next((f"{card} GB" for card in _CARDS if value / GIB * 1.1 + 0.5 <= card), "> 80 GB")
