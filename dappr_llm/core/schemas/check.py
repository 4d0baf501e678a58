"""Values against a schema, and the one form of error."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ..errors import UserError, close_names, nearest
from .synonyms import suggest_key

_SHOWN = 60  # characters of a value that an error shows
_LONG = 200  # characters of a list of allowed values, past which a suggestion stands alone
_TRUTH = {"yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def check(schema: Any, values: Any, where: str, prefix: str = "", cure: str = "") -> Any:
    """
    Values as a schema wants them, or a `UserError`.

    Args:
        schema (`type`):
            A pydantic model, or a `TypedDict` for a section that only holds what it was given.
        values (`Any`):
            What a file or a caller said.
        where (`str`):
            Name of the file, or of what was given.
        prefix (`str`, *optional*):
            The keys above these values, with a dot after each (`"train."`).
        cure (`str`, *optional*):
            What to do about it, for files that nobody writes by hand.
    """
    try:
        return _adapter(schema).validate_python(values)
    except ValidationError as error:
        text = _explain(schema, error, values, prefix)
    except RecursionError:
        text = "it is nested too deeply"
    raise UserError(f"{where}: {text}{f'; {cure}' if cure else ''}")


def json_schema(schema: Any) -> dict[str, Any]:
    """The JSON schema of a schema."""
    return _adapter(schema).json_schema()


def shown(value: Any) -> str:
    """A value in an error, short."""
    text = repr(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _explain(schema: Any, error: ValidationError, values: Any, prefix: str) -> str:
    found = error.errors(include_url=False, include_context=True)
    # A union gives one error per branch: the branch that came furthest was meant, and its first error says enough.
    every = dict.fromkeys(_place(entry, values) for entry in found)
    places = [place for place in every if not any(p != place and p[: len(place)] == place for p in every)]
    first = next(entry for entry in found if _place(entry, values) == places[0])
    text = _sentence(schema, first, places[0], values, prefix)
    if len(places) > 1:
        others = [prefix + ".".join(map(str, place)) for place in places[1:4]]
        text += f" (also wrong: {', '.join(others)}{', …' if len(places) > 4 else ''})"
    return text


def _place(entry: Any, values: Any) -> tuple[Any, ...]:
    """Keys and indices that lead to the value; pydantic mixes names of branches and of types into them."""
    place: list[Any] = []
    here = values
    last = len(entry["loc"]) - 1
    for number, part in enumerate(entry["loc"]):
        if (
            isinstance(here, Mapping)
            and part in here
            or isinstance(here, list | tuple)
            and isinstance(part, int)
            and part < len(here)
        ):
            here = here[part]
        elif not (number == last and entry["type"] == "missing"):
            continue
        place.append(part)
    return tuple(place)


def _sentence(schema: Any, entry: Any, place: tuple[Any, ...], values: Any, prefix: str) -> str:
    key = prefix + ".".join(map(str, place))
    part = _part(json_schema(schema), place)
    if entry["type"] == "extra_forbidden":
        valid = _keys(_part(json_schema(schema), place[:-1]))
        return f"unknown key {key!r}; {suggest_key(place[-1], valid)}"
    allowed = describe(part)
    if entry["type"] == "missing":
        return f"{key} is missing; allowed: {allowed}"
    if entry["type"].startswith("union_tag"):
        return _wrong_tag(entry["ctx"], key, part)
    value = values
    for step in place:
        value = value[step]
    named = key or "its content"
    if entry["type"] == "value_error":
        reason = str(entry["ctx"]["error"])
        if isinstance(value, Mapping):  # keys that do not fit each other: the reason names them
            return f"{key}: {reason}" if key else reason
        return f"{named} is {shown(value)}: {reason}"
    near = _nearest_form(value, part)
    if near and len(allowed) > _LONG:
        return f"{named} is {shown(value)}; did you mean {near}?"
    return f"{named} is {shown(value)}; allowed: {allowed}{f'; did you mean {near}?' if near else ''}"


def _wrong_tag(context: Any, key: str, part: dict[str, Any]) -> str:
    """For forms that one key tells apart, such as `kind`."""
    name = str(context["discriminator"]).strip("'")
    kinds = [branch.get("properties", {}).get(name, {}).get("const") for branch in part.get("anyOf", [part])]
    valid = [kind for kind in kinds if kind is not None]
    if "tag" not in context:
        return f"{key}.{name} is missing; allowed: one of {', '.join(valid)}"
    return f"{key}.{name} is {shown(context['tag'])}; {nearest(context['tag'], valid)}"


# --- JSON schemas in words ------------------------------------------------------------------------------------------


def _part(whole: dict[str, Any], place: tuple[Any, ...]) -> dict[str, Any]:
    """The part of a JSON schema that describes a place; `{}` if nothing does."""
    parts = _branches(whole, whole)
    for step in place:
        inner: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(step, int) and "items" in part:
                inner += _branches(part["items"], whole)
            elif step in part.get("properties", {}):
                inner += _branches(part["properties"][step], whole)
            else:
                others = [part.get("additionalProperties"), *part.get("patternProperties", {}).values()]
                inner += [leaf for other in others if isinstance(other, dict) for leaf in _branches(other, whole)]
        parts = inner
    return parts[0] if len(parts) == 1 else {"anyOf": parts} if parts else {}


def _branches(part: dict[str, Any], whole: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in part:
        return _branches(whole["$defs"][part["$ref"].rsplit("/", 1)[1]], whole)
    for union in ("anyOf", "oneOf"):
        if union in part:
            return [leaf for branch in part[union] for leaf in _branches(branch, whole)]
    return [part]


def _keys(part: dict[str, Any]) -> set[str]:
    return {key for branch in part.get("anyOf", [part]) for key in branch.get("properties", {})}


def describe(part: dict[str, Any]) -> str:
    """A JSON schema in words: `a whole number from 1 to 64`."""
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(describe(branch) for branch in part["anyOf"]))
    if "const" in part:
        return _yaml(part["const"])
    if "enum" in part:
        return ("one of " if len(part["enum"]) > 1 else "") + ", ".join(_yaml(value) for value in part["enum"])
    kind = part.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _range(part)
    if kind == "string":
        if part.get("pattern") == r"^[0-9a-f]{64}$":
            return "a SHA-256 in hexadecimal"
        limit = f" of at most {part['maxLength']:,} characters" if "maxLength" in part else ""
        return ("a text that is not empty," if part.get("minLength") else "a text") + limit
    if kind == "array":
        inner = part.get("items")
        least, most = part.get("minItems", 0), part.get("maxItems")
        count = f" of {least}" if least and least == most else ", not empty" if least else ""
        return "a list" + count + (f", each {describe(inner)}" if inner and "$ref" not in str(inner) else "")
    words = {"boolean": "true or false", "null": "null", "object": "a mapping"}
    return words.get(str(kind), "a valid value")


def _range(part: dict[str, Any]) -> str:
    low, high = part.get("minimum", part.get("exclusiveMinimum")), part.get("maximum", part.get("exclusiveMaximum"))
    if high is not None and abs(high) >= 1e9 and low is not None:
        high = None
    if low is not None and low <= -1e30:
        low = None
    words = []
    if low is not None:
        words.append(f"of at least {low:g}" if "minimum" in part else f"above {low:g}")
    if high is not None and abs(high) < 1e30:
        words.append(f"at most {high:g}" if "maximum" in part else f"below {high:g}")
    return " " + " and ".join(words) if words else ""


def _yaml(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if not isinstance(value, str) else value


def _nearest_form(value: Any, part: dict[str, Any]) -> str:
    """The valid form that a value comes closest to, as it is written in YAML; empty if none is near."""
    branches = part.get("anyOf", [part])
    kinds = {branch.get("type") for branch in branches}
    words = [
        str(word) for branch in branches for word in branch.get("enum", [branch.get("const")]) if word is not None
    ]
    if isinstance(value, str):
        if kinds & {"integer", "number"} and (number := _number(value, "number" not in kinds)):
            return f"{number} (without quotes)"
        if "boolean" in kinds and value.strip().lower() in _TRUTH:
            return _yaml(_TRUTH[value.strip().lower()])
        close = close_names(value, words, 2)
        if close:
            return " or ".join(close)
    elif isinstance(value, float) and "integer" in kinds and value == int(value if abs(value) < 1e15 else 0):
        return str(int(value))
    if "array" in kinds and isinstance(value, str | int | float) and not isinstance(value, bool):
        return f"[{value}]" if len(str(value)) <= _SHOWN else "a list with it"
    return ""


def _number(text: str, whole: bool) -> str:
    try:
        number = float(text.replace(",", "."))
    except ValueError:
        return ""
    if number != number or abs(number) > 1e15:
        return ""
    return str(int(number)) if number == int(number) else "" if whole else f"{number:g}"
