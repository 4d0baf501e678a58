"""The `dappr` command. Handlers only read arguments and call; torch is imported by what they call."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .. import __version__
from ..core import checkpoint
from ..core.errors import UserError
from . import audit, cli_scale, cli_serve

_EPILOG = {
    "train": """examples:
  dappr train recipes/quickstart.yaml
  dappr train obqa_smollm2/dappr --data-root data --set train.seed=3 --set method.reg_weight=1e-3
  dappr train recipes/quickstart.yaml --resume            go on after Ctrl-C
  dappr train obqa_mistral7b/dappr --launch multi_gpu    accelerate's launcher with a shipped setting; the same as
  accelerate launch --config_file recipes/accelerate/multi_gpu.yaml -m dappr_llm train obqa_mistral7b/dappr""",
    "predict": """examples:
  dappr predict runs/quickstart --task everyday --split test --out predictions.npz
  dappr predict runs/quickstart --task my_questions.jsonl --out predictions.npz    (answers not needed)
  dappr predict runs/seed0 runs/seed1 runs/seed2 --task everyday --out ensemble.npz    (one base model, 3 adapters)
  dappr predict runs/quickstart --task my_questions.csv --out answers.parquet    (killed? the same line goes on)
  dappr predict runs/quickstart --task shards/ --out answers/    (a folder of Parquet files, each to one of its name)

An .npz is a prediction table for `dappr evaluate`; .jsonl, .csv and .parquet hold answers with calibrated
probabilities, prediction sets and abstentions.""",
    "evaluate": """examples:
  dappr evaluate runs/obqa --id obqa --ood arc_c arc_e csqa
  dappr evaluate --id runs/a/predictions/obqa-test.npz --ood runs/a/predictions/csqa-test.npz --out figures/
  dappr evaluate runs/seed0 runs/seed1 --id obqa --ood arc_c --out runs/ensemble       (an ensemble)

Answers (accuracy, NLL, ECE) are read on each item's own options. OOD scores are read on the training letters
for both sides ("matched"); the published reading, each task on its own letters, stands beside it.""",
    "combine": """examples:
  dappr combine runs/seed0 runs/seed1 runs/seed2 --out runs/ensemble      every table of finished runs, with results
  dappr combine a/obqa-test.npz b/obqa-test.npz --out ensemble.npz        single tables

Dirichlet methods: mean alpha. Others: mean probabilities, and mutual information as epistemic uncertainty.""",
    "sweep": """examples:
  dappr sweep recipes/obqa_mistral7b/table.yaml                    methods x seeds, spread over the visible GPUs
  dappr sweep obqa_smollm2/table --data-root data                  interrupted? the same command goes on
  dappr sweep obqa_smollm2/table --dry-run                         what would run, and what is finished
  dappr sweep obqa_smollm2/table --tables-only                     the table of what is there, without running

A table file names seeds and rows:

  seeds: [0, 1, 2]
  rows:
    - recipe: ce                               the first row: others are compared with it
    - {recipe: mc_dropout, weights_of: ce}     its weights, read by another method
    - {recipe: ce, name: ensemble, members: 3}
    - {recipe: dappr, label: DAPPr, set: {method.reg_weight: 1e-3}}

Runs are folders OUT/ROW/seedN. A finished one is never repeated, an interrupted one is resumed, a failed one is
reported and the rest go on. Results: table.md, table.tex, table.csv and table.json in OUT.""",
    "report": """examples:
  dappr report runs/quickstart
  dappr report runs/obqa-ce runs/obqa-dappr --out comparison/ --title "OpenBookQA"

