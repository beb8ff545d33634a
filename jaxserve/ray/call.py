"""Requests and answers as plain data, to be sent between processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

type Headers = tuple[tuple[str, str], ...]

HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "trailers", "transfer-encoding", "upgrade"),
    }
)
"""Headers that apply to one connection (RFC 9110, section 7.6.1). They are not forwarded."""

NOT_ASKED = HOP_BY_HOP | {"host", "content-length", "expect"}
"""Request headers that the next connection sets itself."""

NOT_ANSWERED = HOP_BY_HOP | {"date", "server", "x-request-id"}
"""Answer headers that Serve's proxy sets itself. The request id is the same if the client sent
one."""


class Call(NamedTuple):
    """A client's request."""

    method: str
    path: str
    """The path with its query, as it was sent."""
    headers: Headers
    body: bytes


class Head(NamedTuple):
    """Status and headers of an answer."""

    status: int
    headers: Headers


class Beginning(NamedTuple):
    """The attribute `prompt` of a request, which Ray's PrefixCacheAffinityRouter reads."""

    prompt: str


class ReplicaLost(Exception):
    """The replica that worked on a request is gone."""


_IN_ORDER = ("cache_salt", "tools", "system", "instructions", "messages", "input", "prompt")
"""Fields in their order in a prompt."""
_NOT_TEXT = frozenset({"type", "role", "id", "call_id", "tool_call_id", "tool_use_id"})


def beginning(call: Call) -> str:
    """Returns a text that two requests share at the beginning if their prompts do; empty if there
    is no prompt.

    It is not the prompt, because only replicas have templates and tokenizers. It leaves out roles
    and punctuation, which would look like a shared beginning. A token id is one character.
    """
    if call.method != "POST" or not call.body:
        return ""
    try:
        body = msgspec.json.decode(call.body)
    except (msgspec.DecodeError, RecursionError):  # compressed or invalid: the replica handles it
        return ""
    if not isinstance(body, dict):
        return ""
    fields: dict[str, Any] = body
    return "".join(part for name in _IN_ORDER for part in _texts(fields.get(name)))


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in a JSON value, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        if value and all(type(item) is int for item in value):
            yield "".join(chr(0x10000 + token % 0x100000) for token in value)
        else:
            for item in value:
                yield from _texts(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in _NOT_TEXT:
                yield from _texts(item)
