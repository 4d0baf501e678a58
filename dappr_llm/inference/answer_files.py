"""
Answers of a pipeline written to JSONL, CSV or Parquet files of any size; an interrupted job can be resumed.

Answers are appended to a journal (`.NAME.part.jsonl` beside the output) as they are computed. The same job, started
again, continues after the last complete line of the journal. When all rows are answered, the journal is converted to
the output file, which is written atomically. Which job made it stands beside it (`.NAME.job.json`), so that another
job does not replace it unasked.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias

from ..core import checkpoint
from ..core.errors import UserError
from ..core.files import atomic_write, parse_json, read_json, write_text
from ..core.names import safe_name
from .answer_columns import OwnRow, merged, write_records
from .modality import described, find_task, hub_source
from .table_cache import base_folder, contents_hash, file_hash

if TYPE_CHECKING:
    from ..core.backend import Item
    from .modality import TaskSpec
    from .pipeline import UncertaintyPipeline

    class AnswerItem(Item, Protocol):
        """An item to answer: an `MCQItem`, or an `ImageItem`, whose question is its path."""

        @property
        def question(self) -> str: ...

    Answerable: TypeAlias = AnswerItem | tuple[AnswerItem, OwnRow]


SUFFIXES = (".jsonl", ".csv", ".parquet")
_BOOK = ".shards.json"  # finished shards: name → the job that wrote it
_FLUSH_ROWS, _SYNC_ROWS = 64, 4096  # rows lost at most by a kill, and by a power failure


@dataclass(frozen=True)
class Job:
    """
    Everything that determines the answers of one output file; only an equal job may continue a journal.

    Args:
        task (`str`):
            Task name, file or mapping, as JSON.
        split (`str`):
            The split.
        sidecar (`str`, *optional*):
            Hash of the checkpoint's `uncertainty_config.json`: method, prompt, letters, offset.
        weights (`str`, *optional*):
            Hash of its weights and tokenizer.
        base (`str`, *optional*):
            The base model that was loaded.
        base_revision (`str`, *optional*):
            Its commit on the Hub.
        base_weights (`str`, *optional*):
            Hash of its files, if they are on this machine.
        precision (`str`, *optional*):
            How the base model is held: dtype and quantisation.
        decision (`str`, *optional*):
            The decision rule, as JSON.
        options (`str`, *optional*):
            Pipeline options that change answers, as JSON.
        data_root (`str`, *optional*):
            Folder with local copies of Hub datasets.
        data_revision (`str`, *optional*):
            Commit of a dataset that is read from the Hub.
        input (`str`, *optional*):
            Hash of the input file.
    """

    task: str
    split: str
    sidecar: str | None = None
    weights: str | None = None
    base: str | None = None
    base_revision: str | None = None
    base_weights: str | None = None
    precision: str | None = None
    decision: str | None = None
    options: str = ""
    data_root: str | None = None
    data_revision: str | None = None
    input: str | None = None

    def difference(self, other: Any) -> str:
        """The first thing in which a recorded job differs from this one, in words; empty if there is none."""
        if not isinstance(other, dict) or set(other) != set(asdict(self)):
            return "it was written by another version of dappr_llm"
        for key, value in asdict(self).items():
            if other[key] != value:
                return f"its {key.replace('_', ' ')} is {_short(other[key])}, now {_short(value)}"
        return ""


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def describe(
    pipe: UncertaintyPipeline, spec: TaskSpec, split: str, limit: int | None, data_root: str | None = None
) -> Job:
    """
    The job of answering one split of a task.

    Args:
        pipe (`UncertaintyPipeline`):
            The loaded pipeline.
        spec (`str`, `Mapping`, `MCQTask` or `ImageTask`):
            Task name, file, mapping as in a recipe, or declaration.
        split (`str`):
            The split.
        limit (`int`, *optional*):
            Answer only the first rows.
        data_root (`str`, *optional*):
            Folder with local copies of Hub datasets.
    """
    run = pipe.run
    facts = run.backend.config()
    task = find_task(spec, run.backend.modality, run.backend.data_revisions)
    root, data_revision = hub_source(task, data_root)
    plain, path = described(task, split)
    home = base_folder(run.base, facts.get("base_revision")) if "base_revision" in facts else None
    sidecar = Path(run.folder) / checkpoint.SIDECAR
    options = {
        "extra_letters": pipe.extra_letters,
        "truncate": pipe.truncate,
        "limit": limit,
        "gate": run.gate is not None,
    }
    return Job(
        task=json.dumps(plain, sort_keys=True, allow_nan=False),
        split=split,
        weights=contents_hash(Path(run.folder)),
        sidecar=checkpoint.sha256(sidecar) if sidecar.is_file() else None,
        base=run.base,
        base_revision=facts.get("base_revision"),
        base_weights=contents_hash(home) if home else None,
        precision=facts.get("precision"),
        decision=None if pipe.decision is None else json.dumps(asdict(pipe.decision), sort_keys=True, allow_nan=False),
        options=json.dumps(options, allow_nan=False),
        data_root=root,
        data_revision=data_revision,
        input=file_hash(path) if path and path.is_file() else None,
    )


def predict_file(
    pipe: UncertaintyPipeline,
    items: Iterable[Answerable],
    out: str | Path,
    job: Job,
    overwrite: bool = False,
) -> int:
    """
    Answer every item and write the answers to a file.

    Args:
        pipe (`UncertaintyPipeline`):
            The pipeline.
        items (`Iterable`):
            The items (`MCQItem`, `ImageItem`), in the same order each time the job is started; or pairs of an item
            and the user's own row, whose columns the file keeps.
        out (`str` or `Path`):
            The output file: `.jsonl`, `.csv` or `.parquet`.
        job (`Job`):
            From [`describe`].
        overwrite (`bool`, *optional*, defaults to `False`):
            Discard an existing journal and file, also those of another job.

    Returns:
        `int`: Number of rows in the file.
    """
    out = Path(out)
    check_name(out)
    journal = out.with_name(f".{out.name}.part.jsonl")
    if out.exists() and not overwrite and (finished := _finished(out, job)):
        return finished
    done = _resume(journal, job, overwrite)
    try:
        count = _append(pipe, islice(items, done, None), journal, done)
    except OSError as error:
        raise UserError(f"Cannot write {journal}: {error.strerror or error}") from error
    except UserError:  # a row that is refused: the corrected job is another one and must not find this one's answers
        journal.unlink(missing_ok=True)
        raise
    if count == 0:
        journal.unlink()
        raise UserError(f"{job.task} has no rows")
    _finish(journal, out)
    write_text(_note(out), json.dumps({"job": asdict(job), "rows": count}, indent=1, allow_nan=False) + "\n")
    journal.unlink()
    return count


def _append(pipe: UncertaintyPipeline, items: Iterator[Answerable], journal: Path, count: int) -> int:
    """Answer the items that are left, after `count` that are in the journal; returns how many there are now."""
    waiting: deque[tuple[int | None, OwnRow]] = deque()

    def rows() -> Iterator[Any]:
        for each in items:
            item, own = each if isinstance(each, tuple) else (each, {})
            waiting.append((item.label if item.label >= 0 else None, own))
            is_image = hasattr(item, "image")
            yield item if is_image else {"id": item.id, "question": item.question, "choices": list(item.options)}

    with journal.open("a", encoding="utf-8") as handle:
        for answer in pipe.stream(rows()):
            label, own = waiting.popleft()
            known = {} if label is None else {"label": label, "correct": answer.answer == answer.choices[label]}
            record = merged(own, {**answer.to_dict(), **known})
            handle.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
            if count % _FLUSH_ROWS == 0:
                handle.flush()
            if count % _SYNC_ROWS == 0:
                _sync(handle)
        _sync(handle)
    return count


def _note(out: Path) -> Path:
    return out.with_name(f".{out.name}.job.json")


def _finished(out: Path, job: Job) -> int:
    """Number of rows of a finished file of this very job; a `UserError` if it is another's, or changed since."""
    try:
        note = read_json(_note(out))
        difference, rows = job.difference(note["job"]), int(note["rows"])
    except (UserError, KeyError, TypeError, ValueError):
        difference, rows = "nothing says which", 0
    if not difference and out.stat().st_mtime_ns > _note(out).stat().st_mtime_ns:
        difference = "it was changed since"
    if difference:
        raise UserError(
            f"{out} exists already and holds something else than this job's answers ({difference}); choose another "
            "--out, or pass --overwrite"
        )
    return rows


