"""Spans of requests arrive at a collector, below those of their clients, without any text."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from jaxserve.server.telemetry.tracing import Tracing
from tests.fakes import FakeEngine
from tests.server.conftest import serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_a_span_of_the_trace_that_it_names(stream: bool) -> None:
    received: list[bytes] = []

    async def collect(request: web.Request) -> web.Response:
        received.append(await request.read())
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    tracing = Tracing(f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces", "tiny")
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    body = {"prompt": "secret", "n": 2, "temperature": 0.5, "stream": stream}
    try:
        async with serving(FakeEngine(), tracer=tracing) as url:
            async with aiohttp.request(
                "POST", f"{url}/v1/completions", json=body, headers=headers
            ) as reply:
                assert reply.status == 200
                await reply.read()
            async with aiohttp.request("GET", f"{url}/health"):
                pass
        await asyncio.to_thread(tracing.shutdown)
    finally:
        await runner.cleanup()
    (span,) = [
        span
        for one in received
        for resource in ExportTraceServiceRequest.FromString(one).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "POST /v1/completions"
    assert span.start_time_unix_nano < span.end_time_unix_nano
    found: dict[str, Any] = {}
    for each in span.attributes:
        found[each.key] = getattr(each.value, each.value.WhichOneof("value"))
    assert found["gen_ai.request.id"] == "mine"
    assert found["gen_ai.request.n"] == 2
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.usage.input_tokens"] == found["gen_ai.usage.prompt_tokens"] == 6
    assert found["gen_ai.usage.output_tokens"] == 10
    assert [each.string_value for each in found["gen_ai.response.finish_reasons"].values] == [
        "length",
        "length",
    ]
    assert found["http.response.status_code"] == 200
    assert 0 <= found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert found["gen_ai.latency.time_in_queue"] == 0.25
    assert found["gen_ai.latency.time_in_model_prefill"] == 0.5
    assert 0 < found["jaxserve.latency.tokenize"] < found["gen_ai.latency.e2e"]
    assert ("jaxserve.latency.first_write" in found) == stream
    assert 0 <= found.get("jaxserve.latency.first_write", 0) < found["gen_ai.latency.e2e"]
    assert b"secret" not in b"".join(received)
