"""What clients get when replicas die: another one's answer, or an error in their API's words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from jaxserve.ray.call import Call, Head, ReplicaLost
from jaxserve.ray.gateway import TRIES, Gateway

EVENTS = Head(200, (("Content-Type", "text/event-stream; charset=utf-8"),))
JSON = Head(200, (("Content-Type", "application/json"), ("X-A", "1")))
FIRST, SECOND = b'data: {"a": 1}\n\n', b'data: {"b": 2}\n\n'
COMMENT = b": keep-alive\n\n"
LOST = "lost"


class Replicas:
    """Answers to one request after the other: items, of which LOST is a death."""

    def __init__(self, *answers: list[Head | bytes | str]):
        self._answers = list(answers)
        self.asked: list[tuple[Call, str]] = []
        self.closed = 0

    async def __call__(self, call: Call, begins: str) -> AsyncGenerator[Head | bytes]:
        self.asked.append((call, begins))
        try:
            for item in self._answers.pop(0):
                if isinstance(item, str):
                    raise ReplicaLost("killed")
                yield item
                if item == b"":
                    await asyncio.sleep(60)
        finally:
            self.closed += 1


class Client:
    """A request over ASGI, and what came of it."""

    def __init__(self, path: str = "/v1/chat/completions", body: bytes = b"{}"):
        self.path, self.body = path, body
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.ended = False
        self.left = asyncio.Event()
        self._asked = False

    async def receive(self) -> MutableMapping[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self.body[:3], "more_body": True}
        if self.body[3:]:
            rest, self.body = self.body[3:], b""
            return {"type": "http.request", "body": rest, "more_body": False}
        if self.body:
            self.body = b""
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            assert not self.ended
            self.parts.append(message["body"])
            self.ended = not message["more_body"]

    async def ask(self, replicas: Replicas, *, shared: bool = True, most: int = 1000) -> None:
        gateway = Gateway(replicas, max_request_bytes=most, shared=shared)
        scope = {"type": "http", "method": "POST", "path": self.path, "query_string": b"q=1"}
        scope |= {"headers": [(b"x-b", b"2")], "root_path": ""}
        async with asyncio.timeout(20):
            await gateway(scope, self.receive, self.send)

    @property
    def text(self) -> bytes:
        return b"".join(self.parts)

    def error(self) -> dict[str, Any]:
        return json.loads(self.text)["error"]


async def test_an_answer_passes_through() -> None:
    replicas, client = Replicas([JSON, b"12", b"3"]), Client(body=b'{"prompt": "Hi"}')
    await client.ask(replicas)
    assert (client.status, client.text, client.ended) == (200, b"123", True)
    assert client.headers == {b"content-type": b"application/json", b"x-a": b"1"}
    ((call, begins),) = replicas.asked
    assert call == Call("POST", "/v1/chat/completions?q=1", (("x-b", "2"),), b'{"prompt": "Hi"}')
    assert begins == "Hi"


async def test_every_part_leaves_at_once_but_for_events_that_are_not_whole() -> None:
    client = Client()
    await client.ask(Replicas([EVENTS, FIRST, SECOND[:5], SECOND[5:] + FIRST, b": rest"]))
    assert client.parts == [FIRST, SECOND + FIRST, b": rest"]


@pytest.mark.parametrize(
    "first",
    [[LOST], [EVENTS, LOST], [JSON, LOST], [EVENTS, FIRST[:4], LOST], [EVENTS, COMMENT, LOST], []],
    ids=["at once", "a head", "another head", "part of an event", "a comment", "no answer"],
)
async def test_another_replica_answers_where_nothing_had_come(
    first: list[Head | bytes | str],
) -> None:
    client, replicas = Client(), Replicas(first, [EVENTS, FIRST, SECOND])
    await client.ask(replicas)
    assert client.text.removeprefix(COMMENT) == FIRST + SECOND
    assert (client.status, client.ended) == (200, True)


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", b"data: [DONE]"),
        ("/v1/messages", b'{"type":"error","error":{"type":"overloaded_error",'),
        ("/v1/responses", b'{"type":"error","sequence_number":1,"code":"server_error",'),
    ],
)
async def test_a_stream_that_had_begun_ends_with_an_error(path: str, last: bytes) -> None:
    begun = b'data: {"sequence_number":0}\n\n'
    replicas, client = Replicas([EVENTS, begun, b"data: half", LOST]), Client(path)
    await client.ask(replicas)
    assert len(replicas.asked) == 1 and client.ended
    assert client.text.startswith(begun) and b"half" not in client.text
    assert b"lost after its answer had begun; send the request again" in client.text
    assert last in client.text and client.text.endswith(b"\n\n")


async def test_a_body_that_had_begun_is_cut_off() -> None:
    client = Client()
    with pytest.raises(ConnectionError):
        await client.ask(Replicas([JSON, b"12", LOST]))
    assert client.text == b"12" and not client.ended


async def test_a_stream_with_comments_ends_with_an_error_where_another_replica_refuses() -> None:
    refusal = Head(429, (("Content-Type", "application/json"),))
    client = Client()
    await client.ask(Replicas([EVENTS, COMMENT, LOST], *[[refusal, b"{}"]] * TRIES))
    assert client.text.startswith(COMMENT) and b"replica_lost" in client.text and client.ended


async def test_when_all_replicas_die_the_client_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.ray.gateway._PAUSE_SECONDS", 0.0)
    client, replicas = Client(), Replicas(*[[LOST]] * TRIES)
    await client.ask(replicas)
    assert (client.status, client.error()["code"]) == (503, "replica_lost")
    assert client.headers[b"retry-after"] == b"1"
    assert len(replicas.asked) == TRIES


async def test_who_leaves_is_no_longer_worked_for() -> None:
    client, replicas = Client(), Replicas([EVENTS, FIRST, b""])
    asking = asyncio.create_task(client.ask(replicas))
    while not client.parts:
        await asyncio.sleep(0)
    client.left.set()
    await asking
    assert replicas.closed == 1 and not client.ended


async def test_a_cancelled_request_is_no_longer_worked_for() -> None:
    client, replicas = Client(), Replicas([EVENTS, FIRST, b""])
    asking = asyncio.create_task(client.ask(replicas))
    while not client.parts:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert replicas.closed == 1


async def test_a_body_that_is_too_large_is_refused() -> None:
    client, replicas = Client(body=b"x" * 11), Replicas()
    await client.ask(replicas, most=10)
    assert (client.status, client.error()["code"]) == (413, "request_too_large")
    assert not replicas.asked


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses/resp_1", b"{}"), ("/v1/responses", b'{"previous_response_id": "resp_1"}')],
)
async def test_what_one_replica_stores_is_refused_where_there_are_several(
    path: str, body: bytes
) -> None:
    client = Client(path, body)
    await client.ask(Replicas())
    assert (client.status, client.error()["code"]) == (400, "not_shared")
    client = Client(path, body)
    await client.ask(Replicas([JSON, b"{}"]), shared=False)
    assert client.status == 200


async def test_a_response_that_names_no_other_is_served() -> None:
    client = Client("/v1/responses", b'{"previous_response_id": null, "input": "a"}')
    await client.ask(Replicas([JSON, b"{}"]))
    assert client.status == 200
