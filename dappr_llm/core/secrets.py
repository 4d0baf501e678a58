"""
Secrets: which texts and names are those of tokens and passwords; masking them, finding them, refusing them in recipes.

Commands, recipes and arguments are saved with every run and published with every upload, so they hold no secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UserError

MASK = "***"
_CURE = "log in with `hf auth login`, or set HF_TOKEN in the environment"


@dataclass(frozen=True)
class _Shape:
    """What secrets of one kind look like; `anchors` are parts without which the slow expression is not tried."""

    kind: str
    anchors: tuple[str, ...]
    pattern: re.Pattern[str]


def _shape(kind: str, anchors: str, pattern: str) -> _Shape:
    return _Shape(kind, tuple(anchors.split()), re.compile(rf"(?<![A-Za-z0-9])(?:{pattern})"))


# The group `keep`, where there is one, is what stays readable before the secret.
_SHAPES = (
    # With few letters only if they are no plain word: `hf_pipeline` is a name of ours.
    _shape(
        "a Hugging Face token",
        "hf_ api_org_",
        r"(?:hf|api_org)_(?:[A-Za-z0-9]{16,}|(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,})",
    ),
    _shape(
        "an API key (sk-…)",
        "sk- sk_",
        r"sk-(?:(?=[\w-]{0,40}\d)[\w-]{16,}|(?:\w{2,10}-){0,2}[A-Za-z0-9]{20,})|g?sk_(?:live_|test_)?[A-Za-z0-9]{20,}",
    ),
    _shape(
        "a GitHub token",
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}",
    ),
    _shape("a GitLab token", "glpat-", r"glpat-[\w-]{16,}"),
    _shape("an AWS access key", "AKIA ASIA", r"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])"),
    _shape("a Google API key", "AIza", r"AIza[\w-]{35}"),
    _shape("a Slack token", "xox", r"xox[abeoprs]-[\w-]{10,}"),
    _shape("a package index token", "pypi- npm_", r"pypi-[\w-]{40,}|npm_[A-Za-z0-9]{36}"),
    _shape("a Weights & Biases key", "wandb_v", r"wandb_v\d_\w{20,}"),
    _shape("a JSON web token", "eyJ", r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"),
    _shape(
        "a private key",
        "PRIVATE",
        r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----(?:[^-]*-----END [A-Z ]*PRIVATE KEY-----)?",
    ),
    _shape(
        "an authorization header",
        "earer asic",
        r"(?P<keep>[Bb]earer\s+)(?:(?=\S{0,40}\d)[\w.~+/=-]{8,}|[\w.~+/=-]{20,})"
        r"|(?P<keep2>[Aa]uthorization['\"]?\s*[:=]\s*['\"]?[Bb]asic\s+)[\w+/=-]{6,}",
    ),
    _shape(
        "a URL with credentials",
        "://",
        r"(?P<keep>[A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s/?#'\"<>@]*:[^\s/?#'\"<>]+(?=@)"
        r"|(?P<keep2>https?://)(?!\*+@)[^\s/?#'\"<>:@]+(?=@)",
    ),
)

# Words of a name that make its value a secret, alone or as a pair.
_WORDS = {"password", "passwd", "pwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey"}
_PAIRS = {(first, "key") for first in ("api", "access", "account", "auth", "private", "secret", "signing")}
# `…_token` names a secret, except where it names a text: what a tokenizer calls its special tokens.
_TEXT_TOKENS = {
    "bos", "eos", "pad", "unk", "sep", "cls", "mask", "additional", "special", "extra", "image", "video",
    "audio", "boi", "eoi", "boa", "eoa", "decoder", "start", "end", "first", "last", "next", "letter", "answer",
    "per", "new", "prefix", "suffix", "middle", "eot", "eod", "think", "language", "object", "space", "word",
    "split",
}  # fmt: skip
_NAME = r"[A-Za-z_][\w.-]{0,100}"
# A name that may be a secret's; `is_secret_name` decides.
_LIKELY = r"(?<![\w.])(?=[\w.-]{0,100}?(?i:token|pat|pass|pwd|secret|key|credential))[A-Za-z_][\w.-]{0,100}"
# In text: `name=value`, `--name value`, and `name: value` on a line of its own, in braces or in quotes.
_ASSIGNED = re.compile(rf"(?P<name>{_LIKELY})['\"]?\s*=\s*(?P<value>'[^'\n]*'|\"[^\"\n]*\"|[^\s'\",;&)}}\]]+)")
_FLAGGED = re.compile(rf"(?<!\S)--?(?P<name>{_LIKELY})[ \t]+(?P<value>'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"-]\S*)")
_MAPPED = re.compile(
    rf"(?:(?:^|[{{,(\[])[ \t-]*|(?P<quote>['\"]))(?P<name>{_LIKELY})['\"]?[ \t]*:[ \t]*"
    r"(?P<value>'[^'\n]*'|\"(?:[^\"\\\n]|\\.)*\"|[^\s'\",;{}\[\]]+(?=[ \t]*(?:$|[,}\]])))",
    flags=re.M,
)
_NAMED = (_ASSIGNED, _FLAGGED, _MAPPED)
_PLACEHOLDER = re.compile(r"\*+|<[^<>]*>|\$\w+|\$\{\w+\}|…|\.\.\.|(?i:null|none|true|false|~)|")
_CREDENTIAL = re.compile(r"(?!\d+$)[A-Za-z0-9_.~+/=!@#$%^&*:-]{6,}")
_FROM_ENVIRONMENT = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN", "GH_TOKEN",
    "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "COMET_API_KEY",
)  # fmt: skip


def is_secret_name(name: object) -> bool:
    """Whether a key, flag or variable of this name holds a secret: `hub_token`, `--api-key`; not `max_tokens`."""
    last = re.split(r"[.\[\]]", str(name).strip("-"))[-1]
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", last)]
    if _WORDS & set(words) or _PAIRS & set(zip(words, words[1:], strict=False)):
        return True
    return bool(words) and words[-1] in ("token", "pat") and not _TEXT_TOKENS & set(words)


def mask(value: Any) -> Any:
    """
    A copy in which every secret is `***`.

    Args:
        value (`Any`):
            A text; a command line as a list of arguments; a mapping, with mappings and lists inside. Anything else is
            returned as it is.
    """
    if isinstance(value, str):
        return _mask_text(value)
    if isinstance(value, Mapping):
        return {key: MASK if is_secret_name(key) and _is_secret(item) else mask(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mask_arguments(value)) if type(value) in (list, tuple) else value
    return value


def _is_secret(value: object) -> bool:
    """Whether the value under a secret's name is one; nothing, a placeholder or a mapping is not."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    return _PLACEHOLDER.fullmatch(str(value).strip()) is None


