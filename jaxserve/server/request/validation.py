"""Messages for wrong bodies: which field is wrong, the allowed values, the actual value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from jaxserve.api import EngineLimits
from jaxserve.server.errors import ApiError, invalid

MAX_SHOWN = 60
"""The most characters of a value that its error repeats."""

_FIELD_IN_MESSAGE = re.compile("Object (missing required|contains unknown) field `(.+)`")
_EXPECTED = re.compile(r"Expected `([^`]+)`(?: (of length )?([<>]=?) (\S+))?(, got .*)?")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_type_info = cache(inspect.type_info)

_SIGNS = {"<=": "at most", ">=": "at least", "<": "below", ">": "above"}
_LENGTHS = {"array": " entries", "object": " entries", "str": " characters"}
_TYPES = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "object": "an object",
    "str": "a string",
}

type Step = str | int
"""A field's name or a position. `...` stands for a key of a mapping, which msgspec does not
report."""


def not_json(error: Exception, body: bytes) -> ApiError:
    """Makes the 400 for a body that is not JSON. `error`: the exception of msgspec."""
    if not body:
        return invalid("the body is empty where JSON is expected", code="invalid_json")
    # Python's own error for invalid UTF-8 would repeat the bytes.
    said = str(error) if isinstance(error, msgspec.DecodeError) else "not UTF-8"
    reason = said.removeprefix("JSON is malformed: ")
    return invalid(f"the body is not valid JSON in UTF-8: {reason}", code="invalid_json")


def wrong_field(
    error: msgspec.ValidationError, sent: bytes | Sequence[Any], kind: Any, at: str = ""
) -> ApiError:
    """Makes the 400 for JSON that is not of type `kind`. Names the field, the allowed values, and
    the actual value. `sent`: a body, or the list in its field `at`."""
    message, _, path = str(error).partition(" - at `$")
    steps = [
        int(position) if position.isdecimal() else name or "..."
        for name, position in _STEP.findall(path)
    ]
    if message.startswith("Invalid "):
        choices = ", ".join(map(repr, dict.fromkeys(_choices(_type_info(kind), steps))))
        message += f"; it must be one of {choices}" if choices else ""
    elif message.startswith("Expected ") and "got" not in message:
        message += _shown(sent, steps)
    param = (at + path).strip("`.")
    if named := _FIELD_IN_MESSAGE.fullmatch(message):
        param = f"{param}.{named[2]}".removeprefix(".")
        said = "is required" if named[1] == "missing required" else "is not known"
        return invalid(f"{param} {said}", param=param)
    if message.startswith("Expected "):
        return invalid(f"{param or 'the body'} {_must(message)}", param=param or None)
    return invalid(f"{param}: {message}" if param else message, param=param or None)


def _must(message: str) -> str:
    """Translates msgspec's "Expected `int` >= 1, got 0" to "must be at least 1, got 0"."""
    match = _EXPECTED.fullmatch(message)
    if match is None:  # such as "Expected `str` matching regex '...'"
        return message.replace("Expected `str` ", "must be a string ")
    types, length, sign, bound, got = match.groups()
    got = re.sub("`([^`]+)`", lambda kinds: _in_words(kinds[1]), got or "")
    if sign is None:
        return f"must be {_in_words(types)}{got}"
    if length is None:
        return f"must be {_SIGNS[sign]} {float(bound):g}{got}"
    if (sign, bound) == (">=", "1"):
        return "must not be empty"
    return f"must have {_SIGNS[sign]} {bound}{_LENGTHS.get(types, '')}{got}"


def _in_words(types: str) -> str:
    """Translates types as msgspec writes them: "int | null" becomes "an integer or null"."""
    return " or ".join(_TYPES.get(name, name) for name in types.split(" | "))


def _shown(sent: bytes | Sequence[Any], steps: Sequence[Step]) -> str:
    """Returns the actual value if it is a number or short text, else its length."""
    try:
        value: Any = msgspec.json.decode(sent) if isinstance(sent, bytes) else sent
        for step in steps:
            value = value[step]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return ""  # the key of a mapping is unknown, and the body may be invalid after the field
    if isinstance(value, list | dict):
        return f", got {len(value)}"
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        return f", got {len(value)} characters"
    return f", got {value!r}"[:MAX_SHOWN] if isinstance(value, str | int | float) else ""


def _choices(info: inspect.Type, steps: Sequence[Step]) -> Iterator[Any]:
    """Yields the allowed values of an enumeration, or the tags of a union of structs."""
    match info:
        case inspect.Metadata(type=inner):
            yield from _choices(inner, steps)
        case inspect.UnionType(types=types):
            for one in types:
                yield from _choices(one, steps)
        case inspect.LiteralType(values=values) if not steps:
            yield from values
        case inspect.ListType(item_type=inner) if steps and isinstance(steps[0], int):
            yield from _choices(inner, steps[1:])
        case inspect.DictType(value_type=inner) if steps and steps[0] == "...":
            yield from _choices(inner, steps[1:])
        case inspect.StructType(fields=fields, tag=tag, tag_field=tag_field) if steps:
            if [tag_field] == list(steps):
                yield tag
            for field in fields:
                if field.encode_name == steps[0]:
                    yield from _choices(field.type, steps[1:])
        case _:
            pass


def check_token_ids(ids: Sequence[int], limits: EngineLimits, param: str) -> None:
    """Checks that the vocabulary has all ids. Raises ApiError that names the first unknown one."""
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise _token_id_error(wrong, limits, param)


def _token_id_error(token: int, limits: EngineLimits, param: str) -> ApiError:
    return invalid(
        f"token id {token} is not in the vocabulary: 0 to {limits.vocab_size - 1}", param=param
    )
