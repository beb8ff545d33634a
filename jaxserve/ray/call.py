"""A request and an answer as plain data, as they go between processes."""

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
"""Headers of one connection (RFC 9110, section 7.6.1). They are not passed on."""

NOT_ASKED = HOP_BY_HOP | {"host", "content-length", "expect"}
"""Headers of a request that the next connection writes anew."""

NOT_ANSWERED = HOP_BY_HOP | {"date", "server", "x-request-id"}
"""Headers of an answer that Serve's proxy writes itself; the id is the same where a client sent
one."""


class Call(NamedTuple):
    """A client's request."""

    method: str
    path: str
    """As it was sent, with its query."""
    headers: Headers
    body: bytes


class Head(NamedTuple):
    """What comes before an answer's bytes."""

    status: int
    headers: Headers


class Beginning(NamedTuple):
    """What Ray's PrefixCacheAffinityRouter reads of a request: an attribute `prompt`."""

    prompt: str


class ReplicaLost(Exception):
    """The replica that worked on a request does so no more."""


_IN_ORDER = ("cache_salt", "tools", "system", "instructions", "messages", "input", "prompt")
"""Fields in the order in which they are in a prompt."""
_NOT_TEXT = frozenset({"type", "role", "id", "call_id", "tool_call_id", "tool_use_id"})


def beginning(call: Call) -> str:
    """Returns a text that begins alike where two requests' prompts do; empty where there is no
    prompt.

    It is not the prompt: templates and tokens belong to replicas. Roles and punctuation are left
    out, because they would look like a shared beginning. A token id is one character.
    """
    if call.method != "POST" or not call.body:
        return ""
    try:
        body = msgspec.json.decode(call.body)
    except (msgspec.DecodeError, RecursionError):  # compressed, or nonsense: the replica's affair
        return ""
    if not isinstance(body, dict):
        return ""
    fields: dict[str, Any] = body
    return "".join(part for name in _IN_ORDER for part in _texts(fields.get(name)))


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in a JSON value, in their order."""
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
