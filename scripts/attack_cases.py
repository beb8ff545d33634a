"""The cases of `attack.py`: harmful requests, and their allowed outcomes."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REFUSED = ("400", "408", "413", "415", "417", "422", "429", "431", "503")
"""Statuses with which a server may refuse a request. Any 5xx but 503 is a defect."""
CLOSED = "closed"
WAIT = 60.0
"""Seconds after which a request counts as unanswered."""


class Outcome(NamedTuple):
    what: str
    """An HTTP status, or a word for what happened instead."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server, and a session with it."""

    url: str
    session: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=dict[str, str])
    patience: float = 180.0
    """Seconds within which the server must drop clients that do not read."""

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    async def post(self, path: str, body: Any, **headers: str) -> Outcome:
        """Posts `body`: JSON, or bytes with the content type of JSON."""
        begun = asyncio.get_running_loop().time()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers, **headers}
        try:
            async with (
                asyncio.timeout(WAIT),
                self.session.post(self.url + path, data=data, headers=headers) as reply,
            ):
                await reply.read()
                what = str(reply.status)
        except TimeoutError:
            what = "no answer"
        except aiohttp.ClientError:
            what = CLOSED
        return Outcome(what, asyncio.get_running_loop().time() - begun)

    async def metric(self, name: str) -> float | None:
        async with self.session.get(f"{self.url}/metrics", headers=self.headers) as reply:
            for line in (await reply.text()).splitlines():
                sample, _, value = line.rpartition(" ")
                if sample.partition("{")[0] == name:
                    return float(value)
        return None

    @asynccontextmanager
    async def connection(self) -> AsyncGenerator[socket.socket]:
        """A bare TCP connection with a small receive buffer."""
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.get_running_loop().sock_connect(client, self.address)
            yield client

    async def raw(self, sent: bytes, *, seconds: float = 10.0) -> Outcome:
        """Sends bytes on a bare connection. Returns the response's status."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with self.connection() as client:
            try:
                async with asyncio.timeout(seconds):
                    await loop.sock_sendall(client, sent)
                    answer = await loop.sock_recv(client, 1 << 16)
                what = answer.split()[1].decode() if answer.startswith(b"HTTP/") else CLOSED
            except TimeoutError:
                what = "no answer"
            except ConnectionError:
                what = CLOSED
        return Outcome(what, loop.time() - begun)

    def request(self, path: str, body: Any) -> bytes:
        """The bytes of a POST."""
        data = json.dumps(body).encode()
        lines = {"Host": "a", "Content-Type": "application/json", "Content-Length": str(len(data))}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **self.headers}.items())
        return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


type Attack = Callable[[Target], Awaitable[list[Outcome]]]


class Case(NamedTuple):
    name: str
    attack: Attack
    allowed: tuple[str, ...] = ("200", *REFUSED)


def chat(content: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def schema(content: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": content}}
    return chat(response_format=form)


def posts(path: str, *bodies: Any, times: int = 1) -> Attack:
    """An attack that posts all bodies at once."""

    async def attack(target: Target) -> list[Outcome]:
        every = [body for body in bodies for _ in range(times)]
        return list(await asyncio.gather(*(target.post(path, body) for body in every)))

    return attack


def _refs(count: int) -> dict[str, Any]:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def _nested(kind: str, depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "array", "items": inner} if kind == "array" else {kind: [inner]}
    return inner


RULES = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000)) + 'r5000 ::= "a"'
LARK = "start: A0\n" + "".join(f"A{i}: A{i + 1}\n" for i in range(5000)) + 'A5000: "a"'
PATTERNS = {"allOf": [{"type": "string", "pattern": f"^.*a{{{i}}}.{{9}}$"} for i in range(1, 301)]}


async def new_schemas(target: Target) -> list[Outcome]:
    """Posts small new schemas while slow ones compile. The small ones must not be refused with 400,
    which would blame the client."""
    long = [
        asyncio.create_task(
            target.post(CHAT, schema({"type": "integer", "multipleOf": 99999989 - 2 * i}))
        )
        for i in range(2)
    ]
    await asyncio.sleep(0.2)
    small = [schema({"type": "object", "properties": {f"p{i}": {}}}) for i in range(4)]
    others = await asyncio.gather(*(target.post(CHAT, body) for body in small))
    outcomes = [
        Outcome("small schema: 400" if other.what == "400" else other.what, other.seconds)
        for other in others
    ]
    return outcomes + [await each for each in long]


def _tools(count: int, size: int) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"f{i}", "description": "some words " * size}}
        for i in range(count)
    ]


LARGE = chat(tools=_tools(128, 9000))
"""128 tools of about 100 kB."""


async def beside_large(target: Target) -> list[Outcome]:
    """Sends eight LARGE requests, and measures another client's 10 kB prompts beside them."""
    large = [asyncio.create_task(target.post(CHAT, LARGE)) for _ in range(8)]
    await asyncio.sleep(0.5)
    for _ in range(3):
        other = await target.post(COMPLETIONS, {"prompt": "a b " * 2500, "max_tokens": 1})
        late = Outcome("10 kB beside large ones: late", other.seconds)
        large.append(asyncio.create_task(_done(late if other.seconds > 10 else other)))
    return list(await asyncio.gather(*large))


async def _done(outcome: Outcome) -> Outcome:
    return outcome


