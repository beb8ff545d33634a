"""Health is progress, readiness is service, and metrics carry the names that dashboards know."""

from __future__ import annotations

from typing import Any

import aiohttp

from tests.fakes import FakeEngine
from tests.server.conftest import Serve


async def get(url: str, path: str) -> tuple[int, Any]:
    async with aiohttp.request("GET", url + path) as reply:
        return reply.status, await reply.json()


async def test_health_follows_progress_and_not_readiness(serve: Serve) -> None:
    engine = FakeEngine()
    url = await serve(engine, stall_timeout=10.0)
    expected = {"state": "serving", "running": 0, "waiting": 0, "last_step_age_s": 0.0}
    assert await get(url, "/health") == (200, expected)
    engine.phase = "compiling"
    assert (await get(url, "/health"))[0] == 200
    engine.last_step_age = 11.0
    status, body = await get(url, "/health")
    assert (status, body["state"]) == (503, "stalled")
    engine.phase, engine.last_step_age = "failed", 0.0
    assert (await get(url, "/health"))[0] == 503


async def test_ready_only_while_requests_are_served(serve: Serve) -> None:
    engine = FakeEngine()
    url = await serve(engine, stall_timeout=10.0)
    assert (await get(url, "/ready"))[0] == 200
    for phase in ("loading", "draining", "failed"):
        engine.phase = phase
        assert await get(url, "/ready") == (503, {"phase": phase, "progress": 0.5})
    engine.phase, engine.last_step_age = "serving", 11.0
    assert (await get(url, "/ready"))[0] == 503


async def test_load_and_version(serve: Serve) -> None:
    url = await serve(FakeEngine())
    assert (await get(url, "/load"))[1]["server_load"] == 0
    assert (await get(url, "/version"))[1]["version"]


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
        f"vllm:prompt_tokens_total{{{labels}}} 2.0",
        f"vllm:generation_tokens_total{{{labels}}} 3.0",
        f"vllm:prompt_tokens_cached_total{{{labels}}} 1.0",
        f"vllm:num_requests_running{{{labels}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0",
        f"vllm:inter_token_latency_seconds_count{{{labels}}} 2.0",
        f"vllm:e2e_request_latency_seconds_count{{{labels}}} 1.0",
        f"vllm:request_success_total{{{labelled.format('length')}}} 1.0",
        f"vllm:request_success_total{{{labelled.format('abort')}}} 0.0",
        f'vllm:admission_rejections_total{{{labels},reason="invalid"}} 1.0',
        'jaxserve_compiles_total{phase="serving"} 0.0',
    } <= lines
