"""The metric families: names (vLLM's if it has one, else `jaxserve_*`), labels and buckets."""

from __future__ import annotations

import time
from collections.abc import Mapping

from jaxserve.metrics.exposition import Histogram, Number, Registry, TokenHistogram

FINISH_REASONS = ("stop", "length", "abort", "error")
COMPILE_PHASES = ("startup", "serving")
REJECTIONS = ("invalid", "unauthorized", "overloaded", "not_ready")

GRAMMAR_LIMITS = ("time", "memory", "total_memory", "stack", "not_started")

# vLLM's buckets, finer at the low end: a 4B model decodes in 2 to 4 ms on an H100.
ITL = (
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
_GRAMMAR = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_RATIO = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Families:
    """Declares metrics that carry the model's labels."""

    def __init__(self, registry: Registry, labels: Mapping[str, str]):
        self._registry = registry
        self._labels = labels

    def _counter(self, name: str, text: str) -> Number:
        return self._registry.counter(name, text, list(self._labels)).labels(**self._labels)

    def _gauge(self, name: str, text: str) -> Number:
        return self._registry.gauge(name, text, list(self._labels)).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = self._registry.histogram(name, text, buckets, list(self._labels))
        return family.labels(**self._labels)


class RequestFamilies(Families):
    """Metrics of the HTTP server."""

    def __init__(self, registry: Registry, labels: Mapping[str, str]):
        super().__init__(registry, labels)
        self.cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache"
        )
        self.prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self.prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        by_source = self._registry.counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by the source of their keys and values",
            [*self._labels, "source"],
        )
        self.local_compute = by_source.labels(**self._labels, source="local_compute")
        self.local_hits = by_source.labels(**self._labels, source="local_cache_hit")
        self.restored = by_source.labels(**self._labels, source="external_kv_transfer")
        self.tokenize_time = self._histogram(
            "jaxserve_tokenize_seconds", "Seconds to render and encode a request's prompts", _STEP
        )
        self.first_write_time = self._histogram(
            "jaxserve_first_write_seconds",
            "Seconds from the first token's arrival on the host to its write into the stream",
            _STEP,
        )
        self.prefix_requests = self._registry.counter(
            "jaxserve_prefix_cache_requests",
            "Sequences by whether part of their prompt was in the prefix cache",
            [*self._labels, "hit"],
        )
        for hit in ("true", "false"):
            self.prefix_requests.labels(**self._labels, hit=hit)
        self.computed = self._histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens per sequence that were computed, not found in the prefix cache",
            _TOKENS,
        )
        self.ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Seconds from arrival to first token", _TTFT
        )
        self.e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from arrival to last token", _E2E
        )
        self.itl = self._registry.histogram(
            "vllm:inter_token_latency_seconds",
            "Seconds between two tokens of one sequence",
            ITL,
            list(self._labels),
            TokenHistogram,
        ).labels(**self._labels)
        self.tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean seconds per token after the first, per sequence",
            ITL,
        )
        self.decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "Seconds from first to last token", _E2E
        )
        self.inference_time = self._histogram(
            "vllm:request_inference_time_seconds", "Seconds from admission to last token", _E2E
        )
        self.choices = self._histogram(
            "vllm:request_params_n", "Choices per request", (1.0, 2.0, 5.0, 10.0, 20.0)
        )
        self.prompt_sizes = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens per sequence", _TOKENS
        )
        self.generation_sizes = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens per sequence", _TOKENS
        )
        self.open_answers = self._gauge(
            "jaxserve_open_answers", "Requests whose answers are not completely sent"
        )
        self.longest = self._histogram(
            "vllm:request_max_num_generation_tokens",
            "Generated tokens of the longest choice per request",
            _TOKENS,
        )
        self.max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens per sequence", _TOKENS
        )
        self.finished = self._registry.counter(
            "vllm:request_success",
            "Finished sequences by reason",
            [*self._labels, "finished_reason"],
        )
        self.rejected = self._registry.counter(
            "vllm:admission_rejections",
            "Requests refused before any work",
            [*self._labels, "reason"],
        )
        for reason in FINISH_REASONS:
            self.finished.labels(**self._labels, finished_reason=reason)
        for reason in REJECTIONS:
            self.rejected.labels(**self._labels, reason=reason)
        self.ignored = self._registry.counter(
            "jaxserve_ignored_params",
            "Request fields that were accepted but have no effect",
            ["param"],
        )


class GrammarFamilies(Families):
    """Metrics of structured output."""

    def __init__(self, registry: Registry, labels: Mapping[str, str]):
        super().__init__(registry, labels)
        self.queue_time = self._registry.histogram(
            "jaxserve_grammar_queue_seconds",
            "Seconds that a grammar waited to be compiled",
            _GRAMMAR,
        ).labels()
        self.compile_time = self._registry.histogram(
            "jaxserve_grammar_compile_seconds",
            "Seconds from the start of a grammar's compilation to its first mask or its error",
            _GRAMMAR,
        ).labels()
        self.processes = self._registry.gauge(
            "jaxserve_grammar_processes",
            "Compiled grammars, one process each",
        ).labels()
        self.limits = self._registry.counter(
            "jaxserve_grammar_limits",
            "Grammar processes that were ended at a limit",
            ["cause"],
        )
        for cause in GRAMMAR_LIMITS:
            self.limits.labels(cause=cause)
        self.restarts = self._registry.counter(
            "jaxserve_grammar_server_restarts",
            "Restarts of the server that forks grammar processes",
        ).labels()


