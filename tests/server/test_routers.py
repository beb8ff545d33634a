"""What each router, gateway and scraper asks of a server, asked as it asks, and read as it reads:
written down from the sources of llm-d, production-stack, smg, KServe, Dynamo and Ray Serve.

tests/e2e/test_real_routers.py runs those of them that install from the package index."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.metrics.families import ROUTING
from jaxserve.metrics.metrics import Metrics
from jaxserve.server.access import digest
from tests.fakes import IM_END, FakeEngine
from tests.server.conftest import serving

KEY = "key-of-the-chart"
BEARER = {"Authorization": f"Bearer {KEY}"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """One server of a fleet, as a chart with a key starts it."""

    url: str
    engine: FakeEngine
    metrics: Metrics

    async def get(self, path: str, headers: Any = None, status: int = 200) -> Any:
        async with aiohttp.request("GET", self.url + path, headers=headers) as reply:
            text = await reply.text()
            assert reply.status == status, text
            return json.loads(text) if reply.content_type == "application/json" else text

    async def post(self, path: str, body: Any, headers: Any = None, status: int = 200) -> Any:
        async with aiohttp.request("POST", self.url + path, json=body, headers=headers) as reply:
            assert reply.status == status, await reply.text()
            return await reply.json()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    engine, metrics = FakeEngine([*b"Hi", IM_END], cached_tokens=1), Metrics("tiny")
    metrics.set_cache_info(page_size=64, num_pages=100)
    settings: dict[str, Any] = {
        "api_key_digests": (digest(KEY),),
        "open_metrics": True,
        "open_render": True,
        "objectives": {"premium": 10},
        "trust_gateway": True,
    }
    async with serving(engine, metrics=metrics, **settings) as url:
        yield Fleet(url=url, engine=engine, metrics=metrics)


# llm-d


def extracted(text: str) -> dict[str, float]:
    """The five families of llm-d's extractor, which takes the newest series of each."""
    names = {
        "vllm:num_requests_waiting": "queue",
        "vllm:num_requests_running": "running",
        "vllm:kv_cache_usage_perc": "usage",
    }
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        sample = max(family.samples, key=lambda sample: sample.value, default=None)
        if sample is None:
            continue
        if family.name in names:
            found[names[family.name]] = sample.value
        elif family.name == "vllm:cache_config_info":
            found["block_size"] = int(sample.labels["block_size"])
            found["blocks"] = int(sample.labels["num_gpu_blocks"])
        elif family.name == "vllm:lora_requests_info":
            assert sample.labels.keys() == {
                *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            }
            found["adapters_at"] = sample.value
    return found


@pytest.mark.parametrize("path", ["/metrics", "/metrics/routing"])
async def test_llm_d_scrapes_without_a_key(fleet: Fleet, path: str) -> None:
    fleet.engine.running = 3
    async with aiohttp.request("GET", fleet.url + path) as reply:
        assert (reply.status, reply.content_type) == (200, "text/plain")
        text = await reply.text()
    found = extracted(text)
    assert (found["running"], found["queue"], found["usage"]) == (3, 0, 0.25)
    assert (found["block_size"], found["blocks"]) == (64, 100)
    assert found["adapters_at"] > 1.7e9
    if path == "/metrics/routing":
        assert len(text) < 4096 and set(re.findall(r"^# TYPE (\S+)", text, re.M)) == ROUTING


async def test_llm_d_scrapes_twenty_times_a_second_on_one_connection(fleet: Fleet) -> None:
    async with aiohttp.ClientSession(fleet.url) as session:
        for _ in range(20):
            async with session.get("/metrics/routing") as reply:
                assert extracted(await reply.text()).keys() >= {"queue", "running", "usage"}
            await asyncio.sleep(0.01)


async def test_llm_d_s_renderer_gets_the_tokens_that_the_engine_gets(fleet: Fleet) -> None:
    """It posts the client's body with the model's name, and no key, to any server of the pool."""
    chat = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 9}
    rendered = await fleet.post("/v1/chat/completions/render", {**chat, "model": "tiny"})
    tokens = rendered["token_ids"]
    assert tokens and all(type(token) is int and 0 <= token < 2**32 for token in tokens)
    assert rendered["features"] is None
    plain = {**CHAT, "max_tokens": 9}
    await fleet.post("/v1/chat/completions", plain, BEARER)
    assert list(fleet.engine.requests[-1].prompt) == tokens
    several = await fleet.post("/v1/completions/render", {"prompt": ["a", "b"], "model": "tiny"})
    assert [len(each["token_ids"]) for each in several] == [1, 1]


