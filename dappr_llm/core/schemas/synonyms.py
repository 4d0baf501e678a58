"""What people call keys and values that have another name here: for suggestions, and for the names of dtypes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import did_you_mean, nearest

# Name in other tools, or the obvious one → key here. It is suggested where a section has that key.
_KEYS = {
    "rank": "r",
    "lora_r": "r",
    "lora_rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "target_modules",
    "modules": "target_modules",
    "lora_target_modules": "target_modules",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "n_epochs": "num_train_epochs",
    "steps": "max_steps",
    "num_steps": "max_steps",
    "num_train_steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "accumulation_steps": "gradient_accumulation_steps",
    "grad_accum": "gradient_accumulation_steps",
    "warmup": "warmup_steps",
    "warmup_ratio": "warmup_steps",
    "scheduler": "lr_scheduler_type",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "clip": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "evaluation_strategy": "eval_strategy",
    "output": "output_dir",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "max_tokens": "max_length",
    "cutoff_len": "max_length",
    "random_seed": "seed",
    "base_model": "name",
    "model_name": "name",
    "model_name_or_path": "name",
    "pretrained_model_name_or_path": "name",
    "torch_dtype": "dtype",
    "precision": "dtype",
    "attention": "attn_implementation",
    "peft": "lora",
    "dataset": "data",
    "training": "train",
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def suggest_key(key: object, valid: Iterable[object]) -> str:
    """Say which key was probably meant: the one that other tools call so, or the nearest by its letters."""
    names = [str(name) for name in valid]
    meant = _KEYS.get(str(key).lower().replace("-", "_"))
    return did_you_mean([str(meant)]) if meant in names else nearest(key, names)


def dtype_name(value: Any) -> Any:
    """The name of a dtype in torch for what people call it (`bf16`, `torch.float16`); all else as it is."""
    text = value.removeprefix("torch.") if isinstance(value, str) else value
    return _DTYPES.get(text, text) if isinstance(text, str) else value
