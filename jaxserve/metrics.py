"""Prometheus metrics: vLLM's names where it has one, `jaxserve_*` for the rest."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from jaxserve.api import EngineStatus, Start
from jaxserve.histogram import TokenHistogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FINISH_REASONS = ("stop", "length", "abort", "error")
COMPILE_PHASES = ("startup", "serving")
REJECTIONS = ("invalid", "unauthorized", "overloaded", "not_ready")
MAX_IGNORED_NAMES = 64
"""Names of ignored parameters that get a series of their own; clients choose the names."""

# vLLM's buckets, finer at the low end: a 4B model decodes in 2 to 4 ms on an H100.
_ITL = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TTFT = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_E2E = (
    *(0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0),
)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_RATIO = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Metrics:
    """One registry per server. Every method but `next_tokens` may be called from any thread."""

    def __init__(self, model_name: str, *, legacy: bool = True):
        """`legacy`: some metrics have vLLM's former names, too."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._labels = {"model_name": model_name, "engine": "0"}
        self._ignored_names: set[str] = set()
        self._make_request_metrics()
        self._make_engine_metrics()
        self._former = _Former(self._registry, self._labels) if legacy else None
        itl = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
        text = "Between two tokens of one sequence"
        names = itl if legacy else itl[:1]
        self._itl = TokenHistogram(names, text, _ITL, self._labels, self._registry)

    def exposition(self) -> bytes:
        """All metrics as text for a scrape, of type CONTENT_TYPE."""
        return generate_latest(self._registry)

    # Called by the server.

    def request_rejected(self, reason: str) -> None:
        """An answer 4xx or 503 before any work; `reason` is one of REJECTIONS."""
        self._rejected.labels(**self._labels, reason=reason).inc()

    def prompt_accepted(self, tokens: int, max_tokens: int) -> None:
        """A sequence goes to the engine."""
        self._prompt_tokens.inc(tokens)
        self._prompt_sizes.observe(tokens)
        self._max_tokens.observe(max_tokens)

    def first_token(self, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Time since the request arrived, and how much of its prompt was a prefix hit."""
        self._ttft.observe(seconds)
        self._cached_tokens.inc(cached_tokens)
        self._prefix_queries.inc(prompt_tokens)
        self._prefix_hits.inc(cached_tokens)
        if self._former is not None:
            self._former.prefix_queries.inc(prompt_tokens)
            self._former.prefix_hits.inc(cached_tokens)
        self._local_compute.inc(prompt_tokens - cached_tokens)
        self._local_hits.inc(cached_tokens)
        self._prefix_requests.labels(**self._labels, hit=str(cached_tokens > 0).lower()).inc()
        self._computed.observe(prompt_tokens - cached_tokens)

    def next_tokens(self, seconds: float, count: int) -> None:
        """So many tokens came at once, `seconds` after the one before them: the others after 0.

        Called on one thread, the event loop's.
        """
        if count:
            self._itl.observe(seconds)
            self._itl.observe(0.0, count - 1)

    def sequence_computed(self, prefill: float, decode: float, generated_tokens: int) -> None:
        """Of a sequence that ended after its first token: seconds before it and from then on."""
        self._decode_time.observe(decode)
        self._inference_time.observe(prefill + decode)
        if generated_tokens > 1:
            self._tpot.observe(decode / (generated_tokens - 1))

    def request_choices(self, n: int) -> None:
        """How many choices a request asked for."""
        self._choices.observe(n)

    def request_generated(self, most_tokens: int) -> None:
        """How many tokens the longest of a request's choices had when it ended."""
        self._longest.observe(most_tokens)

    def sequence_finished(self, reason: str, generated_tokens: int, seconds: float) -> None:
        """`reason` is one of FINISH_REASONS; a client that went away is an abort."""
        self._finished.labels(**self._labels, finished_reason=reason).inc()
        self._generation_tokens.inc(generated_tokens)
        self._generation_sizes.observe(generated_tokens)
        self._e2e.observe(seconds)

    def parameter_ignored(self, name: str) -> None:
        if len(self._ignored_names) < MAX_IGNORED_NAMES:
            self._ignored_names.add(name)
        shown = name if name in self._ignored_names else "other"
        self._ignored.labels(param=shown).inc()

    # Called by the engine.

    def observe_load(self, status: EngineStatus) -> None:
        """The server calls it too, before a scrape."""
        used = status.total_pages - status.free_pages
        kv_usage = used / status.total_pages if status.total_pages else 0.0
        self._running.set(status.running)
        self._waiting.set(status.waiting)
        self._waiting_for_room.set(status.waiting)
        self._kv_usage.set(kv_usage)
        if self._former is not None:
            self._former.kv_usage.set(kv_usage)

    def observe_step(
        self, kind: str, bucket: int, seconds: float, used: int, padded: int, late: bool
    ) -> None:
        """A step computed `used` of the `padded` rows or tokens of its bucket; `late`: it was
        launched after the one before it had ended."""
        self._steps.labels(kind=kind, bucket=str(bucket)).observe(seconds)
        self._padding.labels(kind=kind).observe(1.0 - used / padded)
        self._step_tokens.observe(used)
        if late:
            self._late_steps.labels(kind=kind).inc()

    def count_compile(self, phase: str) -> None:
        """`phase` is one of COMPILE_PHASES; one while serving is a defect."""
        self._compiles.labels(phase=phase).inc()

    def count_error(self) -> None:
        """A sequence that a failed step ended."""
        self._errors.inc()

    def count_shed(self) -> None:
        """A waiting sequence could not have its first token in time any more."""
        self._shed.inc()

    def count_preemption(self) -> None:
        self._preemptions.inc()

    def observe_preemptions(self, times: int) -> None:
        """How often a sequence that has ended was preempted."""
        self._preemptions_each.observe(times)

    def observe_tokenizing(self, seconds: float) -> None:
        """The prompts of a request were rendered and encoded."""
        self._tokenize_time.observe(seconds)

    def observe_first_write(self, seconds: float) -> None:
        """A stream's first token was written to its socket so long after it was on the host."""
        self._first_write_time.observe(seconds)

    def observe_start(self, start: Start) -> None:
        """A sequence has its first token."""
        self._queue_time.observe(start.queued)
        self._prefill_time.observe(start.prefill)

    def set_cache_info(self, *, page_size: int, num_pages: int) -> None:
        info = Gauge(
            "vllm:cache_config_info",
            "Geometry of the KV cache; the value is 1",
            [*self._labels, "block_size", "num_gpu_blocks"],
            registry=self._registry,
        )
        info.labels(**self._labels, block_size=str(page_size), num_gpu_blocks=str(num_pages)).set(1)

    def set_memory(self, kind: str, num_bytes: int) -> None:
        """Device memory planned for `kind`: weights, kv, state, temporaries, free."""
        self._memory.labels(kind=kind).set(num_bytes)

    def set_startup(self, phase: str, seconds: float) -> None:
        """How long a phase of the start took; `total` is from the process's start to ready."""
        self._startup.labels(phase=phase).set(seconds)

    def _make_request_metrics(self) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens accepted")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self._cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache"
        )
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self._prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from",
            [*self._labels, "source"],
            registry=self._registry,
        )
        self._local_compute = by_source.labels(**self._labels, source="local_compute")
        self._local_hits = by_source.labels(**self._labels, source="local_cache_hit")
        self._tokenize_time = self._histogram(
            "jaxserve_tokenize_seconds", "Rendering and encoding the prompts of a request", _STEP
        )
        self._first_write_time = self._histogram(
            "jaxserve_first_write_seconds",
            "From the first token's arrival on the host to its write into the stream",
            _STEP,
        )
        self._prefix_requests = Counter(
            "jaxserve_prefix_cache_requests",
            "Sequences by whether a part of their prompt was in the prefix cache",
            [*self._labels, "hit"],
            registry=self._registry,
        )
        for hit in ("true", "false"):
            self._prefix_requests.labels(**self._labels, hit=hit)
        self._computed = self._histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens computed per sequence: those not in the prefix cache",
            _TOKENS,
        )
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token", _TTFT
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token", _E2E
        )
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Per sequence, without the first", _ITL
        )
        self._decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last", _E2E
        )
        self._inference_time = self._histogram(
            "vllm:request_inference_time_seconds", "From admission to the last token", _E2E
        )
        self._choices = self._histogram(
            "vllm:request_params_n", "Choices per request", (1.0, 2.0, 5.0, 10.0, 20.0)
        )
        self._prompt_sizes = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens per sequence", _TOKENS
        )
        self._generation_sizes = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens per sequence", _TOKENS
        )
        self._longest = self._histogram(
            "vllm:request_max_num_generation_tokens",
            "Generated tokens of the longest choice per request",
            _TOKENS,
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens per sequence", _TOKENS
        )
        self._finished = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._rejected = Counter(
            "vllm:admission_rejections",
            "Requests answered with an error before any work",
            [*self._labels, "reason"],
            registry=self._registry,
        )
        for reason in FINISH_REASONS:
            self._finished.labels(**self._labels, finished_reason=reason)
        for reason in REJECTIONS:
            self._rejected.labels(**self._labels, reason=reason)
        self._ignored = Counter(
            "jaxserve_ignored_params",
            "Request fields that were accepted and had no effect",
            ["param"],
            registry=self._registry,
        )

    def _make_engine_metrics(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Sequences in the running set")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Sequences in the queue")
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Sequences in the queue, by what they wait for",
            [*self._labels, "reason"],
            registry=self._registry,
        )
        self._waiting_for_room = by_reason.labels(**self._labels, reason="capacity")
        by_reason.labels(**self._labels, reason="deferred").set(0)
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0-1")
        lora = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        Gauge(
            "vllm:lora_requests_info",
            "LoRA adapters, which are not served; the value is the time of the start",
            lora,
            registry=self._registry,
        ).labels("0", "", "").set_to_current_time()
        self._queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "From the engine's receipt to admission", _TTFT
        )
        self._prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "From admission to the first token", _TTFT
        )
        self._errors = Counter(
            "jaxserve_step_errors", "Sequences that a failed step ended", registry=self._registry
        )
        self._shed = Counter(
            "jaxserve_deadline_shed",
            "Sequences dropped from the queue because their deadline could not be met",
            registry=self._registry,
        )
        self._preemptions = self._counter("vllm:num_preemptions", "Sequences preempted")
        self._preemptions_each = self._histogram(
            "vllm:request_num_preemptions",
            "Preemptions per sequence that was not cut off",
            (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
        )
        self._step_tokens = self._histogram(
            "vllm:iteration_tokens_total",
            "Tokens computed per step",
            (1.0, *(float(2**e) for e in range(3, 15))),
        )
        self._steps = Histogram(
            "jaxserve_step_seconds",
            "Duration of a step by the bucket it ran in",
            ["kind", "bucket"],
            buckets=_STEP,
            registry=self._registry,
        )
        self._padding = Histogram(
            "jaxserve_step_padding_ratio",
            "Share of a step's bucket that was padding",
            ["kind"],
            buckets=_RATIO,
            registry=self._registry,
        )
        self._late_steps = Counter(
            "jaxserve_late_steps",
            "Steps launched after the one before them had ended: the device waited for the host",
            ["kind"],
            registry=self._registry,
        )
        for kind in ("decode", "mixed"):
            self._late_steps.labels(kind=kind)
        self._compiles = Counter(
            "jaxserve_compiles",
            "XLA compiles; stays 0 while serving",
            ["phase"],
            registry=self._registry,
        )
        for phase in COMPILE_PHASES:
            self._compiles.labels(phase=phase)
        self._memory = Gauge(
            "jaxserve_memory_bytes", "Planned device memory", ["kind"], registry=self._registry
        )

        self._startup = Gauge(
            "jaxserve_startup_seconds",
            "Duration of the phases of the start",
            ["phase"],
            registry=self._registry,
        )

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(name, text, list(self._labels), registry=self._registry)
        return family.labels(**self._labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        family = Gauge(name, text, list(self._labels), registry=self._registry)
        return family.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, list(self._labels), buckets=buckets, registry=self._registry)
        return family.labels(**self._labels)


class _Former:
    """What dashboards and autoscalers that were made for older vLLMs ask for."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]):
        names = list(labels)
        self.kv_usage = Gauge(
            "vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc", names, registry=registry
        ).labels(**labels)
        self.prefix_queries = Counter(
            "vllm:gpu_prefix_cache_queries", "vllm:prefix_cache_queries", names, registry=registry
        ).labels(**labels)
        self.prefix_hits = Counter(
            "vllm:gpu_prefix_cache_hits", "vllm:prefix_cache_hits", names, registry=registry
        ).labels(**labels)
