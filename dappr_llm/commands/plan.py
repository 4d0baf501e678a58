"""`dappr plan`: memory, steps and tokens of a recipe, estimated before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.terminal import show
from . import shared

if TYPE_CHECKING:
    import argparse

EPILOG = """examples:
  dappr plan obqa_mistral7b/dappr                       memory, steps, tokens and coefficients, before any GPU is hired
  dappr plan obqa_mistral7b/dappr --gpus 8 --set train.per_device_train_batch_size=2
  dappr plan my.yaml --config config.json               a model that is not here: its config file is enough

Nothing is loaded: shapes come from the model's config, on torch's meta device. All values are estimates: they leave
out CUDA's own context (about 0.5 GiB), fragmentation, and NCCL's buffers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    shared.add_recipe(parser)
    parser.add_argument("--config", help="config.json of the model (or its folder), instead of asking the Hub")
    parser.add_argument(
        "--gpus",
        type=shared.whole(most=100_000),
        default=4,
        help="number of GPUs of the multi-GPU presets (default: 4)",
    )
    parser.add_argument("--rows", type=shared.whole(), help="number of training rows, if the data is not available")
    parser.add_argument(
        "--length", type=shared.whole(most=1_000_000), help="tokens per prompt (default: train.max_length)"
    )
    shared.add_data_root(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the verb; returns exit code 0, errors are raised."""
    from ..core.recipe import load_recipe
    from ..scale.plan import plan, render

    recipe = load_recipe(args.recipe, shared.overrides(args))
    found = plan(recipe, args.config, args.gpus, args.rows, args.length)
    show(found.to_json() if args.json else render(found))
    return 0
