"""Two gloo processes, started by accelerate with the shipped preset, against one process with twice the batch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from dappr_llm import UserError
from dappr_llm.scale import launch
from dappr_llm.training.losses import last_batch_weights

ROOT = Path(__file__).resolve().parents[2]
ENV = {
    **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
PRESETS = ("cpu_2", "single_gpu", "multi_gpu", "fsdp2", "zero2", "zero3", "multi_node")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What two processes found, and what one finds."""
    from distributed_worker import everything

    folder = tmp_path_factory.mktemp("two")
    worker = [str(ROOT / "tests" / "distributed_worker.py"), str(folder)]
    start = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    done = subprocess.run(
        [*start, "--config_file", str(launch.find_preset("cpu_2")), *worker],
        env=ENV, cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "found.json").read_text()), everything(tmp_path_factory.mktemp("one"), 1)


def same_table(one, two):
    assert one["ids"] == two["ids"] and one["labels"] == two["labels"]
    assert np.allclose(one["alpha"], two["alpha"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["random", "grouped", "parts", "checkpointed", "head", "probe", "weighted", "chosen"])
def test_the_same_losses_figures_and_table(both, kind):
    """37 rows, 11 test rows: nothing divides, and every logged number is still that of one process."""
    two, one = both[0][kind], both[1][kind]
    assert (two["world"], one["world"]) == (2, 1) and two["unused"] is False
    assert len(one["steps"]) == len(two["steps"]) >= 3 and one["eval"]
    for mine, theirs in zip(one["steps"] + one["eval"], two["steps"] + two["eval"], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert theirs[key] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), key  # all right: no AUROC
    same_table(one["table"], two["table"])
    assert two["weights"][0] == two["weights"][1]
    assert np.allclose(one["weights"][0], two["weights"][0], atol=2e-5)
    assert two["chosen"] == one["chosen"] * 2 and ("method.schedule" in one["chosen"][0]) == (kind == "chosen")


def test_a_base_in_bfloat16_trains_alike(both):
    """Sums of a batch are rounded in another order; the adapters, in float32, stay equal on both processes."""
    two, one = both[0]["bfloat16"], both[1]["bfloat16"]
    assert two["weights"][0] == two["weights"][1]
    for mine, theirs in zip(one["steps"] + one["eval"], two["steps"] + two["eval"], strict=True):
        name = "loss" if "loss" in mine else "eval_loss"
        assert theirs[name] == pytest.approx(mine[name], rel=1e-2)
    assert one["table"]["ids"] == two["table"]["ids"]
    assert np.allclose(one["table"]["alpha"], two["table"]["alpha"], rtol=0.03)


def test_only_the_first_process_saves(both):
    saves = both[0]["random"]["saves"]
    assert saves[0] == both[1]["random"]["saves"][0] > 0 and saves[1] == 0


def test_noise_is_well_defined(both):
    """Prediction draws the same noise everywhere; in training no two processes draw the same."""
    two, one = both[0]["noise"], both[1]["noise"]
    same_table(one["table"], two["table"])
    assert two["drawn"][0] != two["drawn"][1]
    assert np.isfinite(two["losses"]).all()


def test_a_bad_row_of_one_process_stops_or_skips_in_all(both):
    two, one = both[0]["skipping"], both[1]["skipping"]
    assert two["weights"][0] == two["weights"][1] and np.isfinite(two["weights"][0]).all()
    assert np.allclose(two["weights"][0], one["weights"][0], atol=2e-5)
    assert len(set(two["stopped"])) == 1 and "not finite for rows q5 (fit nan, reg nan)" in two["stopped"][0]


@pytest.mark.parametrize("kind", ["gaussian", "knn", "class_gaussian"])
def test_a_gate_is_the_same(both, kind):
    two, one = both[0]["gate"], both[1]["gate"]
    for process in two[kind]:
        assert process["n"] == one[kind][0]["n"]
        assert np.allclose(process["density"], one[kind][0]["density"], atol=1e-4)
        assert np.abs(np.subtract(process["familiarity"], one[kind][0]["familiarity"])).max() < 0.05
    assert len(two["messages"]) == 2 and all("hold NaN" in message for message in two["messages"])


def test_a_full_disk_of_one_process_stops_all(both):
    found = both[0]["full_disk"]
    assert "No space left on device" in found["messages"][0] and "checkpoint-1 is whole" in found["messages"][0]
    assert "another process could not write" in found["messages"][1]
    assert found["kept"] == ["checkpoint-1", "train_log.jsonl"]


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2 head"])
def test_fsdp2_reads_and_trains_as_one_process_does(both, kind):
    """accelerate's own FSDP2 code on two CPU processes: every block is a unit, the readout sees whole weights."""
    two, one = both[0][kind], both[1][kind]
    assert sum("DecoderLayer" in name for name in two["units"]) == 2
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert np.allclose(two["weights"], one["weights"], atol=1e-4)


@pytest.mark.parametrize(
    "real, shares", [(10, ([0.2] * 8, [0.2] * 2 + [0] * 6)), (3, ([2 / 3] * 3 + [0] * 5, [0] * 8))]
)
def test_repeated_rows_of_the_last_batch_weigh_nothing(real, shares):
    for index in (0, 1):
        assert last_batch_weights(8, real, 2, index).tolist() == pytest.approx(shares[index])


def test_every_preset_is_there():
    assert set(launch.presets()) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_accepted_by_accelerate(name):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = str(launch.find_preset(name))
    config = load_config_from_file(path)  # refuses unknown keys
    args = launch_command_parser().parse_args(["--config_file", path, "-m", "dappr_llm", "train", "x"])
    args, _, _ = _validate_launch_command(args)
    wanted = yaml.safe_load(Path(path).read_text())
    assert args.num_processes == wanted["num_processes"] == config.num_processes
    kinds = {"fsdp2": "use_fsdp", "zero2": "use_deepspeed", "zero3": "use_deepspeed"}
    several = args.num_processes > 1
    assert getattr(args, kinds.get(name, "multi_gpu")) is (several or name in kinds)
    if name.startswith("zero"):
        assert args.zero_stage == int(name[-1])


def test_the_fsdp2_preset_makes_the_plugin_we_test_with(monkeypatch):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    args = ["--config_file", str(launch.find_preset("fsdp2")), "-m", "dappr_llm", "train", "x"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(args))
    for key, value in prepare_multi_gpu_env(args).items():
        if key.startswith(("FSDP", "ACCELERATE")):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type) and plugin.cpu_ram_efficient_loading is False


