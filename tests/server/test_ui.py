"""The pages over a real socket: what they may load, who sees what, how often events come."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import jaxserve
from jaxserve.config import ServerConfig
from jaxserve.metrics.metrics import Metrics
from jaxserve.offload.counters import OffloadCounters
from jaxserve.scheduler.host_tier import TierUsage
from jaxserve.server import make_app
from jaxserve.server.access import digest
from jaxserve.server.ui import live
from jaxserve.views import StepView, WaitingView
from tests.fakes import FakeEngine, tiny_tokenizer
from tests.server.conftest import Serve, serving

PAGES = ("/", "/ui/engine")
UI = Path(jaxserve.__file__).parent / "server" / "ui"
SUFFIXES = (".html", ".js", ".css", ".svg")
FILES = ["theme.css", *sorted(path.name for path in UI.iterdir() if path.suffix in SUFFIXES)]
KEYED: dict[str, Any] = {"api_key_digests": (digest("key"),)}
EVENTS = "/ui/engine/events"
STEP = StepView(
    number=1,
    kind="mixed",
    bucket=128,
    decode_rows=3,
    chunks=1,
    chunk_tokens=100,
    seconds=0.021,
    expected=0.02,
    late=True,
)


def steps(count: int) -> list[StepView]:
    return [STEP._replace(number=number) for number in range(1, count + 1)]


async def read(
    url: str, seconds: float = 1.0, headers: dict[str, str] | None = None
) -> list[tuple[str, dict[str, Any]]]:
    """The events of so long, as (name, body)."""
    found: list[tuple[str, dict[str, Any]]] = []
    async with aiohttp.request("GET", url + EVENTS, headers=headers) as reply:
        assert reply.status == 200
        assert reply.content_type == "text/event-stream"
        end = time.monotonic() + seconds
        text = b""
        while (left := end - time.monotonic()) > 0:
            try:
                text += await asyncio.wait_for(reply.content.readany(), left)
            except TimeoutError:
                break
    for event in text.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_may_load_nothing_from_elsewhere(serve: Serve, path: str) -> None:
    url = await serve(FakeEngine())
    async with aiohttp.request("GET", url + path) as reply:
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = dict(
            part.split(" ", 1) for part in reply.headers["Content-Security-Policy"].split("; ")
        )
        text = await reply.text()
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Referrer-Policy"] == "no-referrer"
    assert "<script>" not in text and not re.search(r"\son\w+=|style=", text)


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_s_links_are_files_of_the_server(serve: Serve, path: str) -> None:
    url = await serve(FakeEngine(), root_path="/llm")
    for prefix in ("", "/llm"):
        async with aiohttp.ClientSession() as session:
            async with session.get(url + prefix + path) as reply:
                here, text = reply.url, await reply.text()
            links = re.findall(r'(?:src|href)="([^"#]+)"', text)
            assert len(links) > 4
            for link in links:
                target = here.join(type(here)(link))
                assert str(target).startswith(url + prefix), link
                async with session.get(target) as reply:
                    assert reply.status == 200, link


def test_no_file_speaks_of_another_server_or_makes_markup_of_text() -> None:
    for name in FILES:
        text = (UI / name if name != "theme.css" else UI.parents[1] / name).read_text()
        found = set(re.findall(r"https?://[\w.-]+", text))
        assert found <= {"http://www.w3.org"}, name
        made = re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
        assert not made, name


def test_the_pages_are_small() -> None:
    size = sum((UI / name).stat().st_size for name in FILES if name != "theme.css")
    assert size + (UI.parents[1] / "theme.css").stat().st_size < 200_000


async def test_files_are_told_by_type_and_not_sent_twice(serve: Serve) -> None:
    url = await serve(FakeEngine())
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for name in FILES:
        async with aiohttp.request("GET", f"{url}/ui/{name}") as reply:
            assert reply.status == 200
            assert reply.content_type == types.get(Path(name).suffix, "text/html")
            tag = {"If-None-Match": reply.headers["ETag"]}
        async with aiohttp.request("GET", f"{url}/ui/{name}", headers=tag) as reply:
            assert reply.status == 304
            assert await reply.read() == b""


@pytest.mark.parametrize(
    "name", ["live.py", "__init__.py", "nothing.js", "..%2Fapp.py", "%2e%2e/%2e%2e/config.py"]
)
async def test_no_other_file_is_served(serve: Serve, name: str) -> None:
    url = await serve(FakeEngine())
    async with aiohttp.request("GET", f"{url}/ui/{name}") as reply:
        assert reply.status == 404


async def test_pages_are_open_and_what_they_show_is_not(serve: Serve) -> None:
    url = await serve(FakeEngine(), **KEYED)
    for path in (*PAGES, *(f"/ui/{name}" for name in FILES)):
        async with aiohttp.request("GET", url + path) as reply:
            assert reply.status == 200, path
    async with aiohttp.request("GET", url + EVENTS) as reply:
        assert reply.status == 401
    assert await read(url, headers={"Authorization": "Bearer key"})


async def test_without_the_pages_the_server_is_as_before(serve: Serve) -> None:
    routes = {
        ui: {
            (route.method, route.resource.canonical)
            for route in make_app(
                FakeEngine(),
                tiny_tokenizer(),
                ServerConfig(model_names=("tiny",), ui=ui),
                Metrics("tiny"),
            ).router.routes()
            if route.resource is not None
        }
        for ui in (True, False)
    }
    gone = {path for _, path in routes[True] - routes[False]}
    assert gone == {"/", "/ui/engine", EVENTS, "/ui/{file}"}
    assert routes[False] < routes[True]
    url = await serve(FakeEngine(), ui=False)
    for path in gone:
        async with aiohttp.request("GET", url + path.format(file="chat.js")) as reply:
            assert reply.status == 404
            assert (await reply.json())["error"]["code"] == "unknown_url"


async def test_events_tell_what_the_engine_did(serve: Serve) -> None:
    engine = FakeEngine()
    engine.steps = steps(2)
    engine.waiting = [
        WaitingView(0, preempted=False, left=None),
        WaitingView(0, preempted=False, left=-0.5),
        WaitingView(0, preempted=False, left=3.0),
        WaitingView(-2, preempted=False, left=100.0),
        WaitingView(-2, preempted=True, left=0.5),
    ]
    url = await serve(engine)
    (name, about), *ticks = await read(url)
    assert name == "about"
    assert about["model"] == "tiny" and about["version"] == jaxserve.__version__
    assert about["buckets"] == {"decode": [[8, 4.0]], "mixed": [[128, 20.0]]}
    assert {name for name, _ in ticks} == {"tick"}
    first = ticks[0][1]
    assert first["steps"] == [[n, "mixed", 128, 3, 1, 100, 21.0, 20.0, 1] for n in (1, 2)]
    assert all(not tick["steps"] for _, tick in ticks[1:]), "a step is told once"
    assert (first["free_pages"], first["total_pages"]) == (75, 100)
    pages = first["pages"]
    assert base64.b64decode(pages["states"]) == bytes((0, 1, 2, 3))
    # overdue, at most 1 s, 5 s, 30 s, more, no deadline
    assert first["queue"] == [
        ["new", 1, 0, 1, 0, 0, 1],
        ["priority -2", 0, 0, 0, 0, 1, 0],
        ["preempted", 0, 1, 0, 0, 0, 0],
    ]
    assert len(about["bounds"]["ttft"]) + 1 == len(first["ttft"])


async def test_an_answer_is_seen_in_the_figures(serve: Serve) -> None:
    url = await serve(FakeEngine(b"Hello", cached_tokens=2))
    async with aiohttp.request(
        "POST", f"{url}/v1/completions", json={"prompt": "abcd", "max_tokens": 5}
    ) as reply:
        assert reply.status == 200
    _, (_, tick), *_ = await read(url)
    assert tick["prefix"] == [4, 2]
    assert tick["ttft"][-1] == tick["tpot"][-1] == 1


async def test_what_lies_below_the_device_is_told_only_if_something_does() -> None:
    metrics = Metrics("tiny")
    async with serving(FakeEngine(), metrics=metrics) as url:
        _, (_, tick), *_ = await read(url)
        assert "tier" not in tick
        counters = OffloadCounters(store_bytes=7, load_bytes=6, disk_write_bytes=5)
        tier = metrics.open_tier(counters, num_bytes=1000, slot_bytes=100)
        tier.usage = lambda: TierUsage(total=10, filled=3, arriving=1, pinned=0, loading=2)
        tier.disk_total, tier.disk_bytes = 5000, lambda: 800
        tier.tier_looked_up(64, 48)
        tier.tier_loaded(600, 0.1, host_tokens=32, disk_tokens=16)
        _, (_, tick), *_ = await read(url)
    assert tick["tier"] == {
        "host_bytes": 300,
        "host_total": 1000,
        "disk_bytes": 800,
        "disk_total": 5000,
        "loading": 2,
        "looked_up": 64,
        "from_host": 32,
        "from_disk": 16,
        "loaded": 6,
        "stored": 7,
        "read": 0,
        "written": 5,
    }


async def test_at_most_ten_events_a_second_come_to_each_of_many(serve: Serve) -> None:
    url = await serve(FakeEngine())
    for events in await asyncio.gather(*(read(url, 2.0) for _ in range(8))):
        assert 5 < len(events) <= 20
        assert sum("pages" in body for _, body in events) <= 5


async def test_nobody_watching_means_nobody_looks(serve: Serve) -> None:
    class Watched(FakeEngine):
        looks = 0

        def steps_since(self, number: int) -> list[StepView]:
            self.looks += 1
            return super().steps_since(number)

    engine = Watched()
    url = await serve(engine)
    await asyncio.sleep(3 * live.INTERVAL)
    assert engine.looks == 0
    await asyncio.gather(*(read(url, 1.0) for _ in range(4)))
    assert 0 < engine.looks <= 9, "one look is for all"
    await asyncio.sleep(0.1)
    before = engine.looks
    await asyncio.sleep(3 * live.INTERVAL)
    assert engine.looks == before


async def test_so_many_may_watch_and_no_more(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_WATCHERS", 2)
    url = await serve(FakeEngine())
    watching = [asyncio.create_task(read(url, 1.5)) for _ in range(2)]
    await asyncio.sleep(0.5)
    async with aiohttp.request("GET", url + EVENTS) as reply:
        assert reply.status == 429
        assert reply.headers["Retry-After"]
        assert (await reply.json())["error"]["code"] == "too_many_watchers"
    await asyncio.gather(*watching)
    assert await read(url), "there is room again"


async def test_a_start_is_shown_while_it_lasts_and_told_again_when_it_is_over(
    serve: Serve,
) -> None:
    engine = FakeEngine()
    engine.phase = "compiling"
    url = await serve(engine)
    watching = asyncio.create_task(read(url, 1.2))
    await asyncio.sleep(0.5)
    engine.phase = "serving"
    events = await watching
    ticks = [body for name, body in events if name == "tick"]
    assert (ticks[0]["phase"], ticks[0]["progress"]) == ("compiling", 0.5)
    assert ticks[-1]["phase"] == "serving"
    assert [body["phase"] for name, body in events if name == "about"] == ["compiling", "serving"]


async def test_a_stream_ends_with_the_server() -> None:
    async with aiohttp.ClientSession() as session:
        async with serving(FakeEngine()) as url:
            reply = await session.get(url + EVENTS)
            assert reply.status == 200
            rest = asyncio.create_task(reply.read())
            await asyncio.sleep(0.3)
        assert (await asyncio.wait_for(rest, 5)).endswith(b"\n\n"), "its end, and no cut"
