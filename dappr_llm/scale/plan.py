"""`dappr plan`: what a recipe will take, from shapes alone. The model is built on the meta device, without weights."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.recipe import Recipe

GIB = 1 << 30
PRECISIONS = ("bf16", "8-bit", "4-bit")
PRESETS = ("single_gpu", "multi_gpu", "fsdp2", "zero2", "zero3")
_BLOCK, _SECOND = 64, 256  # bitsandbytes: weights per scale, scales per scale of scales
_OPTIMIZER_BYTES = {"sgd": 0, "adafactor": 0, "lion": 4, "adamw_bnb_8bit": 2, "paged_adamw_8bit": 2, "adamw_8bit": 2}
_CARDS = (8, 12, 16, 24, 40, 48, 80)  # GiB of common GPUs


@dataclass
class Sizes:
    """Parameter counts and bytes of a model with its adapter."""

    parameters: int
    trainable: int
    linear: int  # weights of the base's linear layers, head left out: what bitsandbytes quantises
    linear_rows: int  # their output rows, each with a scale in 8 bits
    largest_unit: int  # parameters of the largest transformer block, or of embedding or head
    activations: int  # bytes that a forward pass keeps for the backward pass
    activations_checkpointed: int


@dataclass
class Plan:
    """Figures of one recipe; bytes are per GPU."""

    recipe: str
    model: str
    sizes: Sizes
    batch: int
    length: int
    accumulation: int
    gpus: int
    checkpointing: bool
    rows: int
    steps: int
    steps_per_epoch: int
    epochs: float
    tokens: int
    optimizer_bytes: int
    memory: dict[str, dict[str, int | None]]
    coefficients: list[tuple[int, float]] | None
    warnings: list[str] = field(default_factory=list)
    checkpointing_auto: bool = False

    def to_json(self) -> str:
        """All figures as JSON."""
        return json.dumps(asdict(self), indent=2)


def load_config(name: str, path: str | None = None, **kwargs: Any) -> Any:
    """
    A model's config: from a file, a folder, the published shapes we know, or the Hub.

    Args:
        name (`str`):
            The recipe's `model.name`.
        path (`str`, *optional*):
            A `config.json`, or the folder it is in.
    """
    from transformers import AutoConfig

    from ..text.architectures import ARCHITECTURES
    from ..text.lm import model_path

    if path is not None and not Path(path).exists():
        raise UserError(f"--config {path}: no such file")
    try:
        if path is None and name in ARCHITECTURES:
            values = dict(ARCHITECTURES[name])
            return AutoConfig.for_model(values.pop("model_type"), **values)
        return AutoConfig.from_pretrained(path or model_path(name), trust_remote_code=False, **kwargs)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"No config of {path or name!r} ({reason}); give the model's config.json with --config FILE"
        ) from None


def measure(config: Any, lora: Any, batch: int, length: int, dtype: Any = None) -> Sizes:
    """
    Count parameters and the bytes that a backward pass needs, without allocating anything.

    Args:
        config (`PretrainedConfig`):
            The model's.
        lora (`LoraConfig`, *optional*):
            The adapter; without it everything trains.
        batch, length (`int`):
            Rows and tokens of one forward pass.
        dtype (`torch.dtype`, *optional*, defaults to bfloat16):
            Of the base model's weights.
    """
    import torch
    from peft import get_peft_model
    from torch import nn
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.bfloat16)
        head = model.get_output_embeddings()
        linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        sizes = {
            "linear": sum(weight.numel() for weight in linear),
            "linear_rows": sum(weight.shape[0] for weight in linear),
            "largest_unit": max(_count(unit) for unit in [*_blocks(model), head, model.get_input_embeddings()]),
        }
        if lora is not None:
            try:
                model = get_peft_model(model, lora)
            except ValueError as error:
                raise UserError(f"The lora section does not fit this model: {str(error).splitlines()[0]}") from None
    blocks = _blocks(model)
    kept, in_blocks = _kept_bytes(model, blocks, batch, length)
    hidden = config.get_text_config().hidden_size
    inputs = len(blocks) * batch * length * hidden * (dtype or torch.bfloat16).itemsize
    largest = max(in_blocks, default=0)
    return Sizes(
        parameters=_count(model),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        activations=kept,
        activations_checkpointed=kept - sum(in_blocks) + inputs + largest,
        **sizes,
    )


def _count(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


def _blocks(model: Any) -> list[Any]:
    """The transformer blocks: the longest list of modules in the model."""
    from torch import nn

    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _kept_bytes(model: Any, blocks: list[Any], batch: int, length: int) -> tuple[int, list[int]]:
    """
    Bytes that autograd keeps, in all and within each block; attention matrices are left out, as fused kernels do.
    """
    import torch

    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Any] = {}  # held on to, so that no address is used twice
    within = [0] * len(blocks)
    current: list[int] = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        matrix = tensor.dim() >= 3 and tuple(tensor.shape[-2:]) == (length, length)
        if storage._cdata not in weights and storage._cdata not in kept and not matrix:
            kept[storage._cdata] = storage
            if current:
                within[current[-1]] += storage.nbytes()
        return tensor

    handles = []
    for number, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(lambda *_, n=number: current.append(n)))
        handles.append(block.register_forward_hook(lambda *_: (current.pop(), None)[1]))
    device = next(model.parameters()).device
    ids = torch.zeros(batch, length, dtype=torch.long, device=device)
    mask = torch.ones(batch, 1, length, length, dtype=torch.bool, device=device)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.train()(input_ids=ids, attention_mask=mask, logits_to_keep=1, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return sum(storage.nbytes() for storage in kept.values()), within


def weight_bytes(sizes: Sizes, precision: str, double: bool = True) -> int:
    """
    Bytes of all weights, the adapter in float32.

    Args:
        sizes (`Sizes`):
            From `measure`.
        precision (`str`):
            `"bf16"`, `"8-bit"` or `"4-bit"`. Quantised bases keep embeddings, norms and head in float32 while they
            train, as PEFT prepares them.
        double (`bool`, *optional*, defaults to `True`):
            4 bits: whether scales are quantised too.
    """
    base = sizes.parameters - sizes.trainable
    if precision == "bf16":
        return 2 * base + 4 * sizes.trainable
    rest = 4 * (base - sizes.linear) + 4 * sizes.trainable
    if precision == "8-bit":
        return sizes.linear + 4 * sizes.linear_rows + rest
    blocks = sizes.linear / _BLOCK
    scales = blocks + 4 * blocks / _SECOND if double else 4 * blocks
    return math.ceil(sizes.linear / 2 + scales) + rest


def gpu_memory(sizes: Sizes, precision: str, preset: str, gpus: int, state: int, activations: int) -> int | None:
    """Bytes on each GPU under a launch preset; `None` where the combination does not work."""
    weights, grads = weight_bytes(sizes, precision), 4 * sizes.trainable
    unit = round(sizes.largest_unit / sizes.parameters * weights)
    if preset == "single_gpu":
        return weights + grads + state + activations
    if preset == "multi_gpu":  # DDP keeps a second copy of the gradients to send
        return weights + 2 * grads + state + activations
    if preset == "zero2":
        return weights + grads + (grads + state) // gpus + activations
    if precision == "8-bit":  # bitsandbytes' 8-bit weights cannot be shared out
        return None
    return (weights + grads + state) // gpus + 2 * unit + activations  # one unit in use, the next on its way


def plan(
    recipe: Recipe, config: str | None = None, gpus: int = 4, rows: int | None = None, length: int | None = None
) -> Plan:
    """
    Work out what a recipe will take.

    Args:
        recipe (`Recipe`):
            The recipe.
        config (`str`, *optional*):
            The model's `config.json`, if neither a folder nor the Hub has it.
        gpus (`int`, *optional*, defaults to 4):
            GPUs of the presets for several; steps and tokens are those of one.
        rows (`int`, *optional*):
            Training rows, where the data is not at hand.
        length (`int`, *optional*):
            Tokens per prompt; by default the most that are allowed.
    """
    from ..inference.loading import build_args, build_lora, build_method

    args = build_args(recipe)
    method = build_method(recipe)
    revision = {"revision": recipe.model.revision} if recipe.model.revision else {}
    shape = load_config(recipe.model.name, config, **revision)
    batch, length = args.per_device_train_batch_size, length or args.max_length
    sizes = measure(shape, build_lora(recipe), batch, length)
    rows = rows or _rows(recipe)
    accumulation = args.gradient_accumulation_steps
    per_epoch = max(1, math.ceil(math.ceil(rows / batch) / accumulation))
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    optimizer = str(getattr(args.optim, "value", args.optim))
    state = _OPTIMIZER_BYTES.get(optimizer, 8) * sizes.trainable
    kept = sizes.activations_checkpointed if args.gradient_checkpointing else sizes.activations
    memory = {
        preset: {name: gpu_memory(sizes, name, preset, gpus, state, kept) for name in PRECISIONS} for preset in PRESETS
    }
    coefficients, warnings = _coefficients(method, steps, per_epoch)
    return Plan(
        recipe.name, recipe.model.name, sizes, batch, length, accumulation, gpus, bool(args.gradient_checkpointing),
        rows, steps, per_epoch, steps / per_epoch, steps * batch * accumulation * length, state, memory, coefficients,
        warnings, args.checkpoint_if_needed,
    )  # fmt: skip


def _rows(recipe: Recipe) -> int:
    """Training rows: counted where they are at hand, else those published for a task we know."""
    from ..inference.loading import build_data
    from ..text.architectures import TRAIN_ROWS

    known = TRAIN_ROWS.get(recipe.data.train) if isinstance(recipe.data.train, str) else None
    if known is not None:
        return min(known, recipe.data.max_train_samples or known)
    try:
        return len(build_data(recipe)[0])
    except UserError as error:
        raise UserError(f"{error} (or say how many training rows there are: --rows N)") from None


def _coefficients(method: Any, steps: int, per_epoch: int) -> tuple[list[tuple[int, float]] | None, list[str]]:
    """The coefficient in each epoch, for methods that have one, and what is odd about it."""
    from ..methods.base import Progress, Scheduled

    if not isinstance(method, Scheduled):
        return None, []
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
    """A plan as text."""
    sizes = found.sizes
    checkpointed, kept = sizes.activations_checkpointed / GIB, sizes.activations / GIB
    used = "with" if found.checkpointing else "without"
    lines = [
        f"{found.recipe}: {found.model}",
        f"  parameters        {sizes.parameters:,}, trainable {sizes.trainable:,} "
        f"({sizes.trainable / sizes.parameters:.3%})",
        f"  optimizer state   {found.optimizer_bytes / GIB:.3f} GiB, gradients {4 * sizes.trainable / GIB:.3f} GiB",
        f"  activations       {kept:.2f} GiB at {found.batch} x {found.length} tokens, "
        f"{checkpointed:.2f} GiB with gradient checkpointing",
        f"  rows, steps       {found.rows:,} rows; {found.steps:,} steps of {found.batch * found.accumulation} rows "
        f"({found.epochs:.2f} epochs of {found.steps_per_epoch:,}) on one GPU",
        f"  tokens            at most {found.tokens:,}",
        "",
        f"  GiB per GPU, {used} gradient checkpointing ({found.gpus} GPUs except for single_gpu)",
        "  " + "preset".ljust(14) + "".join(f"{name + ' base':>14}" for name in PRECISIONS),
    ]
    for preset, row in found.memory.items():
        cells = ["-" if value is None else f"{value / GIB:.1f} ({_card(value)})" for value in row.values()]
        lines.append("  " + preset.ljust(14) + "".join(f"{cell:>14}" for cell in cells))
    lines.append("  in brackets: the smallest common GPU with a tenth to spare; multi_node is as multi_gpu")
    if found.checkpointing_auto:
        lines.append(
            "  gradient_checkpointing: auto turns it on where a step would not fit, or weights are shared out"
        )
    if found.coefficients:
        values = found.coefficients
        shown = values if len(values) <= 12 else values[:6] + values[-3:]
        lines += ["", "  coefficient by epoch: " + ", ".join(f"{epoch}: {value:.3g}" for epoch, value in shown)]
    lines += [f"  warning: {text}" for text in found.warnings]
    return "\n".join(lines)


def _card(value: int) -> str:
    return next((f"{card} GB" for card in _CARDS if value / GIB * 1.1 + 0.5 <= card), "> 80 GB")