class EngineFamilies(Families):
    """Metrics of the engine."""

    def __init__(self, registry: Registry, labels: Mapping[str, str]):
        super().__init__(registry, labels)
        self.ready = self._gauge("jaxserve_ready", "1 while /ready is 200, else 0")
        self.weights = self._gauge(
            "jaxserve_weights_version", "Number of weight changes since the start"
        )
        self.prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Prompt tokens computed or found in the prefix cache"
        )
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self.running = self._gauge("vllm:num_requests_running", "Sequences in the running set")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Sequences in the queue")
        by_reason = self._registry.gauge(
            "vllm:num_requests_waiting_by_reason",
            "Sequences in the queue by what they wait for",
            [*self._labels, "reason"],
        )
        self.waiting_for_room = by_reason.labels(**self._labels, reason="capacity")
        by_reason.labels(**self._labels, reason="deferred").set(0)
        self.kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0-1")
        lora = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        self._registry.gauge(
            "vllm:lora_requests_info",
            "LoRA adapters, which jaxserve does not serve; the value is the start time",
            lora,
        ).labels(max_lora="0", waiting_lora_adapters="", running_lora_adapters="").set(time.time())
        self.queue_time = self._histogram(
            "vllm:request_queue_time_seconds",
            "Seconds from the engine's receipt of a request to its admission",
            _TTFT,
        )
        self.prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "Seconds from admission to first token", _TTFT
        )
        self.errors = self._registry.counter(
            "jaxserve_step_errors", "Sequences that ended with an error"
        ).labels()
        self.shed = self._registry.counter(
            "jaxserve_deadline_shed",
            "Sequences dropped from the queue because they could not meet their deadline",
        ).labels()
        self.preemptions = self._counter("vllm:num_preemptions", "Sequences preempted")
        self.preemptions_each = self._histogram(
            "vllm:request_num_preemptions",
            "Preemptions per sequence that finished normally",
            (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
        )
        self.draft_rows = self._counter("vllm:spec_decode_num_drafts", "Rows that verified drafts")
        self.draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Drafts verified")
        self.accepted_tokens = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Accepted drafts, also after a stop token"
        )
        self.accepted_at = self._registry.counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by position in the row, from 0",
            [*self._labels, "position"],
        )
        self.step_tokens = self._histogram(
            "vllm:iteration_tokens_total",
            "Tokens computed per step",
            (1.0, *(float(2**e) for e in range(3, 15))),
        )
        self.steps = self._registry.histogram(
            "jaxserve_step_seconds",
            "Seconds of a step, by its bucket",
            _STEP,
            ["kind", "bucket"],
        )
        self.padding = self._registry.histogram(
            "jaxserve_step_padding_ratio",
            "Share of padding in a step's bucket",
            _RATIO,
            ["kind"],
        )
        self.late_steps = self._registry.counter(
            "jaxserve_late_steps",
            "Steps launched after the previous step had ended, so the device waited for the host",
            ["kind"],
        )
        for kind in ("decode", "mixed", "verify"):
            self.late_steps.labels(kind=kind)
        self.corrections = self._registry.gauge(
            "jaxserve_step_time_correction_seconds",
            "Difference between a bucket's learned step time and the time measured at start",
            ["kind", "bucket"],
        )
        self.compiles = self._registry.counter(
            "jaxserve_compiles",
            "XLA compilations; stays 0 while serving",
            ["phase"],
        )
        for phase in COMPILE_PHASES:
            self.compiles.labels(phase=phase)
        self.memory = self._registry.gauge(
            "jaxserve_memory_bytes", "Planned device memory", ["kind"]
        )
        self.fast_paths = self._registry.gauge(
            "jaxserve_fast_path",
            "Fast paths of GPU steps: 1 on, 0 off; the log says why",
            ["feature"],
        )
        self.fallbacks = self._registry.gauge(
            "jaxserve_kernel_fallback",
            "1: a kernel did not compile for this GPU, and a slower implementation runs instead",
            ["operation"],
        )
        self.startup = self._registry.gauge(
            "jaxserve_startup_seconds",
            "Seconds of each start-up phase",
            ["phase"],
        )


class EventFamilies(Families):
    """Metrics of KV cache events."""

    def __init__(self, registry: Registry, labels: Mapping[str, str]):
        super().__init__(registry, labels)
        self.batches = self._counter(
            "jaxserve_kv_event_batches", "Published batches of KV cache events"
        )
        self.dropped = self._counter(
            "jaxserve_kv_events_dropped", "Steps whose KV cache events were dropped"
        )
        self.replays = self._counter(
            "jaxserve_kv_event_replays", "Requests for past KV cache events"
        )


FORMER_NAMES = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}
"""Former vLLM names of metrics, for older dashboards, routers and autoscalers."""

ROUTING = frozenset(
    {
        "jaxserve_ready",
        "vllm:cache_config_info",
        "vllm:gpu_cache_usage_perc",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_queries_total",
        "vllm:kv_cache_usage_perc",
        "vllm:lora_requests_info",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
    }
)
"""Metrics that the routers for vLLM read: llm-d, production-stack and smg."""
