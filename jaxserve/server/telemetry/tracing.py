"""OpenTelemetry spans of requests. Imported only if `--otlp-traces-endpoint` is given, because it
needs the packages of the extra `otel`."""

from __future__ import annotations

from collections.abc import Iterator

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from jaxserve import __version__
from jaxserve.server.telemetry.finished import Finished


class Tracing:
    """Implements the server's `Tracer`: one span per finished request, as a child of the span in
    its `traceparent` header. A thread of the SDK sends spans in batches.

    Attributes have the names of OpenTelemetry's conventions for generative AI. Otherwise they have
    vLLM's names, or our own if vLLM has none. Times are in seconds.
    """

    def __init__(self, endpoint: str, model: str):
        """`endpoint`: URL for OTLP over HTTP, e.g. http://localhost:4318/v1/traces."""
        resource = Resource.create({"service.name": "jaxserve", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("jaxserve", __version__)
        self._incoming = TraceContextTextMapPropagator()
        self._model = model

    def record(self, finished: Finished) -> None:
        carrier = {name.lower(): value for name, value in finished.headers.items()}
        began = int(finished.began * 1e9)
        span = self._tracer.start_span(
            f"{finished.method} {finished.route}",
            context=self._incoming.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=began,
            attributes=dict(self._attributes(finished)),
        )
        if finished.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(began + int(finished.seconds * 1e9))

    def shutdown(self) -> None:
        """Sends the remaining spans. Takes as long as the collector, at most some seconds."""
        self._provider.shutdown()

    def _attributes(self, finished: Finished) -> Iterator[tuple[str, AttributeValue]]:
        yield "http.request.method", finished.method
        yield "http.route", finished.route or ""
        yield "http.response.status_code", finished.status
        yield "gen_ai.request.model", self._model
        yield "gen_ai.request.id", finished.id
        yield "gen_ai.latency.e2e", finished.seconds
        if finished.generation is None:
            return
        generation = finished.generation
        params = generation.choices[0].request.params
        yield "gen_ai.request.n", len(generation.choices)
        yield "gen_ai.request.max_tokens", params.max_tokens
        yield "gen_ai.request.temperature", params.temperature
        yield "gen_ai.request.top_p", params.top_p
        reasons = [str(choice.reason or "abort") for choice in generation.choices]
        yield "gen_ai.response.finish_reasons", reasons
        for names, tokens in (
            (("input", "prompt"), generation.prompt_tokens),
            (("output", "completion"), generation.completion_tokens),
        ):
            for name in names:
                yield f"gen_ai.usage.{name}_tokens", tokens
        times = finished.timing
        for name, seconds in (
            ("time_in_queue", times.queue),
            ("time_to_first_token", times.ttft),
            ("time_in_model_prefill", times.prefill),
            ("time_in_model_decode", times.decode),
        ):
            if seconds is not None:
                yield f"gen_ai.latency.{name}", seconds
        if times.prefill is not None and times.decode is not None:
            yield "gen_ai.latency.time_in_model_inference", times.prefill + times.decode
        yield "jaxserve.latency.tokenize", generation.tokenizing
        if generation.first_write is not None:
            yield "jaxserve.latency.first_write", generation.first_write
