"""Launching and planning: the arguments of `--launch` and of `dappr plan`. They only read and call."""

from __future__ import annotations

import argparse
import glob
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ..core.errors import UserError

EPILOG = {
    "plan": """examples:
  dappr plan obqa_mistral7b/dappr                       memory, steps, tokens and coefficients, before any GPU is hired
  dappr plan obqa_mistral7b/dappr --gpus 8 --set train.per_device_train_batch_size=2
  dappr plan my.yaml --config config.json               a model that is not here: its config file is enough

Nothing is loaded: shapes come from the model's config, on torch's meta device. Figures are estimates: they leave out
CUDA's own context (about 0.5 GiB), fragmentation, and NCCL's buffers.""",
}


def add_launch(train: argparse.ArgumentParser) -> None:
    """The arguments of `dappr train` that start several processes."""
    train.add_argument(
        "--launch",
        metavar="PRESET",
        help="start accelerate's launcher: cpu_2, single_gpu, multi_gpu, fsdp2, zero2, zero3, multi_node, or a file",
    )
    train.add_argument(
        "--launch-args", default="", metavar="ARGS", help='more for the launcher, as one text: "--num_processes 8"'
    )


def launch_train(args: argparse.Namespace, overrides: list[str]) -> int:
    """Check the recipe, then hand over to the launcher with the same arguments."""
    from ..core.recipe import load_recipe
    from ..scale.launch import launch

    load_recipe(args.recipe, overrides)  # a mistake in it is found once, not once per process
    arguments = ["train", args.recipe, *(part for text in overrides for part in ("--set", text))]
    arguments += ["--resume", args.resume] if args.resume else []
    arguments += ["--overwrite"] if args.overwrite else []
    return launch(args.launch, arguments, args.launch_args)


def add_verbs(verb: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add `dappr plan`."""
    plan = verb("plan", "What a recipe will take: parameters, memory per GPU, steps, tokens, coefficients.")
    plan.add_argument("recipe", help="a YAML file, or the name of a shipped recipe (see `dappr recipes`)")
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe value")
    plan.add_argument("--config", help="config.json of the model (or its folder), instead of asking the Hub")
    plan.add_argument("--gpus", type=int, default=4, help="GPUs of the presets for several (default: 4)")
    plan.add_argument("--rows", type=int, help="training rows, if the data is not here")
    plan.add_argument("--length", type=int, help="tokens per prompt (default: train.max_length)")
    plan.add_argument("--data-root", help="local folder with Hub datasets in their row layout")
    plan.add_argument("--json", action="store_true", help="print the figures as JSON")


def _plan(args: argparse.Namespace) -> int:
    from ..core.recipe import load_recipe
    from ..scale.plan import plan, render

    overrides = list(args.set) + ([f"data.root={args.data_root}"] if args.data_root else [])
    found = plan(load_recipe(args.recipe, overrides), args.config, args.gpus, args.rows, args.length)
    print(found.to_json() if args.json else render(found))
    return 0


def find_shards(task: str, out: str) -> list[Path]:
    """The files of a task that is a folder or a pattern (`shards/*.parquet`); none for any other task."""
    is_pattern = any(mark in task for mark in "*?[")
    if not is_pattern and not Path(task).is_dir():
        return []
    found = sorted(Path(path) for path in glob.glob(task)) if is_pattern else sorted(Path(task).iterdir())
    files = [path for path in found if path.suffix in (".parquet", ".jsonl", ".csv") and not path.name.startswith(".")]
    if not files:
        raise UserError(f"{task}: no .parquet, .jsonl or .csv files there")
    if Path(out).suffix or Path(out).is_file():
        raise UserError(f"--out {out}: a folder of files is answered into a folder; give one without an ending")
    if Path(out).resolve() in {path.parent.resolve() for path in files}:
        raise UserError(f"--out {out}: that folder holds the questions; give another")
    stems = [path.stem for path in files]
    if len(set(stems)) < len(stems):
        raise UserError(f"{task}: two files have the same name but for their ending or folder; keep one of them")
    return files


def predict_shards(args: argparse.Namespace, files: list[Path], columns: dict[str, Any]) -> int:
    """`dappr predict` over many files: flat in memory, a kill costs a few batches."""
    from ..inference import answer_files as batch_predict
    from ..text.data.tasks import get_task, iter_items
    from .cli_serve import load_pipeline
    from .walks import say

    if len(args.checkpoint) > 1:
        raise UserError("An ensemble of checkpoints writes a table: give one file as --task, and --out NAME.npz")
    args.checkpoint = args.checkpoint[0]
    pipe = load_pipeline(args, batch_size=args.batch_size)
    left = args.limit

    def shards() -> Iterator[tuple[str, Iterable[Any], batch_predict.Job]]:
        nonlocal left
        for path in files:
            if left is not None and left <= 0:
                return
            spec = {"path": str(path), **columns}
            job = batch_predict.describe(pipe, spec, args.split, left)
            items = (item for _, item in islice(iter_items(get_task(spec), args.split), left))
            yield path.stem, items, job
            left = None if left is None else left - count_rows(path, left)

    count = batch_predict.predict_shards(pipe, shards(), args.out, overwrite=args.overwrite)
    say(f"{count} answers written to {args.out} ({len(files)} files)")
    return 0


def count_rows(path: Path, most: int) -> int:
    """Rows of a file, counted up to a number."""
    from ..text.data.sources import read_file

    return sum(1 for _ in islice(read_file(path), most))


HANDLERS = {"plan": _plan}
