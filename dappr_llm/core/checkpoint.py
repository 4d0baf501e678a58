"""
The sidecar files beside PEFT's or transformers' own, and the rules for folders that hold runs.

A checkpoint folder (also the Hub repository) holds `adapter_config.json` and `adapter_model.safetensors` (PEFT's
own), `uncertainty_config.json` (method, options, K, letters, prompt, versions), `recipe.yaml` (resolved) and
`results.json`. Nothing here is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import UserError
from .files import write_text
from .names import inside
from .schemas.files import load
from .schemas.manifest import ManifestFile
from .schemas.sidecar import TrainedRows, load_sidecar_file

logger = logging.getLogger(__name__)

SIDECAR = "uncertainty_config.json"
RECIPE = "recipe.yaml"
RESULTS = "results.json"
TRAIN_LOG = "train_log.jsonl"
TABLES = "predictions"
BASELINES = "baselines"  # tables of models that cost nothing, for comparison
TRAINED_ROWS = "trained_rows.json"
MANIFEST = "manifest.json"  # size and SHA-256 of every file, so that damaged checkpoints are detected
FORMAT_VERSION = 1
MANIFEST_VERSION = 1
HUB_ID = r"[\w.-]+/[\w.-]+"
_REMEDY = "fetch or train it again (a file you changed on purpose: remove manifest.json beside it)"
_MOST_HASHED = 2**30
_MOST_FINGERPRINTS = 2**28  # bytes: some ten million rows
_PACKAGES = ("dappr-llm", "torch", "transformers", "peft", "accelerate", "datasets")


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that matter for a result."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def save_sidecar(folder: str | Path, config: dict[str, Any]) -> None:
    """Write `uncertainty_config.json`."""
    content = {"format_version": FORMAT_VERSION, **config, "versions": versions()}
    write_text(Path(folder) / SIDECAR, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def load_sidecar(checkpoint: str | Path, revision: str | None = None) -> tuple[str, dict[str, Any]]:
    """
    The local folder of a checkpoint and its `uncertainty_config.json`.

    Args:
        checkpoint (`str` or `Path`):
            A folder, or the id of a repository on the Hub (downloaded into its cache).
        revision (`str`, *optional*):
            Commit, branch or tag on the Hub.
    """
    folder = Path(local_folder(checkpoint, revision))
    path = folder / SIDECAR
    if not path.is_file():
        runs = [p.parent.name for p in sorted(folder.glob(f"*/{SIDECAR}"))]
        hint = f"; did you mean {folder / runs[-1]}?" if runs else "; give the folder that `dappr train` wrote"
        raise UserError(f"{folder} is not a checkpoint (it holds no {SIDECAR}){hint}")
    for entry in folder.glob("*.*"):  # a library that opens a device or a FIFO would read for ever
        if not entry.name.startswith(".") and not entry.is_dir() and not entry.is_file():
            raise UserError(f"{entry} is no regular file; fetch or train the checkpoint again")
    return str(folder), load_sidecar_file(path)


def check_folders(names: Iterable[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """
    Refuse what is no checkpoint before anything slow is imported; ids on the Hub and tables are left for later.

    Returns:
        `dict`: Folder and sidecar, as `load_sidecar` gives them, of the checkpoints on this machine.
    """
    here = [n for n in names if not n.endswith(".npz") and (Path(n).is_dir() or not _is_hub_id(n))]
    return {name: load_sidecar(name) for name in here}


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(HUB_ID, name) is not None and not name.startswith((".", "/"))


def local_folder(name: str | Path, revision: str | None = None) -> str:
    """A local folder as it is; a Hub id is downloaded into the Hub's cache, and its folder there is returned."""
    return str(name) if Path(name).is_dir() else _download(str(name), revision)


def _download(repo: str, revision: str | None) -> str:
    if not _is_hub_id(repo):
        raise UserError(f"{repo}: no such folder (and not a Hub id of the form user/name)")
    from huggingface_hub import snapshot_download

    # Neither pickles (.bin, .pt) nor code (.py) are ever fetched.
    patterns = ["*.json", "*.safetensors", "*.yaml", "*.md", "*.jinja", "*.model", "*.txt"]
    try:
        return snapshot_download(repo, revision=revision, allow_patterns=patterns)
    except Exception as error:
        raise UserError(f"{repo}: no such folder, and {hub_problem(error, repo, revision)}") from None


