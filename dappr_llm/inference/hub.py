"""
Upload of a checkpoint folder to the Hub: adapter, sidecar files, decision rule and model card, in a single commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..core import checkpoint
from ..core.errors import UserError
from ..core.files import write_text
from . import card
from .upload_files import Contents, check_contents, collect

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["Pushed", "collect", "push"]
T = TypeVar("T")


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

    Everything is checked, scanned for secrets and rendered before the first request; all files go into one commit, and
    the file sizes that the Hub then lists are compared with those sent.

    Args:
        folder (`str` or `Path`):
            A folder that `dappr train` or `trainer.save_model` wrote.
        repo_id (`str`):
            `user/name`; created if it does not exist.
        private (`bool`, *optional*):
            Visibility of a new repository; by default that of the account's settings. `True` refuses a repository that
            exists and is public.
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
    token = token or get_token()
    check_contents(contents, folder, token)
    if constants.is_offline_mode():
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it")
    if not token:
        raise UserError("There is no Hub token: run `hf auth login` with a token that may write, or set HF_TOKEN")
    ask = _Asking(repo_id, revision)
    commit = _upload(HfApi(token=token, library_name="dappr_llm"), ask, contents, private, message)
    try:
        write_text(Path(folder) / "README.md", text)
    except UserError as error:
        raise UserError(f"{repo_id} was published (commit {commit}), but its card not saved here: {error}") from None
    return Pushed(repo_id, url, commit, tuple(sorted(contents)))


def _upload(api: HfApi, ask: _Asking, contents: Contents, private: bool | None, message: str) -> str:
    """Create repository and branch where they are missing, and commit; returns the commit hash."""
    ask(lambda: api.create_repo(ask.repo_id, private=private, exist_ok=True))
    if private:
        _check_private(api, ask)
    if ask.revision:
        branch = ask.revision
        ask(lambda: api.create_branch(ask.repo_id, branch=branch, exist_ok=True))
    return _commit(api, ask, contents, message)


def _check_private(api: HfApi, ask: _Asking) -> None:
    """Refuse a public repository: the Hub ignores the wish for a private one if the repository exists already."""
    if not ask(lambda: api.model_info(ask.repo_id)).private:
        raise UserError(
            f"{ask.repo_id} exists and is public, so nothing was published there: make it private in its settings on "
            "the Hub, choose another name, or push without --private"
        )


def _commit(api: HfApi, ask: _Asking, contents: Contents, message: str) -> str:
    """Commit all files at once; returns the commit hash after checking that the Hub lists every file with its size."""
    from huggingface_hub import CommitOperationAdd

    repo = ask.repo_id
    operations = [CommitOperationAdd(name, content) for name, content in sorted(contents.items())]
    ask.head = ask(lambda: api.model_info(repo, revision=ask.revision)).sha
    ask.find_head = lambda: api.model_info(repo, revision=ask.revision).sha
    info = ask(lambda: api.create_commit(repo, operations, commit_message=message, revision=ask.revision))
    ask.commit = info.oid
    tree = ask(lambda: list(api.list_repo_tree(repo, recursive=True, revision=info.oid)))
    sizes = {entry.path: getattr(entry, "size", None) for entry in tree}
    missing = [op.path_in_repo for op in operations if sizes.get(op.path_in_repo) != op.upload_info.size]
    if missing:
        raise UserError(
            f"{repo} was published (commit {info.oid}), but not whole: the Hub does not list {missing[0]} as it was "
            "sent; push again"
        )
    return info.oid


class _Asking:
    """
    Calls the Hub and turns its errors into a `UserError` that says what was published until then.

    Args:
        repo_id (`str`):
            The repository.
        revision (`str`, *optional*):
            The branch.
    """

    def __init__(self, repo_id: str, revision: str | None):
        self.repo_id, self.revision = repo_id, revision
        self.commit: str | None = None
        self.head: str | None = None  # the newest commit before ours
        self.find_head: Callable[[], str | None] | None = None  # set once a commit may have been made

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
            raise UserError(f"{self._published()}: {self._problem(cause)}") from None

    def _problem(self, error: Exception) -> str:
        try:
            return checkpoint.hub_problem(error, self.repo_id, self.revision).replace("fetched from", "sent to")
        except Exception:
            if self.find_head is None:
                raise
            return f"{type(error).__name__}: {error}"  # unforeseen, but what was published must be said

    def _published(self) -> str:
        """What is there now. An answer that got lost says nothing about the commit, so the Hub is asked."""
        if self.commit:
            return f"{self.repo_id} was published (commit {self.commit}), but could not be checked"
        nothing = f"Nothing was published to {self.repo_id}"
        if self.find_head is None:
            return nothing
        try:
            head = self.find_head()
        except Exception:  # whatever it is: the first error is the one to report
            return f"It is not known whether {self.repo_id} was published (look at its page before you push again)"
        return nothing if head == self.head else f"{self.repo_id} was published (commit {head}), but with an error"