Everything is computed from the runs' prediction tables; neither the model nor torch is needed. With several runs on
the same items, differences to the first are tested pairwise.""",
    "audit": audit.EPILOG,
    "recipes": """examples:
  dappr recipes
  dappr train obqa_mistral7b/dappr        a shipped recipe by its name""",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dappr",
        description="Fine-tune uncertainty-aware adapters: train, evaluate, compare, calibrate, ask, publish.",
        epilog="examples:\n  dappr train recipes/quickstart.yaml\n  dappr evaluate runs/quickstart --id everyday "
        "--ood everyday_arithmetic\n\n`dappr VERB --help` shows more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dappr-llm {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, help: str) -> argparse.ArgumentParser:
        return verbs.add_parser(
            name, help=help, description=help, epilog=(_EPILOG | cli_serve.EPILOG | cli_scale.EPILOG)[name],
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
    cli_scale.add_launch(train)

    predict = verb("predict", "Predict a task or a file of questions with a trained checkpoint.")
    predict.add_argument("checkpoint", nargs="+", help="folder of a run, or Hub id; several make an ensemble")
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
    _cache(predict)

    _figure_verbs(verb)
    cli_serve.add_verbs(verb, _common)
    cli_scale.add_verbs(verb)
    _combine_arguments(verb("combine", "Make an ensemble of finished runs or of saved tables; needs no model."))
    _sweep_arguments(verb("sweep", "Train methods x seeds on one task and make one table of their results."))
    verb("recipes", "List the recipes that ship with the package.")
    return parser


def _figure_verbs(verb: Callable[[str, str], argparse.ArgumentParser]) -> None:
    evaluate = verb("evaluate", "Accuracy, NLL, ECE, and OOD AUROC, from a checkpoint or from saved tables.")
    evaluate.add_argument(
        "checkpoint", nargs="*", help="folder of a run, or Hub id; several make an ensemble; none needed with tables"
    )
    evaluate.add_argument("--id", required=True, help="in-distribution task, file, or prediction table (.npz)")
    evaluate.add_argument("--ood", nargs="*", default=[], help="out-of-distribution tasks, files or tables")
    evaluate.add_argument("--split", default="test", help="split of every task (default: test)")
    evaluate.add_argument(
        "--out",
        help="folder for results, tables and pictures (default: evaluations/TASKS below the checkpoint, or here "
        "without one; a run's own results.json is replaced only if you name its folder)",
    )
    _figures(evaluate)
    _common(evaluate)
    _cache(evaluate)

    report = verb("report", "One self-contained HTML page, and Markdown, CSV and LaTeX tables, from saved tables.")
    report.add_argument("runs", nargs="+", metavar="RUN", help="folders that `dappr train` or `dappr evaluate` wrote")
    report.add_argument("--out", help="folder for the report (default: RUN/report; with several runs: report)")
    report.add_argument("--id", help="in-distribution task, if a run has no results.json that says it")
    report.add_argument("--title", default="", help="heading of the page")
    _figures(report)

    rotate = verb("audit", "Ask every question with its options rotated: does the answer follow words or letters?")
    audit.add_arguments(rotate)
    _common(rotate)


def _figures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--score",
        default="epistemic",
        choices=("epistemic", "aleatoric", "entropy", "max_prob", "mutual_information", "evidence"),
        help="what ranks items for OOD detection (default: epistemic)",
    )
    parser.add_argument("--resamples", type=int, default=1000, help="bootstrap resamples (default: 1000; 0: none)")
    parser.add_argument("--allow-nan", action="store_true", help="accept rows with NaN or Inf, as most uncertain")


def _combine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("members", nargs="+", help="folders of runs, or tables (.npz)")
    parser.add_argument("--out", required=True, help="the ensemble's folder, or its table (.npz)")


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", help="a YAML file, or the name of a shipped one (see `dappr recipes`)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of every run"
    )
    parser.add_argument("--output-dir", help="where runs and tables are written (default: runs/NAME)")
    parser.add_argument("--data-root", help="local folder with Hub datasets in their row layout")
    parser.add_argument("--seeds", type=int, nargs="+", help="other seeds than the table's")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these rows (and what they build on)")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one per visible GPU, else 1)")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their state, and stop")
    parser.add_argument("--tables-only", action="store_true", help="make the table of what is finished")


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", help="where the base model is, if not where the checkpoint says")
    parser.add_argument("--data-root", help="local folder with Hub datasets in their row layout")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts per batch (default: 16)")
    parser.add_argument("--limit", type=int, help="use only the first rows of every task")


def _cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-cache", action="store_true", help="compute tables again that were computed before from the same files"
    )


def _train(args: argparse.Namespace) -> int:
    from ..core.recipe import load_recipe

    overrides = list(args.set)
    overrides += [f"train.output_dir={args.output_dir}"] if args.output_dir else []
    overrides += [f"data.root={args.data_root}"] if args.data_root else []
    if args.launch:
        return cli_scale.launch_train(args, overrides)
    recipe = load_recipe(args.recipe, overrides)
    from .walks import train  # numpy and more: mistakes in the recipe were answered at once

    return 0 if train(recipe, args.resume, args.overwrite) else 130


def _predict(args: argparse.Namespace) -> int:
    from pathlib import Path

    from ..inference.answer_files import check_name
    from .walks import predict, say

    columns = {"question": args.question, "choices": args.choices, "answer": args.answer, "options": args.options}
    own = {key: value for key, value in columns.items() if value}
    if len(own.get("choices", ())) == 1:
        own["choices"] = own["choices"][0]
    shards = cli_scale.find_shards(args.task, args.out)
    if shards:
        return cli_scale.predict_shards(args, shards, own)
    if not args.out.endswith(".npz"):
        check_name(args.out)
    task = {"path": args.task, **own} if own else args.task
    if not args.out.endswith(".npz"):
        return cli_serve.predict_answers(args, task)
    quantization = {"load_in_4bit": True} if args.load_in_4bit else None
    extra = {"revision": args.revision, "quantization": quantization, "cache": not args.no_cache}
    places = (Path(args.out), args.base, args.data_root)
    (table,) = predict(args.checkpoint, [task], args.split, *places, args.batch_size, args.limit, **extra)
    say(f"{len(table)} predictions written to {args.out}")
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from .walks import evaluate

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
        args.score,
        args.resamples,
        args.allow_nan,
        cache=not args.no_cache,
    )
    return 0


def _report(args: argparse.Namespace) -> int:
    from ..evaluation.reporting import write_report

    write_report(args.runs, args.out, args.id, args.title, args.score, args.resamples, args.allow_nan)
    return 0


def _combine(args: argparse.Namespace) -> int:
    from ..scale.combine import combine_runs, combine_tables

    if all(name.endswith(".npz") for name in args.members):
        combine_tables(args.members, args.out)
    else:
        combine_runs(args.members, args.out)
    return 0


def _sweep(args: argparse.Namespace) -> int:
    from ..scale.sweep import load_table, sweep

    overrides = list(args.set) + ([f"data.root={args.data_root}"] if args.data_root else [])
    table = load_table(args.table, overrides, args.output_dir, args.seeds, args.rows)
    return sweep(table, args.jobs, args.dry_run, args.tables_only)


def _recipes(args: argparse.Namespace) -> int:
    from ..core.recipe import list_recipes

    kinds = {"train": list_recipes(), "sweep": list_recipes(tables=True)}
    width = max((len(name) for rows in kinds.values() for name, _, _ in rows), default=0)
    for verb, rows in kinds.items():
        print(f"dappr {verb} NAME")
        for name, description, _ in rows:
            print(f"  {name:<{width}}  {description}")
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
    # bitsandbytes misses a kernel that we leave aside anyway (`text.layers.keep_differentiable`).
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    handlers = {
        "train": _train,
        "predict": _predict,
        "evaluate": _evaluate,
        "combine": _combine,
        "sweep": _sweep,
        "report": _report,
        "audit": audit.run,
        "recipes": _recipes,
        **cli_serve.HANDLERS,
        **cli_scale.HANDLERS,
    }
    try:
        with _messages():
            named = getattr(args, "checkpoint", None) or []
            checkpoint.check_folders([named] if isinstance(named, str) else named)
            return handlers[args.verb](args)
    except UserError as error:
        print(f"dappr: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndappr: interrupted", file=sys.stderr)
        return 130