def hub_problem(error: Exception, repo: str, revision: str | None = None) -> str:
    """A sentence that explains an error of `huggingface_hub`; any other error is raised again."""
    from huggingface_hub import errors

    kinds: list[tuple[type[Exception], str]] = [
        (errors.RevisionNotFoundError, f"{repo} on the Hub has no revision {revision!r}"),
        (errors.GatedRepoError, f"{repo} on the Hub is gated: ask for access on its page, then `hf auth login`"),
        (
            errors.RepositoryNotFoundError,
            f"the Hub knows no {repo} (or it is private, and your token may not see it: `hf auth login`)",
        ),
        (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE is set, so the Hub is not asked; unset it"),
    ]
    for kind, text in kinds:
        if isinstance(error, kind):
            return text
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            return f"the Hub refused the token ({status}): it needs the right to do this with {repo}; `hf auth login`"
        return f"the Hub answered with an error ({reason})"
    # Connection errors are raised by the HTTP library (httpx, formerly another) without a class in huggingface_hub.
    if isinstance(error, OSError | ValueError) or type(error).__module__.split(".")[0].startswith(
        ("httpx", "httpcore")
    ):
        return f"it could not be fetched from the Hub ({reason})"
    raise error


def weights_hash(folder: str | Path) -> str | None:
    """
    SHA-256 of the weights, to which a decision rule is bound: an adapter's, or an image classifier's; `None` for a
    whole language model, slow to hash.
    """
    path = Path(folder) / "adapter_model.safetensors"
    if not path.is_file():
        path = Path(folder) / "model.safetensors"
        if not path.is_file() or path.stat().st_size > _MOST_HASHED:
            return None
    return sha256(path)


def sha256(path: str | Path) -> str:
    """SHA-256 of a file, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def file_problem(folder: str | Path, required: bool = False, hashes: bool = True) -> str | None:
    """
    Compare a folder's files with its manifest; a message that names the first bad file, or `None` if all match.

    Args:
        folder (`str` or `Path`):
            The folder.
        required (`bool`, *optional*, defaults to `False`):
            Report a missing manifest as well; folders from the Hub and of older versions have none.
        hashes (`bool`, *optional*, defaults to `True`):
            Compare contents too, which reads every file; otherwise sizes only.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        return f"{path} is missing" if required else None
    try:
        content = load(ManifestFile, path, "", MANIFEST_VERSION)
    except UserError as error:
        return str(error)
    if content.pop("checksum") != manifest_checksum(content):
        return f"{path} is damaged (its checksum differs)"
    for name, facts in content["files"].items():
        found = _problem_of(folder, name, facts, hashes)
        if found:
            return found
    return None


def _problem_of(folder: Path, name: str, facts: dict[str, Any], hashes: bool) -> str | None:
    """What is wrong with one file of a manifest; only regular files inside the folder are opened."""
    try:
        path = inside(folder, name)
        size = path.stat().st_size
        if size != facts["size"]:
            return f"{path} is damaged ({size} bytes, {facts['size']} were saved)"
        if hashes and sha256(path) != facts["sha256"]:
            return f"{path} is damaged (its content is not what was saved)"
    except ValueError as error:
        return f"{folder / MANIFEST} lists what is no file of the folder: {error}"
    except FileNotFoundError:
        return f"{folder / name} is missing"
    except OSError as error:
        return f"{folder / name} cannot be read ({error.strerror or error})"
    return None


def check_files(folder: str | Path) -> None:
    """Raise a `UserError` that names the first bad file of a folder, see [`file_problem`]."""
    found = file_problem(folder)
    if found:
        raise UserError(f"{found}; {_REMEDY}")


def manifest_checksum(content: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content, so that a damaged manifest is noticed too."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def save_fingerprints(folder: str | Path, rows: Iterable[str]) -> None:
    """Write short hashes of the training rows, so that calibration can refuse them."""
    write_text(Path(folder) / TRAINED_ROWS, json.dumps({"sha256_64": sorted(set(rows))}, allow_nan=False) + "\n")


def load_fingerprints(folder: str | Path) -> frozenset[str]:
    """The hashes that `save_fingerprints` wrote; none if there is no such file."""
    path = Path(folder) / TRAINED_ROWS
    if not path.is_file():
        return frozenset()
    cure = "fetch or train the checkpoint again"
    return frozenset(load(TrainedRows, path, cure, limit=_MOST_FINGERPRINTS)["sha256_64"])


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Every `checkpoint-N` of a run, the newest first."""
    numbered = [(p.name.rsplit("-", 1)[1], p) for p in Path(output_dir).glob("checkpoint-*") if p.is_dir()]
    return [p for _, p in sorted(((int(n), p) for n, p in numbered if n.isdecimal()), reverse=True)]


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest `checkpoint-N` whose files match its manifest; damaged ones are skipped with a warning."""
    for folder in checkpoints(output_dir):
        found = file_problem(folder, required=True)
        if found is None:
            return str(folder)
        logger.warning(f"{found}: {folder.name} is passed over, an older checkpoint is looked for")
    return None
