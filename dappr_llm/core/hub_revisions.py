"""
Commits on the Hub: a name means whatever its newest commit holds, so what was loaded is recorded by its commit.

A name is resolved once and then loaded by its commit, so that all its files and splits are of the same state.
"""

from __future__ import annotations

import re
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS = 20.0  # to wait for the Hub
_READ: dict[tuple[str, str | None], str | None] = {}  # datasets: asked once per process


def is_commit(revision: object) -> bool:
    """Whether a revision is a commit, which nobody can move, and neither a branch nor a tag."""
    return isinstance(revision, str) and _COMMIT.fullmatch(revision) is not None


def model_commit(name: str, revision: str | None = None) -> str | None:
    """
    The commit that a revision of a model on the Hub is now; `None` for a folder, or if it cannot be found out.

    Args:
        name (`str`):
            Hub id of the model, or a folder.
        revision (`str`, *optional*):
            Commit, branch or tag; by default the newest commit.
    """
    return None if Path(name).is_dir() else _ask(name, revision, "model")


def dataset_commit(path: str, revision: str | None = None) -> str | None:
    """As [`model_commit`], of a dataset; within a process the answer stays the same."""
    key = (path, revision)
    if key not in _READ:
        _READ[key] = _ask(path, revision, "dataset")
    return _READ[key]


def dataset_to_load(path: str, revision: str | None = None) -> str | None:
    """The revision to give to `load_dataset`: the commit, or without a network what was asked for."""
    from huggingface_hub import constants

    commit = dataset_commit(path, revision)
    return revision if constants.HF_HUB_OFFLINE else commit or revision


def commit_read(path: str | None, revision: str | None = None) -> str | None:
    """The commit of a dataset that this process has read from the Hub; `None` if it was not, or is not known."""
    return _READ.get((path, revision)) if path else None


def _ask(name: str, revision: str | None, kind: str) -> str | None:
    if is_commit(revision):
        return revision
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info if kind == "dataset" else HfApi().model_info
        return info(name, revision=revision, timeout=_SECONDS).sha
    except Exception:  # no network, no such name, no access: loading it says which, in words
        return _cached(name, revision or "main", kind)


def _cached(name: str, revision: str, kind: str) -> str | None:
    """The commit that the Hub's cache on this machine knows by a branch or tag."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    if ".." in revision or ".." in name:
        return None
    try:
        path = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind) / "refs" / revision
        found = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return found if is_commit(found) else None
