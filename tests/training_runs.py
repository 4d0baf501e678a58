"""Short training runs of the tiny model: arguments, trainer, logged steps and trained weights."""

from dataclasses import replace

import torch
import yaml
from tiny import build_classifier, build_model, make_rows, make_texts, write_rows
from transformers import TrainerCallback

from dappr_llm import DAPPrConfig, DAPPrTrainer
from dappr_llm.methods.dappr import DAPPr

METHOD = DAPPr(reg_weight=5e-3, schedule="constant")


def config(folder, **changes):
    values = {
        "per_device_train_batch_size": 8, "num_train_epochs": 1, "learning_rate": 1e-2, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 0, "max_grad_norm": 1.0,
    }  # fmt: skip
    return DAPPrConfig(str(folder), **(values | changes))


def build(folder, tokenizer, lora, train=None, validation=None, method=METHOD, auxiliary_dataset=None, **changes):
    model = build_model()
    torch.manual_seed(123)  # the trainer must seed by its own arguments, whatever the state before
    return DAPPrTrainer(
        model,
        config(folder, **changes),
        train_dataset=make_rows(32) if train is None else train,
        eval_dataset=validation,
        processing_class=tokenizer,
        peft_config=lora,
        method=method,
        auxiliary_dataset=auxiliary_dataset,
    )


def build_head(folder, tokenizer, lora, train=None, validation=None, method=METHOD, labels=3, model=None, **changes):
    """As `build`, for a classifier: fixed labels, read from a head."""
    wide = build_classifier(labels, outputs=method.num_outputs(labels)) if model is None else model
    torch.manual_seed(123)
    return DAPPrTrainer(
        wide,
        config(folder, **changes),
        train_dataset=make_texts(32, labels=labels) if train is None else train,
        eval_dataset=validation,
        processing_class=tokenizer,
        peft_config=None if lora is None else replace(lora, task_type="SEQ_CLS", target_modules="all-linear"),
        method=method,
    )


def write_head_recipe(folder, base, labels=3, lora=None, **sections):
    """A recipe of text classification on generated files; its output folder is `folder/run`."""
    sizes = {"train": (48, 0), "validation": (12, 60), "test": (12, 90)}
    splits = {
        split: write_rows(folder / f"{split}.jsonl", make_texts(count, start, labels))
        for split, (count, start) in sizes.items()
    }
    values = {
        "model": {"name": str(base), **sections.pop("model", {})},
        "method": {"name": "dappr", "reg_weight": 5e-3, "schedule": "constant"},
        "data": {"train": {"name": "mine", "splits": splits, "text": "text", "label": "label"}, "checks": "off"},
        "train": {
            "output_dir": str(folder / "run"), "learning_rate": 1e-2, "per_device_train_batch_size": 8,
            "num_train_epochs": 6, "eval_strategy": "no", "disable_tqdm": True, **sections.pop("train", {}),
        },
        "lora": {"r": 4, "lora_alpha": 8} if lora is None else lora,
        **sections,
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def steps(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step
