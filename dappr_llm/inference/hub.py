"""
Upload of a checkpoint folder to the Hub: adapter, sidecar files, decision rule and model card, in a single commit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..core import checkpoint
from ..core.errors import UserError
from ..core.files import write_text
from ..decisions import rule as calibration
from ..decisions.rule import Decision
from . import card

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
_WEIGHTS = ("adapter_model.safetensors", "model.safetensors")
# Allow-list of files to upload: no pickles, no optimizer states, no logs.
_FILES = (
    "adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors", "generation_config.json",
    "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    checkpoint.SIDECAR, calibration.FILE, checkpoint.RECIPE, checkpoint.RESULTS, checkpoint.TRAINED_ROWS,
    "training_args.json", "reliability.png", "alpha0.png",
)  # fmt: skip
_SECRET = ("hub_token", "push_to_hub_token")


@dataclass(frozen=True)
class Pushed:
    """An upload: repository id and URL, the hash of its commit, and the names of the files in it."""

    repo_id: str
    url: str
    commit: str
    files: tuple[str, ...]


def push(
    folder: str | Path,
    repo_id: str,
    private: bool | None = None,
    tables: bool = False,
    revision: str | None = None,
    license: str | None = None,
    token: str | None = None,
    message: str = "Upload adapter, decision rule and card",
) -> Pushed:
    """
    Upload a checkpoint folder.

    Everything is checked and the card is rendered before the first request; all files go into one commit, and the
    file sizes that the Hub then lists are compared with those sent.

    Args:
        folder (`str` or `Path`):
            A folder that `dappr train` or `trainer.save_model` wrote.
        repo_id (`str`):
            `user/name`; created if it does not exist.
        private (`bool`, *optional*):
            Visibility of a new repository; by default that of the account's settings.
        tables (`bool`, *optional*, defaults to `False`):
            Upload the prediction tables as well.
        revision (`str`, *optional*):
            Branch to commit to; it is created if it does not exist. Defaults to `main`.
        license (`str`, *optional*):
            License id for the card.
        token (`str`, *optional*):
            Access token; by default the one that `hf auth login` stored, or `HF_TOKEN`.
        message (`str`, *optional*):
            Commit message.
    """
    from huggingface_hub import HfApi, constants, get_token

    if not re.fullmatch(checkpoint.HUB_ID, repo_id):
        raise UserError(f"{repo_id!r} is not a Hub id of the form user/name")
    contents = collect(folder, tables)
    url = f"{constants.ENDPOINT}/{repo_id}"
    text = card.render_card(folder, repo_id, license)
    contents["README.md"] = text.encode()
    contents |= {name: content.encode() for name, content in card.eval_files(folder, url).items()}
    if constants.is_offline_mode():
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it")
    token = token or get_token()
    if not token:
        raise UserError("There is no Hub token: run `hf auth login` with a token that may write, or set HF_TOKEN")
    api = HfApi(token=token, library_name="dappr_llm")
    ask = _Asking(repo_id, revision)
    ask(lambda: api.create_repo(repo_id, private=private, exist_ok=True))
    if revision:
        ask(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
    commit = _commit(api, ask, contents, message)
    write_text(Path(folder) / "README.md", text)
    return Pushed(repo_id, url, commit, tuple(sorted(contents)))


def _commit(api: HfApi, ask: _Asking, contents: dict[str, bytes | str], message: str) -> str:
    """Commit all files at once; returns the commit hash after checking that the Hub lists every file with its size."""
    from huggingface_hub import CommitOperationAdd

    repo = ask.repo_id
    operations = [CommitOperationAdd(name, content) for name, content in sorted(contents.items())]
    info = ask(lambda: api.create_commit(repo, operations, commit_message=message, revision=ask.revision))
    tree = ask(lambda: list(api.list_repo_tree(repo, recursive=True, revision=info.oid)))
    sizes = {entry.path: getattr(entry, "size", None) for entry in tree}
    missing = [op.path_in_repo for op in operations if sizes.get(op.path_in_repo) != op.upload_info.size]
    if missing:
        raise UserError(
            f"The upload to {repo} is not complete: the Hub does not list {missing[0]} as it was sent; push again"
        )
    return info.oid


class _Asking:
    """Calls the Hub and turns its errors into a `UserError`; nothing is published then, since the commit is last."""

    def __init__(self, repo_id: str, revision: str | None):
        self.repo_id, self.revision = repo_id, revision

    def __call__(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            # huggingface_hub wraps a failed upload in a RuntimeError; the cause is the actual error.
            cause = (
                error.__cause__
                if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception)
                else error
            )
            problem = checkpoint.hub_problem(cause, self.repo_id, self.revision).replace("fetched from", "sent to")
            raise UserError(f"Nothing was published to {self.repo_id}: {problem}") from None


def collect(folder: str | Path, tables: bool = False) -> dict[str, bytes | str]:
    """
    The files to upload: name in the repository → local path, or content from which local paths were removed.

    Args:
        folder (`str` or `Path`):
            The checkpoint; its weights and decision rule are checked.
        tables (`bool`, *optional*, defaults to `False`):
            Include the prediction tables.
    """
    root, config = checkpoint.load_sidecar(folder)
    path = Path(root)
    weights = [path / name for name in _WEIGHTS if (path / name).is_file()]
    if not weights:
        raise UserError(f"{folder} holds no weights ({' or '.join(_WEIGHTS)}); train it first")
    _check_weights(weights[0])
    if (path / calibration.FILE).is_file():
        Decision.load(path, checkpoint.weights_hash(path))
    found: dict[str, bytes | str] = {name: str(path / name) for name in _FILES if (path / name).is_file()}
    base = card.hub_id(config.get("base_model"))
    for name, key in ((checkpoint.SIDECAR, "base_model"), ("adapter_config.json", "base_model_name_or_path")):
        if name in found:
            found[name] = _with_public_base(path / name, key, base)
    for name in ("training_args.json", checkpoint.RESULTS):
        if name in found:
            found[name] = _portable_json(path / name)
    if checkpoint.RECIPE in found:
        found[checkpoint.RECIPE] = _portable_recipe(path / checkpoint.RECIPE)
    if tables:
        found |= {f"{checkpoint.TABLES}/{p.name}": str(p) for p in sorted((path / checkpoint.TABLES).glob("*.npz"))}
    return found


def _check_weights(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as weights:
            names = list(weights.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}); train or fetch it again") from None
    if not names:
        raise UserError(f"{path} holds no weights")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _with_public_base(path: Path, key: str, base: str | None) -> bytes | str:
    """The path of the file, or its content with the base model's Hub id if it names the base model by a local path."""
    content = _read_json(path)
    if card.hub_id(content.get(key)) is not None:
        return str(path)
    return json.dumps(content | {key: base}, indent=2, ensure_ascii=False).encode()


def _portable_json(path: Path) -> bytes:
    return json.dumps(_portable(_read_json(path)), indent=2, ensure_ascii=False).encode()


def _portable_recipe(path: Path) -> bytes:
    import yaml

    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    (content.get("data") or {}).pop("root", None)
    return yaml.safe_dump(_portable(content), sort_keys=False, allow_unicode=True).encode()


def _portable(value: Any) -> Any:
    """A JSON value without secrets and without local paths."""
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items() if key not in _SECRET}
    if isinstance(value, list):
        return [_portable(item) for item in value]
    return card.portable(value) if isinstance(value, str) else value