async def never_read(target: Target) -> list[Outcome]:
    """Requests streams, and answers with all logprobs, and reads nothing. The server must drop
    them."""
    loop, begun = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    body = chat(logprobs=True, top_logprobs=20, n=4) | {"max_tokens": 200, "ignore_eos": True}
    sent = [target.request(CHAT, {**body, "stream": stream}) for stream in (True, True, False)]
    text = target.request("/tokenize", {"prompt": "a " * 500_000, "return_token_strs": True})
    clients = [socket.socket() for _ in [*sent, text]]
    for client, request in zip(clients, [*sent, text], strict=True):
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(client, target.address)
        await loop.sock_sendall(client, request)
    try:
        open_answers: float | None = len(clients)
        while open_answers and loop.time() - begun < target.patience:
            await asyncio.sleep(1)
            open_answers = await target.metric("jaxserve_open_answers")
    finally:
        for client in clients:
            client.close()
    took = loop.time() - begun
    return [Outcome("still open" if open_answers else "given up", took)] * len(clients)


async def leave(target: Target) -> list[Outcome]:
    """A hundred clients disconnect in the middle of a response."""
    body = target.request(CHAT, {**chat(stream=True), "max_tokens": 500, "ignore_eos": True})

    async def one(part: int) -> Outcome:
        async with target.connection() as client:
            await asyncio.get_running_loop().sock_sendall(client, body[:part])
            await asyncio.sleep(0.05)
        return Outcome("left", 0.05)

    return list(await asyncio.gather(*(one(len(body) - n % 3 * 40) for n in range(100))))


async def many_connections(target: Target) -> list[Outcome]:
    """Opens 300 connections at once and sends nothing."""
    loop, clients = asyncio.get_running_loop(), [socket.socket() for _ in range(300)]
    try:
        for client in clients:
            client.setblocking(False)
            await loop.sock_connect(client, target.address)
        return [await target.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 1})]
    finally:
        for client in clients:
            client.close()


async def watch(target: Target) -> list[Outcome]:
    """40 clients watch the engine and read nothing, beside an ordinary request."""

    async def one() -> Outcome:
        begun = asyncio.get_running_loop().time()
        url = f"{target.url}/ui/engine/events"
        async with target.session.get(url, headers=target.headers) as reply:
            await asyncio.sleep(3)
            return Outcome(str(reply.status), asyncio.get_running_loop().time() - begun)

    watching = asyncio.gather(*(one() for _ in range(40)))
    asked = await target.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 8})
    return [asked, *await watching]


def raws(*sent: bytes) -> Attack:
    async def attack(target: Target) -> list[Outcome]:
        return [await target.raw(each) for each in sent]

    return attack


async def compressed(target: Target) -> list[Outcome]:
    """Sends truncated compressed bodies, and compressed bodies that expand a lot."""
    body = gzip.compress(b'{"prompt": "Hi", "max_tokens": 1}')
    bomb = gzip.compress(bytes(256 * 2**20), 1)
    return [
        await target.post(COMPLETIONS, each, **{"Content-Encoding": "gzip"})
        for each in (body[:-8], body[:-1], bomb)
    ]


async def expect(target: Target) -> list[Outcome]:
    head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nExpect: tea\r\nContent-Length: 2\r\n\r\n{}"
    return [await target.raw(head)]


NOT_HTTP = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"".join(b"X%d: a\r\n" % i for i in range(5000)) + b"\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
)
DEEP = b'{"messages": [{"role": "user", "content": "Hi"}], "tools": '
NUMBERS = ("NaN", "1e999", "-1", "1" + "0" * 5000, "[]", '"\\ud800"')

CASES = (
    Case("schema: 2,500 chained $refs", posts(CHAT, schema(_refs(2500)))),
    Case("schema: arrays, allOf, anyOf nested 30 deep", posts(
        CHAT, *(schema(_nested(kind, 30)) for kind in ("array", "allOf", "anyOf")))),
    Case("schema: multipleOf 99999989 twice, small ones of others beside", new_schemas),
    Case("schema: allOf of 300 patterns", posts(CHAT, schema(PATTERNS))),
    Case("grammar: 5,000 chained rules, Lark terminals", posts(
        CHAT, chat(structured_outputs={"grammar": RULES}),
        chat(structured_outputs={"grammar": LARK}))),
    Case("tools: a schema of 2,500 chained $refs", posts(CHAT, chat(tool_choice="required", tools=[
        {"type": "function", "function": {"name": "f", "parameters": _refs(2500)}}]))),
    Case("prompt: 128 tools of 100 kB", posts(CHAT, LARGE)),
    Case("prompt: eight of them, 10 kB of another client beside", beside_large),
    Case("prompt: 16 MB of one letter", posts(COMPLETIONS, {"prompt": "a" * 16_000_000})),
    Case("JSON: nested 100,000 deep", posts(
        CHAT, DEEP + b"[" * 100_000 + b"]" * 100_000 + b"}"), REFUSED),
    Case("fields: numbers and text beyond all bounds", posts(COMPLETIONS, *(
        f'{{"prompt": "a", "temperature": {each}}}'.encode() for each in NUMBERS)), REFUSED),
    Case("body: gzip cut short, and a bomb of 256 MiB", compressed, REFUSED),
    Case("HTTP: what is none", raws(*NOT_HTTP), (*REFUSED, CLOSED)),
    Case("HTTP: an expectation that nobody has", expect, REFUSED),
    Case("clients: 100 that leave in the middle", leave, ("left",)),
    Case("clients: 300 connections without a request", many_connections, ("200",)),
    Case("clients: 40 that watch the engine", watch, ("200", "404", "429")),
    Case("clients: four that never read", never_read, ("given up",)),
)  # fmt: skip
