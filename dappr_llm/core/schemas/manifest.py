"""`manifest.json`: size and SHA-256 of every file of a folder."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from .types import LONGEST_TEXT, File, Sha256, Text


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or PureWindowsPath(name).drive or "\\" in name or name in ("", "."):
        raise ValueError("names of files are relative and stay in the folder")
    return name


FileName = Annotated[Text, Field(min_length=1, max_length=LONGEST_TEXT), AfterValidator(_inside)]


class FileFacts(File):
    """One file."""

    size: Annotated[int, Field(ge=0, le=2**50)]
    sha256: Sha256


class ManifestFile(File):
    """The whole file."""

    format_version: Literal[1]
    files: Annotated[dict[FileName, FileFacts], Field(max_length=100_000)]
    checksum: Sha256
