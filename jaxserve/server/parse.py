"""A request body to checked fields, or a 400 that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from msgspec import Struct

from jaxserve.server.errors import ApiError, invalid
from jaxserve.server.schema import FREE_FORM, REJECTED, SILENT, Harmless, field_names

MAX_DEPTH = 64
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MISSING = re.compile("missing required field `(.+)`")


class Parsed[T](NamedTuple):
    fields: T
    ignored: tuple[str, ...]
    """Names of fields that nothing here knows."""


async def read_json(request: web.Request) -> bytes:
    """The body, if it claims to be JSON. `client_max_size` of the app bounds it (413)."""
    kind = request.content_type
    if "Content-Type" in request.headers and kind != "application/json":
        raise ApiError(
            415,
            f"Content-Type must be application/json, got {kind[:80]}",
            code="unsupported_media_type",
        )
    return await request.read()


def parse[T: Struct](
    body: bytes,
    kind: type[T],
    rejected: Mapping[str, Harmless] = REJECTED,
    silent: Set[str] = SILENT,
) -> Parsed[T]:
    """`rejected`: fields that are refused, with the values that ask for nothing; `silent`: fields
    without effect that need no mention."""
    try:
        fields = msgspec.json.decode(body, type=kind)
        names = field_names(kind)
        extras = [(n, raw) for n, raw in _RAW_FIELDS.decode(body).items() if n not in names]
        ignored = tuple(
            name
            for name, raw in extras
            if name not in silent and not _harmless(name, raw, rejected)
        )
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        missing = _MISSING.search(message)
        parts = [path.strip("`."), missing[1] if missing else ""]
        raise invalid(message, param=".".join(filter(None, parts)) or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise invalid("the body is not valid JSON in UTF-8", code="invalid_json") from None
    except RecursionError:
        raise _too_deep(None) from None
    for name in FREE_FORM & names:
        _check_depth(getattr(fields, name), name)
    return Parsed(fields, ignored)


def _check_depth(value: Any, param: str) -> None:
    """Refuse JSON nested so deeply that what reads it later might run out of stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise _too_deep(param)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [item for item in value.values() if isinstance(item, dict | list | Struct)]
    if isinstance(value, list):
        return [item for item in value if isinstance(item, dict | list | Struct)]
    if isinstance(value, Struct):
        return [getattr(value, name) for name in value.__struct_fields__]
    return []


def _harmless(name: str, raw: msgspec.Raw, rejected: Mapping[str, Harmless]) -> bool:
    """Whether the field asks for nothing; raises if it asks for what is not there."""
    if name not in rejected:
        return False
    value = msgspec.json.decode(raw)
    # True and 1 are equal in Python, and not in JSON.
    alike = [one for one in rejected[name] if isinstance(one, bool) == isinstance(value, bool)]
    if value is not None and value not in alike:
        raise invalid(f"{name} is not supported", param=name, code="unsupported_parameter")
    return True


def _too_deep(param: str | None) -> ApiError:
    return invalid(f"JSON is nested more than {MAX_DEPTH} levels deep", param=param)
