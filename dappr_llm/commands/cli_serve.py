"""The verbs that use a checkpoint: ask, calibrate, push, and the answers of predict. They only read and call."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..core.errors import UserError

EPILOG = {
    "ask": """examples:
  dappr ask runs/quickstart
  echo "Which is a fruit? | hammer | plum" | dappr ask user/adapter --revision v1""",
    "calibrate": """examples:
  dappr calibrate runs/quickstart --task everyday --split validation --max-risk 0.05
  dappr calibrate runs/obqa --table runs/obqa/predictions/obqa-validation.npz --alpha 0.05
  dappr calibrate --base org/model --adapter org/lora --method ce --out runs/mine --task dev.jsonl --split dev""",
    "push": """examples:
  dappr push runs/quickstart user/name --private
  dappr push runs/quickstart user/name --tables --license apache-2.0""",
}


def add_verbs(
    verb: Callable[[str, str], argparse.ArgumentParser], common: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Add the parsers of these verbs."""
    ask = verb("ask", "Ask in the terminal and see probabilities, uncertainties and the decision.")
    ask.add_argument("checkpoint", help="folder of a run, or Hub id")
    ask.add_argument("--base", help="where the base model is, if not where the checkpoint says")
    add_reading(ask)

    calibrate = verb("calibrate", "Fit temperature, prediction sets and abstention on held-out rows (decision.json).")
    calibrate.add_argument("checkpoint", nargs="?", help="folder of a run, or Hub id")
    calibrate.add_argument(
        "--task", help="task name, .jsonl/.csv/.parquet file, or Hub dataset id; never training rows"
    )
    calibrate.add_argument("--split", default="validation", help="split of the task (default: validation)")
    calibrate.add_argument("--table", help="predictions of held-out rows (.npz) instead of a task")
    calibrate.add_argument("--alpha", type=float, default=0.1, help="error rate of prediction sets (default: 0.1)")
    calibrate.add_argument("--max-risk", type=float, help="share of wrong answers among those given (default: 0.05)")
    calibrate.add_argument("--min-coverage", type=float, help="share of questions that must be answered")
    calibrate.add_argument(
        "--confidence", type=float, default=0.95, help="certainty of the risk bound (default: 0.95)"
    )
    calibrate.add_argument("--score", default="lac", help="conformal score: lac, aps or possibility (default: lac)")
    calibrate.add_argument("--abstain-on", default="auto", help="aleatoric, epistemic or auto (default: auto)")
    calibrate.add_argument("--out", help="write a copy of the checkpoint here instead of changing it")
    calibrate.add_argument("--adapter", help="an adapter trained elsewhere (folder or Hub id); needs --out")
    calibrate.add_argument("--method", default="ce", help="with --adapter: how it is read (default: ce)")
    calibrate.add_argument("--num-choices", type=int, default=4, help="with --adapter: letters it knows (default: 4)")
    calibrate.add_argument("--template", help="with --adapter: its prompt, with {question} and {choices}")
    common(calibrate)

    push = verb("push", "Upload adapter, decision rule, results and a model card to the Hub, in one commit.")
    push.add_argument("checkpoint", help="folder of a run")
    push.add_argument("repo", help="user/name; created if it does not exist")
    push.add_argument("--private", action="store_true", help="make a new repository private")
    push.add_argument("--tables", action="store_true", help="upload the prediction tables too")
    push.add_argument("--revision", help="branch to commit to (default: main)")
    push.add_argument("--license", help="license id for the card, e.g. apache-2.0")


def add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help="commit, branch or tag of a checkpoint on the Hub")
    parser.add_argument("--load-in-4bit", action="store_true", help="load the base model in 4 bits")
    parser.add_argument("--no-decision", action="store_true", help="ignore decision.json: the model's own numbers")
    parser.add_argument("--extra-letters", action="store_true", help="read more options than letters were trained")
    parser.add_argument("--truncate", action="store_true", help="cut the start of questions that are too long")


def load_pipeline(args: argparse.Namespace, **kwargs: Any) -> Any:
    from ..inference.pipeline import UncertaintyPipeline

    return UncertaintyPipeline.from_pretrained(
        args.checkpoint,
        args.base,
        args.revision,
        load_in_4bit=args.load_in_4bit,
        decision=not args.no_decision,
        extra_letters=args.extra_letters,
        truncate=args.truncate,
        **kwargs,
    )


def predict_answers(args: argparse.Namespace, task: Any) -> int:
    from itertools import islice

    from ..inference.answer_files import describe, predict_file
    from ..inference.modality import find_task, iter_items
    from .walks import say

    if len(args.checkpoint) > 1:
        raise UserError("An ensemble of checkpoints writes a table: give --out NAME.npz")
    args.checkpoint = args.checkpoint[0]
    pipe = load_pipeline(args, batch_size=args.batch_size)
    found = find_task(task, pipe.run.backend.modality)
    items = islice(iter_items(found, args.split, args.data_root, pipe.run.backend), args.limit)
    count = predict_file(pipe, items, args.out, describe(pipe, task, args.split, args.limit), args.overwrite)
    say(f"{count} answers written to {args.out}")
    return 0


def _ask(args: argparse.Namespace) -> int:
    from .ask import ask

    ask(load_pipeline(args))
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    from .decide import Wishes, calibrate_checkpoint

    name, out = args.checkpoint, args.out
    if args.adapter:
        from ..inference.import_adapter import adopt

        if name or not out:
            raise UserError("--adapter makes a new checkpoint: give --out FOLDER, and no other checkpoint")
        prompt = {"template": args.template.replace("\\n", "\n")} if args.template else None
        name, out = str(adopt(args.adapter, out, args.base, args.method, args.num_choices, prompt)), None
    elif not name:
        raise UserError("Give a checkpoint, or an adapter trained elsewhere (--adapter, --base, --out)")
    wishes = Wishes(args.alpha, args.max_risk, args.min_coverage, args.confidence, args.score, args.abstain_on)
    where = (args.base, args.data_root, args.batch_size, args.limit)
    calibrate_checkpoint(name, args.task, args.split, wishes, args.table, out, *where)
    return 0


def _push(args: argparse.Namespace) -> int:
    from ..inference.hub import push

    done = push(args.checkpoint, args.repo, args.private or None, args.tables, args.revision, args.license)
    print(f"{len(done.files)} files in one commit: {done.url}/tree/{done.commit}")
    return 0


HANDLERS = {"ask": _ask, "calibrate": _calibrate, "push": _push}
