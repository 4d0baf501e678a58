"""Reading a JSON file of ours: a regular file of bounded size, of a known version, valid by its schema."""

from __future__ import annotations

from typing import Any

from ..errors import UserError
from ..files import JSON_LIMIT, PathLike, read_json
from .check import check, shown


def load(
    schema: Any,
    path: PathLike,
    cure: str,
    newest: int = 1,
    version: str = "format_version",
    limit: int = JSON_LIMIT,
) -> dict[str, Any]:
    """
    What a JSON file says, checked.

    Args:
        schema (`type`):
            The schema of the file.
        path (`str` or `Path`):
            The file.
        cure (`str`):
            What to do about a damaged one.
        newest (`int`, *optional*, defaults to 1):
            The newest version that can be read.
        version (`str`, *optional*, defaults to `"format_version"`):
            The key that holds the version.
        limit (`int`, *optional*, defaults to 16 MiB):
            How many bytes the file may hold.

    Returns:
        `dict`: The content as it stands in the file, keys of later versions included.
    """
    try:
        content = read_json(path, limit)
    except UserError as error:
        raise UserError(str(error).rstrip(".") + (f"; {cure}" if cure else "")) from None
    check_version(content, path, newest, version)
    check(schema, content, f"{path} is damaged", cure=cure)
    return content


def check_version(content: Any, path: PathLike, newest: int, version: str = "format_version") -> None:
    """Refuse a file of a later version with what to do, before its keys are judged by this version's schema."""
    found = content.get(version) if isinstance(content, dict) else None
    if isinstance(found, int) and not isinstance(found, bool) and found > newest:
        raise UserError(f"{path} was written by a newer dappr_llm (format {shown(found)}); please upgrade")
