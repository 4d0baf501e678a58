"""The `dappr` command. Handlers only read arguments and call; torch is imported by what they call."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from . import __version__, cli_serve
from .errors import UserError

_EPILOG = {
    "train": """examples:
  dappr train recipes/quickstart.yaml
  dappr train obqa_smollm2/dappr --data-root data --set train.seed=3 --set method.reg_weight=1e-3
  dappr train recipes/quickstart.yaml --resume            go on after Ctrl-C
  accelerate launch --config_file recipes/accelerate/multi_gpu.yaml -m dappr_llm train obqa_mistral7b/dappr""",
    "predict": """examples:
  dappr predict runs/quickstart --task everyday --split test --out predictions.npz
  dappr predict runs/quickstart --task my_questions.jsonl --out predictions.npz    (answers not needed)
  dappr predict runs/quickstart --task my_questions.csv --out answers.parquet    (killed? the same line goes on)

An .npz is a prediction table for `dappr evaluate`; .jsonl, .csv and .parquet hold answers with calibrated
probabilities, prediction sets and abstentions.""",
    "evaluate": """examples:
  dappr evaluate runs/obqa --id obqa --ood arc_c arc_e csqa
  dappr evaluate --id runs/a/predictions/obqa-test.npz --ood runs/a/predictions/csqa-test.npz --out figures/

Answers (accuracy, NLL, ECE) are read on each item's own options. OOD scores are read on the training letters
for both sides ("matched"); the published reading, each task on its own letters, stands beside it.""",
    "recipes": """examples:
  dappr recipes
  dappr train obqa_mistral7b/dappr        a shipped recipe by its name""",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dappr",
        description="Fine-tune uncertainty-aware adapters: train, evaluate, calibrate, ask, publish.",
        epilog="examples:\n  dappr train recipes/quickstart.yaml\n  dappr evaluate runs/quickstart --id everyday "
        "--ood everyday_arithmetic\n\n`dappr VERB --help` shows more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dappr-llm {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, help: str) -> argparse.ArgumentParser:
        return verbs.add_parser(
            name, help=help, description=help, epilog=(_EPILOG | cli_serve.EPILOG)[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    train = verb("train", "Train a recipe, test it in and out of distribution, write tables and pictures.")
    train.add_argument("recipe", help="a YAML file, or the name of a shipped recipe (see `dappr recipes`)")
    train.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe value")
    train.add_argument("--output-dir", help="where the run is written (default: runs/NAME)")
    train.add_argument("--data-root", help="local folder with Hub datasets in their row layout")
    train.add_argument(
        "--resume", nargs="?", const="auto", metavar="CHECKPOINT", help="go on from the last (or this) checkpoint"
    )
    train.add_argument("--overwrite", action="store_true", help="remove an older run from the output folder first")

    predict = verb("predict", "Predict a task or a file of questions with a trained checkpoint.")
    predict.add_argument("checkpoint", help="folder of a run, or Hub id")
    predict.add_argument("--task", required=True, help="task name, .jsonl/.csv/.parquet file, or Hub dataset id")
    predict.add_argument("--split", default="test", help="split of the task (default: test)")
    predict.add_argument("--out", required=True, help="where to write: a table .npz, or answers .jsonl/.csv/.parquet")
    predict.add_argument("--question", help="own data: question column")
    predict.add_argument("--choices", nargs="+", help="own data: choices column, or one column per option")
    predict.add_argument("--answer", help="own data: answer column")
    predict.add_argument("--options", nargs="+", help="own data: the same options for every row (text classification)")
    predict.add_argument("--overwrite", action="store_true", help="start anew even if part of another job is there")
    cli_serve.add_reading(predict)
    _common(predict)

    cli_serve.add_verbs(verb, _common)

    evaluate = verb("evaluate", "Accuracy, NLL, ECE, and OOD AUROC, from a checkpoint or from saved tables.")
    evaluate.add_argument("checkpoint", nargs="?", help="folder of a run, or Hub id; not needed with tables")
    evaluate.add_argument("--id", required=True, help="in-distribution task, file, or prediction table (.npz)")
    evaluate.add_argument("--ood", nargs="*", default=[], help="out-of-distribution tasks, files or tables")
    evaluate.add_argument("--split", default="test", help="split of every task (default: test)")
    evaluate.add_argument("--out", help="folder for results and pictures (default: the checkpoint's)")
    _common(evaluate)

    verb("recipes", "List the recipes that ship with the package.")
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", help="where the base model is, if not where the checkpoint says")
    parser.add_argument("--data-root", help="local folder with Hub datasets in their row layout")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts per batch (default: 16)")
    parser.add_argument("--limit", type=int, help="use only the first rows of every task")


def _train(args: argparse.Namespace) -> int:
    from .commands import train
    from .recipe import load_recipe

    overrides = list(args.set)
    overrides += [f"train.output_dir={args.output_dir}"] if args.output_dir else []
    overrides += [f"data.root={args.data_root}"] if args.data_root else []
    return 0 if train(load_recipe(args.recipe, overrides), args.resume, args.overwrite) else 130


def _predict(args: argparse.Namespace) -> int:
    from .batch_predict import check_name
    from .commands import is_main_process, load_predictor, predict, say

    if not args.out.endswith(".npz"):
        check_name(args.out)
    columns = {"question": args.question, "choices": args.choices, "answer": args.answer, "options": args.options}
    own = {key: value for key, value in columns.items() if value}
    if len(own.get("choices", ())) == 1:
        own["choices"] = own["choices"][0]
    task = {"path": args.task, **own} if own else args.task
    if not args.out.endswith(".npz"):
        return cli_serve.predict_answers(args, task)
    quantization = {"load_in_4bit": True} if args.load_in_4bit else None
    extra = {"revision": args.revision, "quantization": quantization}
    trainer = load_predictor(args.checkpoint, args.base, args.batch_size, **extra)
    table = predict(trainer, task, args.split, args.data_root, args.limit)
    if is_main_process():
        table.save(args.out)
    say(f"{len(table)} predictions written to {args.out}")
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from .commands import evaluate

    evaluate(
        args.checkpoint,
        args.id,
        args.ood,
        args.split,
        args.out,
        args.base,
        args.data_root,
        args.batch_size,
        args.limit,
    )
    return 0


def _recipes(args: argparse.Namespace) -> int:
    from .recipe import list_recipes

    rows = list_recipes()
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, description, _ in rows:
        print(f"{name:<{width}}  {description}")
    return 0


@contextmanager
def _messages() -> Iterator[None]:
    """Our own messages (where logits start, what was truncated) on stderr, once and not once per process."""
    logger = logging.getLogger("dappr_llm")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def main(argv: list[str] | None = None) -> int:
    """Run one verb; a mistake of the user's is one sentence and exit code 2."""
    args = _parser().parse_args(argv)
    # Fewer lines of noise from the tokenizers library after a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    handlers = {"train": _train, "predict": _predict, "evaluate": _evaluate, "recipes": _recipes, **cli_serve.HANDLERS}
    try:
        with _messages():
            return handlers[args.verb](args)
    except UserError as error:
        print(f"dappr: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndappr: interrupted", file=sys.stderr)
        return 130