def _mask_arguments(arguments: Iterable[Any]) -> Iterator[Any]:
    """The elements of a command line: whatever follows a secret's flag or name is masked to the end of the element."""
    after_flag = False
    for argument in arguments:
        if not isinstance(argument, str):
            after_flag = False
            yield mask(argument)
            continue
        name, assigned, value = argument.partition("=")
        named = re.fullmatch(rf"-{{0,2}}{_NAME}", name) is not None
        if after_flag and not argument.startswith("--"):
            yield MASK
        elif assigned and named and is_secret_name(name) and _is_secret(value):
            yield f"{name}={MASK}"
        else:
            yield _mask_text(argument)
        after_flag = argument.startswith("-") and not assigned and named and is_secret_name(argument)


def _mask_text(text: str) -> str:
    for known in _known_secrets():
        text = text.replace(known, MASK)
    for shape in _SHAPES:
        if any(anchor in text for anchor in shape.anchors):
            text = shape.pattern.sub(_masked, text)
    for pattern in _NAMED:
        text = pattern.sub(_masked_value, text)
    return text


def _masked(match: re.Match[str]) -> str:
    return next((text for name, text in match.groupdict().items() if name.startswith("keep") and text), "") + MASK


def _masked_value(match: re.Match[str]) -> str:
    if not _names_secret(match):
        return match[0]
    before = match[0][: match.start("value") - match.start()]
    # A number of a JSON file becomes a text there.
    quote = match["value"][0] if match["value"][0] in "'\"" else match.groupdict().get("quote") or ""
    return f"{before}{quote}{MASK}{quote}"


def _names_secret(match: re.Match[str]) -> bool:
    return is_secret_name(match["name"]) and _is_secret(match["value"].strip("'\""))


def _known_secrets() -> list[str]:
    """Tokens in this process's environment, whatever they look like."""
    return [value for name in _FROM_ENVIRONMENT if len(value := os.environ.get(name, "")) >= 8]


# --- finding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A secret in a text: its kind and line, never the secret itself."""

    kind: str
    line: int


def find_secrets(content: bytes | str, known: Iterable[str] = ()) -> list[Found]:
    """
    The secrets in the content of a file, also a binary one.

    Args:
        content (`bytes` or `str`):
            The content; bytes that are no UTF-8 do not disturb.
        known (`Iterable[str]`, *optional*):
            Secrets to look for whatever they look like, such as the token that is used for uploading.
    """
    text = content if isinstance(content, str) else content.decode("utf-8", errors="replace")
    found: list[tuple[str, int]] = []
    for secret in {*known, *_known_secrets()}:
        if secret and (place := text.find(secret)) >= 0:
            found.append(("an access token in use here", place))
    for shape in _SHAPES:
        if any(anchor in text for anchor in shape.anchors):
            found += [(shape.kind, match.start()) for match in shape.pattern.finditer(text)]
    for pattern in _NAMED:
        for match in pattern.finditer(text):
            # Stricter than masking: a false alarm stops an upload, and a vocabulary has numbers under such names.
            if _names_secret(match) and _CREDENTIAL.fullmatch(match["value"].strip("'\"")):
                found.append((f"a value of {match['name']!r}", match.start("name")))
    return [Found(kind, text.count("\n", 0, place) + 1) for kind, place in sorted(found, key=lambda each: each[1])]


def refuse_secrets(values: Any, where: str, prefix: str = "") -> None:
    """
    Refuse a token or password in a recipe, which is saved with the run and published with the model.

    Args:
        values (`Any`):
            The recipe's values, nested.
        where (`str`):
            The recipe file, for the message.
        prefix (`str`, *optional*):
            The key that holds `values`.
    """
    if isinstance(values, Mapping):
        for key, value in values.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            if is_secret_name(key) and _is_secret(value):
                raise UserError(f"{where}: {name} is a secret, and recipes are saved and published; {_CURE}")
            refuse_secrets(value, where, name)
    elif isinstance(values, list | tuple):
        for number, value in enumerate(values):
            refuse_secrets(value, where, f"{prefix}[{number}]")
    elif isinstance(values, str):
        for shape in _SHAPES:
            if any(anchor in values for anchor in shape.anchors) and shape.pattern.search(values):
                raise UserError(
                    f"{where}: {prefix or 'a value'} holds {shape.kind}, and recipes are saved and published; {_CURE}"
                )
