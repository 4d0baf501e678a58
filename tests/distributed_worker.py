"""Code of each rank of tests/training/test_distributed.py; also called in a single process, for comparison."""

import errno
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from peft import LoraConfig
from tiny import build_classifier, build_model, build_tokenizer, make_rows, make_texts
from transformers import TrainerCallback

from dappr_llm import DAPPrConfig, DAPPrTrainer, UserError
from dappr_llm.inference.gate import GateScorer
from dappr_llm.inference.gate_fitting import GateRows, fit_gate
from dappr_llm.methods.dappr import DAPPr
from dappr_llm.methods.ibedl import IBEDL

ROWS, TEST = 37, 11  # neither divides by anything used here
METHOD = DAPPr(reg_weight=5e-3, schedule="constant")


def lora():
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM")


def build(folder, world, method=METHOD, head=False, dtype=torch.float32, **changes):
    values = {
        "per_device_train_batch_size": 16 // world, "per_device_eval_batch_size": 4, "num_train_epochs": 2,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    args = DAPPrConfig(str(folder), **(values | changes))
    make = make_texts if head else make_rows
    return DAPPrTrainer(
        (build_classifier() if head else build_model()).to(dtype),
        args,
        make(ROWS),
        make(9, start=60),
        processing_class=build_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS") if head else lora(),
        method=method,
    )


def trained_weights(trainer):
    return torch.cat([p.detach().flatten().float() for p in trainer.model.parameters() if p.requires_grad])


def table_of(trainer):
    make = make_rows if trainer.backend.readout.labels is None else make_texts
    table = trainer.predict_table(make(TEST, start=40), "mine", "test")
    return {"ids": table.ids.tolist(), "labels": table.labels.tolist(), "alpha": table.alpha.tolist()}


def gathered(value, world):
    if world == 1:
        return [value]
    parts = [None] * world
    dist.all_gather_object(parts, value)
    return parts


def trajectory(folder, world, **changes):
    """Losses of every step, evaluation metrics, prediction table, and the number of model saves of each rank."""
    trainer = build(folder, world, eval_strategy="epoch", save_strategy="epoch", **changes)
    saves = []
    write = trainer._save
    trainer._save = lambda *args, **kwargs: (saves.append(1), write(*args, **kwargs))
    trainer.train()
    history = trainer.state.log_history
    return {
        "world": trainer.args.world_size,
        "steps": [{k: v for k, v in entry.items() if k != "epoch"} for entry in history if "loss" in entry],
        "eval": [
            {k: v for k, v in entry.items() if "second" not in k and "runtime" not in k}
            for entry in history
            if "eval_loss" in entry
        ],
        "table": table_of(trainer),
        "saves": gathered(len(saves), world),
        "weights": gathered(trained_weights(trainer).tolist(), world),
        "unused": trainer.args.ddp_find_unused_parameters,
        "chosen": gathered(trainer.chosen, world),
    }


class FirstNoise(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            with torch.random.fork_rng([]):
                self.value = torch.randn(3).tolist()


def noise(folder, world):
    """IB-EDL: the noise of prediction is the same on all ranks, that of training differs between ranks."""
    trainer = build(folder, world, method=IBEDL(), num_train_epochs=1)
    before = table_of(trainer)
    watched = FirstNoise()
    trainer.add_callback(watched)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"table": before, "drawn": gathered(watched.value, world), "losses": losses}


def skipping(folder, world):
    """A non-finite loss on one rank: all ranks skip that optimizer step."""
    trainer = build(folder, world, on_nonfinite="skip", num_train_epochs=1)
    read = trainer.backend.read

    def poisoned(model, inputs):
        out = read(model, inputs)
        if not model.training:
            return out
        return replace(out, logits=out.logits + torch.where(inputs["row"] == 5, torch.nan, 0.0).unsqueeze(-1))

    trainer.backend.read = poisoned
    trainer.train()
    weights = gathered(trained_weights(trainer).tolist(), world)
    trainer.args.on_nonfinite = "stop"
    try:
        trainer.train()
        message = ""
    except UserError as error:
        message = str(error)
    return {"weights": weights, "stopped": gathered(message, world)}


def full_disk(folder, world):
    """Rank 0 cannot write: every rank raises the error, none hangs."""
    trainer = build(folder, world, save_strategy="steps", save_steps=1, max_steps=2)
    write = trainer._write_state

    def fail(where):
        if trainer.state.global_step == 2 and trainer.is_world_process_zero():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(where)

    trainer._write_state = fail
    try:
        trainer.train()
        message = ""
    except UserError as error:
        message = str(error)
    return {"messages": gathered(message, world), "kept": sorted(p.name for p in Path(folder).iterdir())}


def fsdp2(folder, world, head=False):
    """A model sharded by accelerate's own FSDP2 code, read, trained one step and gathered."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    trainer = build(folder, world, head=head)
    model, backend = trainer.model.train(), trainer.backend
    rows = list(backend.prepare((make_texts if head else make_rows)(8)))
    own = rows if world == 1 else rows[dist.get_rank() :: world]
    units = []
    if world > 1:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
        )
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            mixed_precision="no",
            is_main_process=dist.get_rank() == 0,
            device=torch.device("cpu"),
            torch_device_mesh=None,
            parallelism_config=None,
        )
        model = fsdp2_prepare_model(accelerator, model)
        units = sorted(type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule))
        assert all(isinstance(p, DTensor) for p in model.parameters())  # nothing is left out of every unit
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = trainer.compute_loss(model, backend.collate(own))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(gathered(loss.item(), world)) / world)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters() if p.requires_grad]
    return {"losses": losses, "units": units, "weights": torch.cat([w.detach().flatten() for w in whole]).tolist()}


def gated(folder, world):
    """Gates of every kind, whose rows are shared out over processes; and one whose features are NaN in one of them."""
    things = ["plum", "fig", "pear", "hammer", "saw", "drill", "red", "blue", "green"]
    found = {}
    for kind in ("gaussian", "knn", "class_gaussian"):
        head = kind == "class_gaussian"
        rows = (make_texts if head else make_rows)(81)
        for i, row in enumerate(rows):
            row["text" if head else "question"] += f" {things[i % 9]} {things[i // 9]}"
        trainer = build(folder / kind, world, head=head)
        predictor = trainer.predictor
        gate = fit_gate(predictor, GateRows(rows[:70]), GateRows(rows[11:]), kind=kind)
        table = predictor.with_gate(GateScorer(gate)).predict_table(rows[:TEST])
        found[kind] = gathered(
            {"density": table.density.tolist(), "familiarity": table.familiarity.tolist(), "n": gate.fitted_on}, world
        )
    pooled = predictor.pooled_states

    def poisoned(*args):
        for numbers, features in pooled(*args):
            yield numbers, features * (float("nan") if world == 1 or dist.get_rank() == 0 else 1.0)

    predictor.pooled_states = poisoned
    try:
        fit_gate(predictor, GateRows(rows))
        message = ""
    except UserError as error:
        message = str(error)
    return {**found, "messages": gathered(message, world)}


def everything(folder, world):
    folder = Path(folder)
    return {
        "random": trajectory(folder / "random", world),
        "grouped": trajectory(
            folder / "grouped", world, train_sampling_strategy="group_by_length", num_train_epochs=1
        ),
        "parts": trajectory(
            folder / "parts",
            world,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=8 // world,
            num_train_epochs=1,
        ),
        "checkpointed": trajectory(folder / "checkpointed", world, gradient_checkpointing=True, num_train_epochs=1),
        "head": trajectory(folder / "head", world, head=True, head_init="random"),
        "probe": trajectory(folder / "probe", world, head=True, head_init="probe", num_train_epochs=1),
        "chosen": trajectory(folder / "chosen", world, method="dappr", num_train_epochs=1),
        "weighted": trajectory(
            folder / "weighted",
            world,
            head=True,
            class_weights={"label 0": 3.0, "label 1": 0.25},
            label_smoothing_factor=0.1,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=8 // world,
            num_train_epochs=1,
        ),
        "bfloat16": trajectory(folder / "bfloat16", world, dtype=torch.bfloat16, num_train_epochs=1),
        "noise": noise(folder / "noise", world),
        "skipping": skipping(folder / "skipping", world),
        "full_disk": full_disk(folder / "full_disk", world),
        "gate": gated(folder / "gate", world),
        "fsdp2": fsdp2(folder / "fsdp2", world),
        "fsdp2 head": fsdp2(folder / "fsdp2_head", world, head=True),
    }


if __name__ == "__main__":
    import faulthandler
    import os

    faulthandler.dump_traceback_later(240, exit=True)  # a hang must show where

    found = everything(sys.argv[1], int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        Path(sys.argv[1], "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads sometimes abort the interpreter while it shuts down ("terminate called without an active
    # exception"), after everything that is tested here has been written.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
