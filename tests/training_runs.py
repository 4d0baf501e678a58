"""Short training runs of the tiny model: arguments, trainer, logged steps and trained weights."""

import torch
from tiny import build_model, make_rows
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


def steps(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step
