"""Decodes a request body to checked fields, or raises a 400 that names the field."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Set
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from msgspec import Struct

from jaxserve.server.errors import ApiError, invalid, too_large
from jaxserve.server.off_loop import PARSED_INLINE_BYTES, Lane, lane, off_loop
from jaxserve.server.request.schema import FREE_FORM, field_names
from jaxserve.server.request.unpack import unpacked
from jaxserve.server.request.unsupported import INSTEAD, REJECTED, SILENT, Harmless
from jaxserve.server.request.validation import not_json, wrong_field
from jaxserve.server.service import SERVICE

MAX_DEPTH = 64
MAX_IGNORED = 256
"""The most fields without effect that are reported per request."""
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Parsed[T](NamedTuple):
    """A request's body."""

    fields: T
    ignored: tuple[str, ...]
    """The first unknown fields; inner ones as `field.inner`."""
    size: int
    """Size of the body in bytes."""


async def read_fields[T: Struct](
    request: web.Request,
    kind: type[T],
    rejected: Mapping[str, Harmless] = REJECTED,
    silent: Set[str] = SILENT,
) -> Parsed[T]:
    """Reads the body and returns its fields; see `parse`."""
    body = await read_json(request)
    where = lane(len(body), PARSED_INLINE_BYTES)
    return await off_loop(where, parse, body, kind, rejected, silent)


async def read_json(request: web.Request) -> bytes:
    """Reads a JSON body. Raises ApiError if it is too large (413), if all large bodies together are
    too large (429), or if it takes too long (408)."""
    kind = request.content_type
    if "Content-Type" in request.headers and kind != "application/json":
        raise ApiError(
            415,
            f"Content-Type must be application/json, got {kind[:80]}",
            code="unsupported_media_type",
        )
    config = request.app[SERVICE].config
    limit = config.body_timeout
    try:
        async with asyncio.timeout(limit):
            body = await _read(request)
    except TimeoutError:
        raise ApiError(
            408, f"the body was not complete after {limit:g} seconds", code="body_timeout"
        ) from None
    except web.RequestPayloadError:
        raise invalid("the transfer of the body was interrupted") from None
    coding = request.headers.get("Content-Encoding", "")
    if not coding:
        return body
    body = await off_loop(Lane.LARGE, unpacked, body, coding, config.max_request_bytes)
    request.app[SERVICE].huge_bodies.hold(request, len(body))
    return body


async def _read(request: web.Request) -> bytes:
    service = request.app[SERVICE]
    most = service.config.max_request_bytes
    if (request.content_length or 0) > most:
        raise too_large(most)
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > most:
            raise too_large(most)
        service.huge_bodies.hold(request, len(body))
    return bytes(body)


def parse[T: Struct](
    body: bytes,
    kind: type[T],
    rejected: Mapping[str, Harmless] = REJECTED,
    silent: Set[str] = SILENT,
) -> Parsed[T]:
    """Decodes a body and checks its fields. Raises ApiError that names the first wrong field.

    Args:
      rejected: unsupported fields, with the values that are accepted because they ask for nothing.
      silent: fields without effect that are not reported.
    """
    names = field_names(kind)
    try:
        fields = msgspec.json.decode(body, type=kind)
        raw_fields = _RAW_FIELDS.decode(body)
        ignored = {
            name: None
            for name, raw in raw_fields.items()
            if name not in names and not _harmless(name, raw, rejected)
        }
        for name, raw in raw_fields.items():
            if name in names and _holds_fields(value := getattr(fields, name)):
                ignored |= dict.fromkeys(_unknown(_plain(raw, name), value, name))
    except msgspec.ValidationError as error:
        raise wrong_field(error, body, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise not_json(error, body) from None
    except RecursionError:
        raise _too_deep(None) from None
    for name in FREE_FORM & names:
        _check_depth(getattr(fields, name), name)
    told = (name for name in ignored if name not in silent)
    return Parsed(fields, tuple(islice(told, MAX_IGNORED)), len(body))


def _holds_fields(value: Any) -> bool:
    return isinstance(value, Struct) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], Struct)
    )


def _unknown(raw: Any, value: Any, path: str) -> Iterator[str]:
    """Yields fields of the JSON `raw` that are missing in `value`, which was decoded from it, and
    that ask for something. `path`: path of `raw`, without list positions."""
    if isinstance(value, list):
        for raw_item, item in zip(raw, value, strict=True):
            yield from _unknown(raw_item, item, path)
    elif isinstance(value, Struct):
        known = {*value.__struct_encode_fields__, value.__struct_config__.tag_field}
        for name, child in raw.items():
            if name in value.__struct_fields__:
                yield from _unknown(child, getattr(value, name), f"{path}.{name}")
            elif name not in known and child not in (None, [], {}):
                yield f"{path}.{name}"


def _check_depth(value: Any, param: str) -> None:
    """Refuses deeply nested JSON, which could overflow the stack of later code."""
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
    """Returns whether the field asks for nothing. Raises ApiError if it asks for more."""
    if name not in rejected:
        return False
    value = _plain(raw, name)
    # True equals 1 in Python, but not in JSON.
    alike = [one for one in rejected[name] if isinstance(one, bool) == isinstance(value, bool)]
    if value is not None and value not in alike:
        reason = f": {INSTEAD[name]}" if name in INSTEAD else ""
        message = f"{name} is not supported{reason}"
        raise invalid(message, param=name, code="unsupported_parameter")
    return True


def _plain(raw: msgspec.Raw, name: str) -> Any:
    """Decodes a field without a type. Even an unread field may contain an invalid number."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError as error:
        raise wrong_field(error, bytes(raw), Any, at=name) from None


def _too_deep(param: str | None) -> ApiError:
    return invalid(f"JSON is nested more than {MAX_DEPTH} levels deep", param=param)