def test_the_launch_command():
    command = launch.command("cpu_2", ["train", "quickstart"], "--num_processes 3")
    assert command[1:3] == ["-m", "accelerate.commands.launch"] and command[-4:] == [
        "-m",
        "dappr_llm",
        "train",
        "quickstart",
    ]
    assert command[command.index("--main_process_port") + 1] == "0" and "3" in command
    assert "0" not in launch.command("multi_node", ["train", "x"], "--main_process_port 2000")
    with pytest.raises(UserError, match="did you mean 'fsdp2'"):
        launch.command("fsdp", ["train", "x"])
    with pytest.raises(UserError, match="pip install deepspeed"):
        launch.command("zero3", ["train", "x"])


def test_a_dead_process_ends_the_job(recipe, tmp_path):
    """One process is killed in the middle of training: the launcher ends the other, and the run can be resumed."""
    import psutil

    run = tmp_path / "run"
    settings = [
        "--set",
        "train.num_train_epochs=4000",
        "--set",
        "train.eval_strategy=no",
        "--set",
        "train.save_total_limit=2",
    ]
    start = [sys.executable, "-m", "dappr_llm", "train", str(recipe), "--launch", "cpu_2", *settings]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(start, env=ENV, cwd=tmp_path, stdout=log, stderr=log)
    try:
        limit = time.monotonic() + 150
        while not list(run.glob("checkpoint-*")):
            assert process.poll() is None and time.monotonic() < limit, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        workers = psutil.Process(process.pid).children(recursive=True)
        second = [w for w in workers if w.environ().get("RANK") == "1"]
        second[0].send_signal(signal.SIGKILL)
        assert process.wait(120) != 0
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive
    finally:
        if process.poll() is None:
            process.kill()
    from dappr_llm.core import checkpoint

    assert checkpoint.last_checkpoint(run) is not None