def predict_shards(
    pipe: UncertaintyPipeline,
    shards: Iterable[tuple[str, Iterable[Answerable], Job]],
    out: str | Path,
    suffix: str = ".parquet",
    overwrite: bool = False,
) -> int:
    """
    Answer the shards of a dataset one after the other, each into its own output file; finished shards are skipped.

    Args:
        pipe (`UncertaintyPipeline`):
            The pipeline.
        shards (`Iterable`):
            Name, items and job of each shard.
        out (`str` or `Path`):
            The folder to write to.
        suffix (`str`, *optional*, defaults to `".parquet"`):
            File format of the outputs.
        overwrite (`bool`, *optional*, defaults to `False`):
            Answer finished shards again, and discard journals of other jobs.

    Returns:
        `int`: Number of rows answered by this call.
    """
    out = Path(out)
    book = out / _BOOK
    done = {} if overwrite or not book.is_file() else _read_book(book)
    count = 0
    for name, items, job in shards:
        target = out / f"{safe_name(name)}{suffix}"
        difference = job.difference(done.get(name))
        if not difference and target.is_file():
            continue
        if target.exists() and difference and not overwrite:
            raise UserError(
                f"{target} was made by another job ({difference}); choose another --out, or pass --overwrite"
            )
        count += predict_file(pipe, items, target, job, overwrite)
        done[name] = asdict(job)
        write_text(book, json.dumps(done, indent=1, allow_nan=False) + "\n")
    return count


