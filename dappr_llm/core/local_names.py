"""What names this machine (paths, the user, the host), and taking it out of what is published."""

from __future__ import annotations

import getpass
import re
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

# Where a path of this machine starts: /…, ~…, ./…, ../…, file:…, C:\… or C:/…, \\server\…; not within a URL or a word.
_START = (
    r"(?:file:/{0,3}"
    r"|(?<![\w.:/\\~<-])(?:~[\w.-]*|\.{1,2})?/(?=[^\s/])"
    r"|(?<![\w.:/\\~-])~[\w.-]*\\"
    r"|(?<![A-Za-z0-9])[A-Za-z]:[\\/]"
    r"|(?<!\\)\\\\(?=[\w.?]))"
)
_PART = r"[^\s/\\'\"`=,;|<>]"
# Spaces belong to a path where a separator follows further on: "/home/Jane Doe/my rows.jsonl".
_IN_TEXT = re.compile(rf"{_START}{_PART}*(?:(?: (?!-){_PART}+)*[/\\]+{_PART}*)*")
_QUOTED = re.compile(rf"(?P<quote>['\"`])(?P<before>[\w.-]*=)?(?P<path>{_START}[^'\"`\n]*)(?P=quote)")
_WHOLE = re.compile(rf"{_START}[^'\"`=\n]*")
_USER_HOME = re.compile(r"~[A-Za-z_][\w.-]*(?=$|[\s'\"`,;])")
_REMOTE = re.compile(r"(?<![\w./])[\w.+-]+@(?P<host>[\w-]+(?:\.[\w-]+)*)(?P<path>:[/~][^\s'\"`]*)?")
_HOMES = {"home", "users", "documents and settings"}
# User and host names that are everybody's, or words of ours.
_COMMON = {
    "root", "user", "users", "admin", "test", "tester", "home", "ubuntu", "runner", "jovyan", "docker", "localhost",
    "guest", "nobody", "data", "train", "model", "main", "dappr", "mine", "base", "none", "true", "false", "auto",
    "text", "vision",
}  # fmt: skip
HIDDEN = "…"


def portable(text: str) -> str:
    """
    The text with every local path reduced to its last component, and without user and host names of this machine.

    Args:
        text (`str`):
            A command, a description, or a path alone. Hub ids, URLs and relative paths stay as they are.
    """
    if _WHOLE.fullmatch(text) and not re.search(r"\s--?\w", text):
        return _without_names(_last_part(text))
    text = _QUOTED.sub(lambda found: _requoted(found), text)
    text = _REMOTE.sub(_without_host, text)
    text = _IN_TEXT.sub(lambda found: _last_part(found[0]), text)
    return _without_names(_USER_HOME.sub("~", text))


def portable_values(value: Any) -> Any:
    """A JSON value in which every text is [`portable`]; keys that are paths too."""
    if isinstance(value, Mapping):
        return {portable(key) if isinstance(key, str) else key: portable_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable_values(item) for item in value]
    return portable(value) if isinstance(value, str) else value


def _requoted(found: re.Match[str]) -> str:
    return f"{found['quote']}{found['before'] or ''}{_last_part(found['path'])}{found['quote']}"


def _last_part(path: str) -> str:
    """The last component; a user's home folder and a server alone have a name of their own that is hidden."""
    from urllib.parse import unquote

    is_url, is_share = path.startswith("file:"), path.startswith("\\\\")
    path = unquote(path) if is_url else path
    parts = [part for part in re.split(r"[/\\]+", path) if part not in ("", ".", "..")]
    parts = parts[1:] if is_url else parts
    if path.startswith("~"):
        parts = parts[1:]
    if not parts or (len(parts) == 1 and is_share):
        return HIDDEN
    if len(parts) >= 2 and parts[-2].lower() in _HOMES:
        return "~"
    return HIDDEN if re.fullmatch(r"[A-Za-z]:", parts[-1]) else parts[-1]


def _without_host(found: re.Match[str]) -> str:
    """`me@machine` and `me@machine:/path`; an e-mail address, whose host has a dot, is its author's choice."""
    if found["path"]:
        return _last_part(found["path"][1:])
    return found[0] if "." in found["host"] and found["host"] not in _own_names() else HIDDEN


def _without_names(text: str) -> str:
    # `name/…` may be an id of the Hub, which users often name as themselves.
    for name in _own_names():
        if name in text:
            text = re.sub(rf"(?<![\w/@-]){re.escape(name)}(?![\w/-])|(?<=[_-]){re.escape(name)}$", HIDDEN, text)
    return text


@cache
def _own_names() -> tuple[str, ...]:
    """Names of the user and the host of this process."""
    found = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    with suppress(OSError, KeyError):  # a user id without a name, as in containers
        found.add(getpass.getuser())
    return tuple(sorted(name for name in found if len(name) > 3 and name.lower() not in _COMMON))[::-1]


def own_paths(*folders: str | Path) -> tuple[str, ...]:
    """
    Paths that must not stand in anything published: the home folder, temporary files, the working folder, and others.

    Args:
        folders (`str` or `Path`):
            More of them, such as the folder that is published; its parents, not itself, are looked for.
    """
    places = [
        Path.home(),
        Path.cwd(),
        Path(tempfile.gettempdir()),
        *(Path(folder).resolve().parent for folder in folders),
    ]
    # A path of one part stands in much text that has nothing to do with this machine.
    return tuple(sorted({str(place) for place in places if len(place.parts) > 2}))