async def test_llm_d_s_gateway_passes_its_headers_on(fleet: Fleet) -> None:
    headers = {
        **BEARER,
        "x-llm-d-inference-objective": "premium",
        "x-llm-d-inference-fairness-id": "team-a",
        "x-llm-d-model-name-rewrite": "tiny",
        "x-llm-d-slo-ttft-ms": "500",
        "x-llm-d-slo-tpot-ms": "30",
        "x-gateway-destination-endpoint": "10.0.0.1:8000",
        "x-prefiller-host-port": "10.0.0.2:8000",
        "x-request-id": "of-envoy",
    }
    url = f"{fleet.url}/v1/chat/completions"
    async with aiohttp.request("POST", url, json=CHAT, headers=headers) as reply:
        assert reply.status == 200 and reply.headers["x-request-id"] == "of-envoy"
        usage = (await reply.json())["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1
    request = fleet.engine.requests[-1]
    assert (request.priority, request.ttft_slo) == (-10, 0.5)
    assert request.tenant


# production-stack


async def test_production_stack_discovers_with_its_key_and_asks_whether_one_sleeps(
    fleet: Fleet,
) -> None:
    models = (await fleet.get("/v1/models", BEARER))["data"]
    for model in models:
        assert model["object"] == "model" and model["created"] > 0 and model["parent"] is None
        assert model["root"] == "tiny"
    assert [model["id"] for model in models] == ["tiny", "alias"]
    assert await fleet.get("/is_sleeping", BEARER) == {"is_sleeping": False}
    fleet.engine.weight_state = fleet.engine.weight_state._replace(sleeping=True)
    assert await fleet.get("/is_sleeping", BEARER) == {"is_sleeping": True}
    await fleet.get("/is_sleeping", status=401)


async def test_production_stack_reads_vllm_s_former_names(fleet: Fleet) -> None:
    await fleet.post("/v1/completions", {"model": "tiny", "prompt": "Hello"}, BEARER)
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(await fleet.get("/metrics"))
        for sample in family.samples
    }
    assert samples["vllm:gpu_cache_usage_perc"] == 0.25
    assert samples["vllm:gpu_prefix_cache_queries_total"] == 5
    assert samples["vllm:gpu_prefix_cache_hits_total"] == 1
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "temperature": 0.0, "max_tokens": 3}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 3}),
        ("/v1/messages", {**CHAT, "max_tokens": 3}),
    ],
)
async def test_production_stack_s_static_probe_is_answered(
    fleet: Fleet, path: str, body: dict[str, Any]
) -> None:
    await fleet.post(path, {"model": "tiny", **body}, BEARER)


# smg, and sglang-router before it


async def test_smg_takes_it_for_vllm_and_reads_its_card(fleet: Fleet) -> None:
    """`owned_by` is none that it knows; /version decides before /server_info."""
    card = (await fleet.get("/v1/models", BEARER))["data"][0]
    assert card["owned_by"] not in ("sglang", "vllm", "nvidia")
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", "tiny", 4096)
    assert (await fleet.get("/version", BEARER))["version"]


async def test_smg_s_load_comes_from_metrics_line_by_line(fleet: Fleet) -> None:
    fleet.engine.running = 2
    values: dict[str, list[float]] = {}
    for line in (await fleet.get("/metrics", BEARER)).splitlines():
        if line.strip() and not line.startswith("#"):
            head, _, tail = line.rpartition(" ") if "}" not in line else line.rpartition("}")
            values.setdefault(head.split("{")[0].strip(), []).append(float(tail.split()[-1]))
    assert sum(values["vllm:num_requests_running"]) == 2
    assert values["vllm:gpu_cache_usage_perc"] == [0.25]


async def test_sglang_s_routers_find_model_limits_and_load(fleet: Fleet) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = await fleet.get(path, BEARER)
        assert (info["model_id"], info["served_model_name"]) == ("tiny", "tiny")
        assert (info["tp_size"], info["dp_size"], info["context_length"]) == (1, 1, 4096)
        assert info["max_total_tokens"] == 6400
    for path in ("/model_info", "/get_model_info"):
        assert (await fleet.get(path, BEARER))["is_generation"] is True
    fleet.engine.running = 4
    answer = await fleet.get("/v1/loads?include=core,disagg,queues,memory", BEARER)
    (load,) = answer["loads"]
    assert answer["dp_rank_count"] == 1 and load["dp_rank"] == 0
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (4, 0)
    assert (load["num_used_tokens"], load["max_total_num_tokens"]) == (1600, 6400)
    assert load["token_usage"] == 0.25
    await fleet.get("/v1/loads", status=401)


# KServe, and charts whose probes all ask /health


async def test_no_traffic_comes_before_it_is_served(fleet: Fleet) -> None:
    """A startup probe has to succeed first; readiness and liveness ask the same route."""
    for phase, served in (
        ("loading", 503),
        ("compiling", 503),
        ("serving", 200),
        ("draining", 503),
    ):
        fleet.engine.phase = phase
        await fleet.get("/health", status=served)
        await fleet.get("/live")
    fleet.engine.phase = "serving"
    await fleet.get("/health", {"User-Agent": "kube-probe/1.36"})


# Dynamo's frontend, and Ray Serve


async def test_dynamo_s_adapter_sends_tokens_and_reads_tokens(fleet: Fleet) -> None:
    body = {"prompt": [1, 2, 3], "return_token_ids": True, "stream": True, "max_tokens": 3}
    body |= {"model": "tiny", "cache_salt": "salt", "stream_options": {"include_usage": True}}
    tokens: list[int] = []
    async with aiohttp.request(
        "POST", f"{fleet.url}/v1/completions", json=body, headers=BEARER
    ) as reply:
        async for line in reply.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice["token_ids"]
    assert tokens[:2] == list(b"Hi")
    assert fleet.engine.requests[-1].cache_salt == "salt"


async def test_a_scraper_of_openmetrics_gets_text_that_its_parser_reads(fleet: Fleet) -> None:
    """As Prometheus, Dynamo's and Ray's scrapers ask; each falls back to this type."""
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    async with aiohttp.request("GET", f"{fleet.url}/metrics", headers={"Accept": accept}) as reply:
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = list(text_string_to_metric_families(await reply.text()))
    assert len(families) > 40


async def test_a_ray_replica_waits_for_ready_and_checks_that_a_token_comes(fleet: Fleet) -> None:
    fleet.engine.phase = "compiling"
    assert (await fleet.get("/ready", status=503))["phase"] == "compiling"
    fleet.engine.phase = "serving"
    await fleet.get("/ready")
    assert (await fleet.get("/health?deep=1"))["token_s"] >= 0
    assert (await fleet.get("/load", BEARER))["server_load"] == 0