def _read_book(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    except UserError:
        raise UserError(f"{path} is damaged; remove it, or pass --overwrite") from None


def check_name(out: str | Path) -> None:
    """Refuse an output file of unknown format, before anything is loaded."""
    if Path(out).suffix.lower() not in SUFFIXES:
        raise UserError(
            f"--out {out}: the name must end in {', '.join(SUFFIXES)} (answers) or .npz (a prediction table)"
        )


def _sync(handle: IO[str]) -> None:
    handle.flush()
    os.fsync(handle.fileno())


def _resume(journal: Path, job: Job, overwrite: bool) -> int:
    """Number of rows in this job's journal, without an incomplete last line; starts a journal if there is none."""
    head = json.dumps(asdict(job), sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    if overwrite or not journal.is_file():
        with atomic_write(journal) as handle:
            handle.write(head.encode())
        return 0
    lines, whole, first = 0, 0, b""
    with journal.open("rb") as handle:  # line by line: a journal may be larger than memory
        for line in handle:
            if not line.endswith(b"\n"):
                break
            first = first or line
            lines += 1
            whole += len(line)
    difference = job.difference(_job_of(first))
    if difference:
        raise UserError(f"{journal} holds part of another job ({difference}); finish that one, or pass --overwrite")
    if whole < journal.stat().st_size:
        os.truncate(journal, whole)
    return lines - 1


def _job_of(line: bytes) -> Any:
    """The job that the first line of a journal describes; `None` if it is damaged."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _records(journal: Path) -> Iterator[dict[str, Any]]:
    with journal.open(encoding="utf-8") as lines:
        next(lines)
        for number, line in enumerate(lines, start=2):
            try:
                yield parse_json(line)
            except ValueError:
                raise UserError(f"{journal}, line {number} is damaged; remove the file and start again") from None


def _finish(journal: Path, out: Path) -> None:
    """Convert a complete journal to the output format."""
    write_records(lambda: _records(journal), out)
