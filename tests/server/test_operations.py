"""Health is progress, readiness is service, and metrics carry the names that dashboards know."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from jaxserve.api import FinishReason, Overloaded
from jaxserve.metrics import exposition
from jaxserve.server import health, probe
from jaxserve.server.access import digest
from tests.fakes import FakeEngine
from tests.server.conftest import Serve

type Patch = pytest.MonkeyPatch

ADMIN = {"x-api-key": "key"}
CHAT = [{"role": "user", "content": "Hi"}]


async def get(url: str, path: str) -> tuple[int, Any]:
    async with aiohttp.request("GET", url + path) as reply:
        return reply.status, await reply.json()


async def test_health_is_readiness_and_live_is_progress(serve: Serve) -> None:
    """Routers send traffic to whatever answers /health with 200."""
    engine = FakeEngine()
    url = await serve(engine, stall_timeout=10.0)
    expected = {"phase": "serving", "running": 0, "waiting": 0, "last_step_age_s": 0.0}
    assert await get(url, "/health") == (200, expected)
    assert await get(url, "/live") == (200, expected)
    for phase in ("starting", "loading", "compiling", "draining"):
        engine.phase = phase
        async with aiohttp.request("GET", f"{url}/health") as reply:
            assert reply.status == 503 and reply.headers["Retry-After"] == "1"
            assert (await reply.json())["phase"] == phase
        assert await get(url, "/live") == (200, expected | {"phase": phase})
    engine.phase, engine.last_step_age = "serving", 11.0
    for route in ("/health", "/live"):
        status, body = await get(url, route)
        assert (status, body["phase"]) == (503, "stalled")
    engine.phase, engine.last_step_age = "failed", 0.0
    assert [(await get(url, route))[0] for route in ("/health", "/live")] == [503, 503]


async def test_health_means_alive_if_asked_to(serve: Serve) -> None:
    engine = FakeEngine()
    url = await serve(engine, health_means="live")
    for phase in ("compiling", "serving", "draining"):
        engine.phase = phase
        assert (await get(url, "/health"))[0] == 200
    engine.phase = "failed"
    assert (await get(url, "/health"))[0] == 503


async def test_ready_only_while_requests_are_served(serve: Serve) -> None:
    engine = FakeEngine()
    url = await serve(engine, stall_timeout=10.0)

    async def scraped() -> str:
        async with aiohttp.request("GET", f"{url}/metrics") as reply:
            return await reply.text()

    ready = 'jaxserve_ready{engine="0",model_name="tiny"} '
    assert (await get(url, "/ready"))[0] == 200
    assert ready + "1.0\n" in await scraped()
    for phase in ("loading", "draining", "failed"):
        engine.phase = phase
        assert await get(url, "/ready") == (503, {"phase": phase, "progress": 0.5})
        assert ready + "0.0\n" in await scraped()
    engine.phase, engine.last_step_age = "serving", 11.0
    assert (await get(url, "/ready"))[0] == 503
    assert ready + "0.0\n" in await scraped()


async def test_load_and_version(serve: Serve) -> None:
    url = await serve(FakeEngine())
    assert (await get(url, "/load"))[1]["server_load"] == 0
    assert (await get(url, "/version"))[1]["version"]


async def test_the_prefix_cache_is_reset_on_demand(serve: Serve) -> None:
    engine = FakeEngine()
    url = await serve(engine, admin_key_digests=(digest("key"),))
    reset = partial(aiohttp.request, "POST", f"{url}/reset_prefix_cache", headers=ADMIN)
    async with reset() as reply:
        assert reply.status == 200
    assert engine.prefix_cache_resets == 1
    engine.phase = "loading"
    async with reset() as reply:
        assert reply.status == 503


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "Hi"}),
        ("chat/completions", {"messages": CHAT}),
        ("messages", {"model": "tiny", "messages": CHAT, "max_tokens": 5}),
        ("responses", {"input": "Hi"}),
    ],
)
async def test_an_answer_tells_where_the_time_to_its_first_token_went(
    serve: Serve, path: str, body: dict[str, Any], stream: bool
) -> None:
    url = await serve(FakeEngine())
    request = aiohttp.request("POST", f"{url}/v1/{path}", json=body | {"stream": stream})
    async with request as reply:
        parts = dict(part.split(";dur=") for part in reply.headers["Server-Timing"].split(", "))
        await reply.read()
    assert list(parts) == ["tokenize", "queue", "prefill", "ttft"]
    assert (parts["queue"], parts["prefill"]) == ("250.00", "500.00")
    async with aiohttp.request("GET", f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    labels = '{engine="0",model_name="tiny"}'
    assert f"jaxserve_tokenize_seconds_count{labels} 1.0" in lines
    assert f"jaxserve_tokenize_seconds_sum{labels} 0.0" not in lines
    assert f"jaxserve_first_write_seconds_count{labels} {float(stream)}" in lines


async def test_a_deep_health_check_has_a_token_made(serve: Serve) -> None:
    engine = FakeEngine(b"a")
    url = await serve(engine)
    status, body = await get(url, "/health?deep=1")
    assert status == 200 and body["token_s"] >= 0 and len(engine.requests) == 1
    engine.phase = "compiling"
    assert "token_s" not in (await get(url, "/live?deep=1"))[1]
    engine.phase = "serving"
    assert (await get(url, "/live?deep=1"))[1]["token_s"] >= 0
    url = await serve(FakeEngine(fail_after=0))
    status, body = await get(url, "/health?deep=1")
    assert (status, body["phase"]) == (503, "no_token")


async def test_a_server_with_much_to_do_is_healthy(serve: Serve, monkeypatch: Patch) -> None:
    """Those who ask share one token, which waits like any other request."""
    monkeypatch.setattr(probe, "PATIENCE", 0.1)
    for engine in (FakeEngine(step_seconds=60.0), FakeEngine(refuse=Overloaded("full"))):
        url = await serve(engine)
        answers = await asyncio.gather(*[get(url, "/health?deep=1") for _ in range(5)])
        assert all((status, body["token_s"]) == (200, None) for status, body in answers)
        assert len(engine.requests) <= 1


async def test_metrics_count_what_was_served(serve: Serve) -> None:
    url = await serve(FakeEngine(b"abc", cached_tokens=1))
    async with aiohttp.request("POST", f"{url}/v1/completions", json={"prompt": "Hi"}) as reply:
        assert reply.status == 200
    async with aiohttp.request("POST", f"{url}/v1/completions", json={"prompt": ""}) as reply:
        assert reply.status == 400
    async with aiohttp.request("GET", f"{url}/metrics") as reply:
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = set((await reply.text()).splitlines())
    labels = 'engine="0",model_name="tiny"'
    labelled = 'engine="0",finished_reason="{}",model_name="tiny"'
    assert {
        f"vllm:request_prompt_tokens_sum{{{labels}}} 2.0",
        f"vllm:request_generation_tokens_sum{{{labels}}} 3.0",
        f"vllm:prompt_tokens_cached_total{{{labels}}} 1.0",
        f"vllm:prefix_cache_queries_total{{{labels}}} 2.0",
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} 1.0',
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_cache_hit"}} 1.0',
        f"vllm:prefix_cache_hits_total{{{labels}}} 1.0",
        'jaxserve_prefix_cache_requests_total{engine="0",hit="true",model_name="tiny"} 1.0',
        f"vllm:request_prefill_kv_computed_tokens_sum{{{labels}}} 1.0",
        f"vllm:num_requests_running{{{labels}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0",
        f"vllm:inter_token_latency_seconds_count{{{labels}}} 2.0",
        f"vllm:time_per_output_token_seconds_count{{{labels}}} 2.0",
        f"vllm:e2e_request_latency_seconds_count{{{labels}}} 1.0",
        f"vllm:request_success_total{{{labelled.format('length')}}} 1.0",
        f"vllm:request_success_total{{{labelled.format('abort')}}} 0.0",
        f'vllm:admission_rejections_total{{{labels},reason="invalid"}} 1.0',
        'jaxserve_compiles_total{phase="serving"} 0.0',
    } <= lines


@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_failure_is_not_counted_as_a_token(serve: Serve, tokens: int) -> None:
    url = await serve(FakeEngine(b"abc"[: tokens + 1], finish=FinishReason.ERROR))
    async with aiohttp.request("POST", f"{url}/v1/completions", json={"prompt": "Hi"}) as reply:
        assert reply.status == 500
    async with aiohttp.request("GET", f"{url}/metrics") as reply:
        lines = set((await reply.text()).splitlines())
    labels = '{engine="0",model_name="tiny"}'
    assert {
        f"vllm:request_generation_tokens_sum{labels} {float(tokens)}",
        f"vllm:time_to_first_token_seconds_count{labels} {float(tokens > 0)}",
        f"vllm:inter_token_latency_seconds_count{labels} {float(max(0, tokens - 1))}",
        f"vllm:prefix_cache_queries_total{labels} {2.0 * (tokens > 0)}",
    } <= lines


async def test_a_grammar_that_meets_a_limit_is_no_rejection_before_any_work(serve: Serve) -> None:
    url = await serve(FakeEngine(b"abc", finish=FinishReason.GRAMMAR))
    async with aiohttp.request("POST", f"{url}/v1/completions", json={"prompt": "Hi"}) as reply:
        assert reply.status == 400
    async with aiohttp.request("GET", f"{url}/metrics") as reply:
        lines = set((await reply.text()).splitlines())
    labels = 'engine="0",{}model_name="tiny"'
    assert {
        f'vllm:admission_rejections_total{{{labels.format("")},reason="invalid"}} 0.0',
        f"vllm:request_success_total{{{labels.format('finished_reason="error",')}}} 1.0",
    } <= lines


async def test_a_request_of_several_choices_counts_its_longest(serve: Serve) -> None:
    lengths = iter([2, 5, 3])
    url = await serve(FakeEngine(lambda _: [*b"abcde"[: next(lengths)]]))
    body = {"prompt": "Hi", "n": 3, "max_tokens": 9}
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200
    async with aiohttp.request("GET", f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    labels = '{engine="0",model_name="tiny"}'
    assert f"vllm:request_max_num_generation_tokens_sum{labels} 5.0" in lines
    assert f"vllm:request_max_num_generation_tokens_count{labels} 1.0" in lines


async def test_who_waits_waits_for_room(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    waiting = engine.status()._replace(waiting=4)
    monkeypatch.setattr(engine, "status", lambda: waiting)
    url = await serve(engine)
    async with aiohttp.request("GET", f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    name = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason='
    assert f'{name}"capacity"}} 4.0' in lines
    assert f'{name}"deferred"}} 0.0' in lines


async def test_a_scrape_holds_the_loop_for_less_than_a_millisecond_while_it_streams(
    serve: Serve, monkeypatch: Patch
) -> None:
    """Of the loop's own time: it does not matter what else the machine does."""
    held: list[float] = []
    scrape = health.metrics

    async def timed(request: web.Request) -> web.Response:
        begun = time.thread_time()
        try:
            return await scrape(request)
        finally:
            held.append(time.thread_time() - begun)

    monkeypatch.setattr(health, "metrics", timed)
    monkeypatch.setattr(exposition, "PROCESS_SECONDS", 3600.0)
    url = await serve(FakeEngine(b"a" * 2000, step_seconds=0.01))

    async def stream(session: aiohttp.ClientSession) -> None:
        body = {"prompt": "Hi", "stream": True, "max_tokens": 2000}
        async with session.post("/v1/completions", json=body) as reply:
            async for _ in reply.content.iter_any():
                pass

    async with aiohttp.ClientSession(url) as session:
        streams = [asyncio.create_task(stream(session)) for _ in range(32)]
        for _ in range(40):
            await asyncio.sleep(0.05)
            async with session.get("/metrics") as reply:
                assert "vllm:num_requests_running" in await reply.text()
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    assert sorted(held)[len(held) * 9 // 10] < 1e-3, held
