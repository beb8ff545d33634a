"""What llm-d's gateway says of a request in headers reaches the scheduler."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from jaxserve.server.access import digest
from tests.fakes import FakeEngine
from tests.server.conftest import Serve

OBJECTIVES = {"interactive": 10, "batch": -10}
KEYED: dict[str, Any] = {"api_key_digests": (digest("a"), digest("b"))}


async def ask(url: str, key: str = "a", **headers: str) -> aiohttp.ClientResponse:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"prompt": "Hi", "service_tier": "flex"}
    headers = {"x-api-key": key, **named}
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body, headers=headers) as got:
        await got.read()
        return got


async def test_deadlines_have_llm_d_s_names_and_the_former_ones(serve: Serve) -> None:
    engine = FakeEngine(b"Hi")
    url = await serve(engine)
    for headers, seconds in (
        ({}, None),
        ({"x-slo-ttft-ms": "200"}, 0.2),
        ({"x-llm-d-slo-ttft-ms": "300"}, 0.3),
        ({"x-slo-ttft-ms": "200", "x-llm-d-slo-ttft-ms": "300"}, 0.3),
        ({"x-slo-tpot-ms": "20", "x-llm-d-slo-tpot-ms": "20"}, None),
    ):
        assert (await ask(url, **headers)).status == 200
        assert engine.requests[-1].ttft_slo == seconds
    refused = await ask(url, x_llm_d_slo_ttft_ms="soon")
    assert refused.status == 400


@pytest.mark.parametrize("prefix", ["x-llm-d-inference", "x-gateway-inference"])
async def test_objectives_are_priorities_and_higher_goes_first(serve: Serve, prefix: str) -> None:
    engine = FakeEngine(b"Hi")
    url = await serve(engine, objectives=OBJECTIVES, by_priority=True)
    name = f"{prefix}-objective"
    for headers, level in (
        ({name: "interactive"}, -10),
        ({name: "batch"}, 10),
        ({name: "unknown"}, 1),  # the body's tier
        ({}, 1),
        ({name: "batch", "x-vllm-priority": "-5"}, -5),
    ):
        assert (await ask(url, **headers)).status == 200
        assert engine.requests[-1].priority == level, headers
    url = await serve(engine)
    await ask(url, **{name: "interactive"})
    assert engine.requests[-1].priority == 1


async def test_the_tier_that_was_used_is_not_the_one_that_a_gateway_overrode(serve: Serve) -> None:
    url = await serve(FakeEngine(b"Hi"), objectives=OBJECTIVES, by_priority=True)
    for objective, used in (("interactive", "default"), ("unknown", "flex")):
        assert (await (await post(url, objective)).json())["service_tier"] == used


async def post(url: str, objective: str) -> aiohttp.ClientResponse:
    async with aiohttp.ClientSession() as session:
        reply = await session.post(
            f"{url}/v1/completions",
            json={"prompt": "Hi", "service_tier": "flex"},
            headers={"x-llm-d-inference-objective": objective},
        )
        await reply.read()
        return reply


@pytest.mark.parametrize(
    "header", ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"]
)
async def test_a_trusted_gateway_names_the_tenant(serve: Serve, header: str) -> None:
    engine = FakeEngine(b"Hi")
    url = await serve(engine, **KEYED, trust_gateway=True, isolate_cache_by_key=True)
    for key, flow in (("a", "x"), ("b", "x"), ("a", "y"), ("a", "default-flow"), ("a", "")):
        await ask(url, key, **({header: flow} if flow else {}))
    x_a, x_b, y, default, none = (request.tenant for request in engine.requests)
    assert x_a == x_b != y
    assert default == none and none not in (x_a, y)
    salts = [request.cache_salt for request in engine.requests]
    assert salts[0] == salts[2] == salts[4] != salts[1], "caches are apart by key all the same"


async def test_nobody_else_does(serve: Serve) -> None:
    """A client that could choose its tenant would always have the one that got least."""
    engine = FakeEngine(b"Hi")
    url = await serve(engine, **KEYED)
    await ask(url)
    await ask(url, x_llm_d_inference_fairness_id="x")
    assert engine.requests[0].tenant == engine.requests[1].tenant


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_transfer_params", {"do_remote_prefill": True, "remote_host": "a"}),
        ("ec_transfer_params", {"remote": 1}),
        ("bootstrap_host", "10.0.0.1"),
        ("bootstrap_port", 8998),
        ("bootstrap_room", 7),
    ],
)
async def test_transfers_between_servers_are_refused_by_name(
    serve: Serve, field: str, value: Any
) -> None:
    url = await serve(FakeEngine(b"Hi"))
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, body in (("completions", {"prompt": "Hi"}), ("chat/completions", chat)):
        async with aiohttp.ClientSession(url) as session:
            async with session.post(f"/v1/{path}", json=body | {field: value}) as reply:
                error = (await reply.json())["error"]
                assert (reply.status, error["param"]) == (400, field)
                assert "takes no part in a transfer" in error["message"]
            headers = {"x-prefiller-host-port": "10.0.0.1:8000", "x-data-parallel-host-port": "a:1"}
            async with session.post(
                f"/v1/{path}", json=body | {field: None}, headers=headers
            ) as reply:
                assert reply.status == 200
