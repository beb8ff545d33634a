"""Forwards an answer to the client in whole events, and adds an error if necessary."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from jaxserve.ray.call import Head, ReplicaLost
from jaxserve.server.errors import ApiError, anthropic_body
from jaxserve.server.sse import DONE, data_event, named_event

_END_OF_EVENT = b"\n\n"
_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"


class Outgoing:
    """Forwards an answer without delay, with two exceptions. The head is sent with the first bytes,
    so that until then another replica may answer. Stream events are sent whole, so that an error
    event can follow."""

    def __init__(self, path: str, send: Callable[[MutableMapping[str, Any]], Awaitable[None]]):
        self._path = path
        self._send = send
        self._head: Head | None = None
        self._sent_head = False
        self._events = False
        self._part = b""
        """The incomplete event at the end."""
        self._numbered = 0
        self.begun = False
        """Whether the client has received any of the answer, except comments."""

    async def take(self, item: Head | bytes) -> None:
        """Forwards a head or bytes.

        Raises:
          ReplicaLost: another replica answers with a different head than the one already sent.
        """
        if isinstance(item, Head):
            if self._sent_head and not (item.status == 200 and _is_events(item)):
                raise ReplicaLost(f"another replica answers {item.status}")
            self._head, self._events = item, _is_events(item)
        elif self._events:
            await self._take_events(item)
        else:
            await self._write(item)
            self.begun = True

    async def end(self) -> None:
        """Ends the answer.

        Raises:
          ReplicaLost: there was no answer.
        """
        if self._head is None:
            raise ReplicaLost("the replica answered nothing")
        await self._write(self._part, more=False)

    def again(self) -> None:
        """Drops the unsent part of an answer, because another replica starts again."""
        self._part = b""

    async def refuse(self, error: ApiError) -> None:
        """Answers with an error."""
        made = error.response(error_body(self._path, error))
        body = made.body
        assert isinstance(body, bytes)
        length = ("Content-Length", str(len(body)))
        kind = ("Content-Type", "application/json")
        headers = [(name, value) for name, value in made.headers.items() if name != "Content-Type"]
        self._head = Head(made.status, (kind, length, *headers))
        await self._write(body, more=False)

    async def fail(self, error: ApiError) -> None:
        """Ends the answer with an error: as the whole answer, or as the last event of the stream.

        Raises:
          ConnectionError: neither is possible any more; the connection must be aborted.
        """
        if not self._sent_head:
            await self.refuse(error)
        elif self._events:
            await self._write(self._error_event(error), more=False)
        else:
            raise ConnectionError(error.message)

    async def _take_events(self, data: bytes) -> None:
        data = self._part + data
        end = data.rfind(_END_OF_EVENT) + len(_END_OF_EVENT)
        if end < len(_END_OF_EVENT):
            self._part = data
            return
        events, self._part = data[:end], data[end:]
        self._numbered += events.count(b'"sequence_number":')
        await self._write(events)
        if not self.begun:
            self.begun = any(e and not e.startswith(b":") for e in events.split(_END_OF_EVENT))

    def _error_event(self, error: ApiError) -> bytes:
        if self._path.endswith(_MESSAGES):
            return named_event("error", anthropic_body(error))
        if self._path.endswith(_RESPONSES):
            fields = {"code": "server_error", "message": error.message, "param": None}
            body = {"type": "error", "sequence_number": self._numbered, **fields}
            return named_event("error", body)
        return data_event(error.body()) + DONE

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        if not self._sent_head:
            assert self._head is not None
            self._sent_head = True
            status, answered = self._head
            headers = [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in answered]
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """Returns the JSON of an error in the format of the path's API."""
    return anthropic_body(error) if _MESSAGES in path else error.body()


def _is_events(head: Head) -> bool:
    kinds = (value for name, value in head.headers if name.lower() == "content-type")
    return any(kind.startswith("text/event-stream") for kind in kinds)
