"""A real server's events: what a router rebuilds from them is what requests find."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from random import Random
from typing import Any

import aiohttp
import pytest

from jaxserve_checkpoints.resolve import embedded_model
from tests.e2e.process import Server, finish, run, start
from tests.kv_events.router import Index, Subscriber

PAGE = 16
ADMIN = {"Authorization": "Bearer root"}
EVENTS = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:*",
    "replay_endpoint": "tcp://127.0.0.1:*",
    "buffer_steps": 20,
}
FLAGS = (
    *("--max-model-len", "256", "--kv-cache-memory-bytes", "8Mi", "--block-size", str(PAGE)),
    *("--admin-api-key", "root", "--kv-events-config", json.dumps(EVENTS)),
)


class Router:
    """An index that waits until it knows all that has happened."""

    def __init__(self, server: Server, subscriber: Subscriber):
        self._server, self.subscriber = server, subscriber
        self.index = Index(page_size=PAGE)

    async def catch_up(self) -> None:
        """Wait until nothing more comes. A batch comes 0.1 s after its first step."""
        await self._server.settled()
        before, quiet = -1.0, 0
        while quiet < 6:
            for batch in self.subscriber.receive():
                learn(self.index, batch.events)
            published = await self._server.metric("jaxserve_kv_event_batches_total")
            quiet = quiet + 1 if published == before == self.subscriber.last + 1 else 0
            if published == before > self.subscriber.last + 1:
                for batch in self.subscriber.replay():  # it joined later
                    learn(self.index, batch.events)
            before = published
            await asyncio.sleep(0.1)


def learn(index: Index, events: Any) -> None:
    for event in events:
        for change in index.changes(event):
            index.apply(change)


async def ask(
    session: aiohttp.ClientSession, prompt: list[int], *, salt: str | None = None, tokens: int = 4
) -> int:
    """Returns how many tokens were cached."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    if salt:
        body["cache_salt"] = salt
    async with session.post("/v1/completions", json=body) as reply:
        usage = (await reply.json())["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
async def test_events_of_a_server_predict_its_cached_tokens() -> None:
    random = Random(3)
    documents = [[random.randrange(300, 900) for _ in range(120)] for _ in range(10)]

    def prompt() -> list[int]:
        head = random.choice(documents)[: random.randrange(10, 120)]
        return [*head, *(random.randrange(300, 900) for _ in range(random.randrange(1, 20)))]

    with Server(*FLAGS) as server, ExitStack() as stack:
        (source,) = (await server.get("/kv_event_sources")).values()

        def subscribe() -> Subscriber:
            made = Subscriber(source["endpoint"], source["replay_endpoint"])
            stack.callback(made.close)
            return made

        router = Router(server, subscribe())
        async with aiohttp.ClientSession(server.url) as session:
            found = 0
            for turn in range(20):
                if turn % 5 == 0:  # evictions
                    await asyncio.gather(*(ask(session, prompt(), tokens=100) for _ in range(8)))
                if turn == 10:
                    change = {"model": str(embedded_model())}
                    async with session.post("/v1/weights", json=change, headers=ADMIN) as reply:
                        assert reply.status == 200
                    await router.catch_up()
                    assert router.index.names == [set()]
                await router.catch_up()
                asked, salt = prompt(), random.choice([None, None, "a"])
                expected = router.index.predict(asked, salt or "")
                assert await ask(session, asked, salt=salt) == expected
                found += expected
            assert found > 100
            await router.catch_up()
            late, index = subscribe(), Index(page_size=PAGE)
            for batch in late.replay():
                learn(index, batch.events)
            assert late.last >= 20, "the first ones have left the ring"
            assert index.names == router.index.names != [set()]
            async with session.post("/reset_prefix_cache", headers=ADMIN) as reply:
                assert reply.status == 200
            await ask(session, [400] * 20)
            await router.catch_up()
            assert len(router.index.names[0]) == 1


async def test_without_events_there_are_no_sources(server: Server) -> None:
    assert await server.get("/kv_event_sources") == {}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--no-enable-prefix-caching",),
            "--kv-events-config: without --enable-prefix-caching nothing is cached",
        ),
        (
            ("--kv-events-config", json.dumps(EVENTS | {"endpoint": "ipc:///nowhere/events"})),
            "--kv-events-config: cannot use ipc:///nowhere/events: No such file or directory",
        ),
    ],
)
def test_what_cannot_be_is_said_at_once(flags: tuple[str, ...], said: str) -> None:
    status, output = finish(start(*FLAGS, *flags), timeout=60)
    assert (status, output.splitlines()[-1]) == (1, f"jaxserve: error: {said}")


def test_without_zmq_the_extra_is_named(tmp_path: Any) -> None:
    (tmp_path / "zmq.py").write_text("raise ModuleNotFoundError(name='zmq')")
    hidden = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    code = f"{hidden}; from jaxserve.__main__ import main; sys.exit(main())"
    status, output = finish(run("-c", code, "--port", "0", *FLAGS), timeout=60)
    assert status == 1
    assert output.splitlines()[-1] == (
        "jaxserve: error: --kv-events-config needs ZMQ (zmq is missing): install the extra "
        "kv-events, as in pip install 'jaxserve[kv-events]'"
    )
