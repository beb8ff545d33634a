"""The metrics of server and engine: methods that report values, and their exposition."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxserve.api import EngineStatus, Start
from jaxserve.metrics.exposition import Histogram, Registry
from jaxserve.metrics.families import (
    FORMER_NAMES,
    EngineFamilies,
    EventFamilies,
    GrammarFamilies,
    RequestFamilies,
)
from jaxserve.metrics.tier import TierCounters, TierFigures, TierMetrics

MAX_IGNORED_NAMES = 64
"""The most ignored parameters that get their own series, because clients choose the names."""


class Distribution(NamedTuple):
    """The current state of a histogram."""

    bounds: tuple[float, ...]
    """Increasing upper bounds in seconds, the last one infinite."""
    counts: tuple[int, ...]
    """Observations up to each bound."""


class Figures(NamedTuple):
    """Totals since the start, for people who watch."""

    prompt_tokens: int
    generated_tokens: int
    looked_up: int
    """Prompt tokens looked up in the prefix cache."""
    found: int
    """Prompt tokens found in the prefix cache."""
    preemptions: int
    ttft: Distribution
    tpot: Distribution
    tier: TierFigures | None
    """Figures of the lower tiers; None without them."""


class StepSize(NamedTuple):
    """The compiled shape that a step ran in."""

    kind: str
    """`decode`, `mixed` or `verify`; empty before the first step."""
    bucket: int
    """Rows or tokens."""
    late: bool


class Metrics:
    """One registry per server. Every method except `next_tokens` is thread-safe."""

    def __init__(self, model_name: str, *, legacy: bool = True):
        """`legacy`: also export some metrics under vLLM's former names."""
        self._registry = Registry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._ignored_names: set[str] = set()
        self._requests = RequestFamilies(self._registry, self._labels)
        self._engine = EngineFamilies(self._registry, self._labels)
        self._grammar = GrammarFamilies(self._registry, self._labels)
        self._events = EventFamilies(self._registry, self._labels)
        self._tier: TierMetrics | None = None
        if legacy:
            for former, name in FORMER_NAMES.items():
                self._registry.also(former, name)
        self.last_step = StepSize("", 0, late=False)
        """Size of the last reported step."""
        self.page_size = 0
        """Tokens per page of the KV cache; 0 until it is planned."""

    def exposition(self, names: Collection[str] | None = None) -> bytes:
        """Returns metrics as text of type `exposition.CONTENT_TYPE`: all of them, or those with
        these family or series names. Takes well below a millisecond."""
        return self._registry.exposition(names)

    def tokens(self) -> tuple[int, int]:
        """Returns the prompt tokens and the generated tokens since the start."""
        return int(self._engine.prompt_tokens.value), int(self._engine.generation_tokens.value)

    def figures(self) -> Figures:
        """Returns totals since the start."""
        prompt, generated = self.tokens()
        return Figures(
            prompt_tokens=prompt,
            generated_tokens=generated,
            looked_up=int(self._requests.prefix_queries.value),
            found=int(self._requests.prefix_hits.value),
            preemptions=int(self._engine.preemptions.value),
            ttft=_distribution(self._requests.ttft),
            tpot=_distribution(self._requests.tpot),
            tier=self._tier and self._tier.figures(),
        )

    # Called by the server.

    def request_rejected(self, reason: str) -> None:
        """Counts an answer with status 4xx or 503 before any work. `reason`: one of REJECTIONS."""
        self._requests.rejected.labels(**self._labels, reason=reason).inc()

    def prompt_accepted(self, tokens: int, max_tokens: int) -> None:
        """Reports a finished sequence that the engine had accepted."""
        self._requests.prompt_sizes.observe(tokens)
        self._requests.max_tokens.observe(max_tokens)

    def first_token(
        self, seconds: float, prompt_tokens: int, cached_tokens: int, restored_tokens: int = 0
    ) -> None:
        """Reports a first token: seconds since the request's arrival, and tokens of the prompt.
        `restored_tokens` of the cached tokens came from lower tiers."""
        self._requests.ttft.observe(seconds)
        self._requests.cached_tokens.inc(cached_tokens)
        self._requests.prefix_queries.inc(prompt_tokens)
        self._requests.prefix_hits.inc(cached_tokens)
        self._requests.local_compute.inc(prompt_tokens - cached_tokens)
        self._requests.local_hits.inc(cached_tokens - restored_tokens)
        self._requests.restored.inc(restored_tokens)
        self._requests.prefix_requests.labels(
            **self._labels, hit=str(cached_tokens > 0).lower()
        ).inc()
        self._requests.computed.observe(prompt_tokens - cached_tokens)

    def next_tokens(self, seconds: float, count: int) -> None:
        """Reports `count` tokens that arrived together, `seconds` after the previous token. Tokens
        after the first of them count as 0 s.

        Call it only on the event loop's thread.
        """
        if count:
            self._requests.itl.observe(seconds)
        if count > 1:
            self._requests.itl.observe(0.0, count - 1)

    def sequence_computed(self, prefill: float, decode: float, generated_tokens: int) -> None:
        """Reports a finished sequence with a first token: seconds before and after that token."""
        self._requests.decode_time.observe(decode)
        self._requests.inference_time.observe(prefill + decode)
        if generated_tokens > 1:
            self._requests.tpot.observe(decode / (generated_tokens - 1))

    def request_choices(self, n: int) -> None:
        """Reports the number of choices of a request."""
        self._requests.choices.observe(n)

    def request_generated(self, most_tokens: int) -> None:
        """Reports the number of tokens in a request's longest choice."""
        self._requests.longest.observe(most_tokens)

    def sequence_finished(self, reason: str, generated_tokens: int, seconds: float) -> None:
        """Reports a finished sequence. `reason`: one of FINISH_REASONS. A client that disconnected
        counts as an abort."""
        self._requests.finished.labels(**self._labels, finished_reason=reason).inc()
        self._requests.generation_sizes.observe(generated_tokens)
        self._requests.e2e.observe(seconds)

    def observe_answers(self, count: int) -> None:
        """Reports the number of requests whose answers are not completely sent."""
        self._requests.open_answers.set(count)

    def parameter_ignored(self, name: str) -> None:
        """Counts a request field without effect. After MAX_IGNORED_NAMES names, further names count
        as `other`."""
        if len(self._ignored_names) < MAX_IGNORED_NAMES:
            self._ignored_names.add(name)
        shown = name if name in self._ignored_names else "other"
        self._requests.ignored.labels(param=shown).inc()

    # Called by structured output.

    def observe_grammar_queue(self, seconds: float) -> None:
        """Reports the seconds that a grammar waited to be compiled."""
        self._grammar.queue_time.observe(seconds)

    def observe_grammar_compile(self, seconds: float) -> None:
        """Reports the seconds of a grammar's compilation, also if it failed."""
        self._grammar.compile_time.observe(seconds)

    def set_grammars(self, count: int) -> None:
        """Reports the number of compiled grammars."""
        self._grammar.processes.set(count)

    def count_grammar_limit(self, cause: str) -> None:
        """Counts a grammar process that ended at a limit. `cause`: one of GRAMMAR_LIMITS."""
        self._grammar.limits.labels(cause=cause).inc()

    def count_grammar_server_restart(self) -> None:
        """Counts a restart of the server that forks grammar processes."""
        self._grammar.restarts.inc()

    # Called by the engine.

    def observe_load(self, status: EngineStatus, *, ready: bool) -> None:
        """Updates gauges before a scrape. `ready`: whether `/ready` answers 200."""
        self._engine.ready.set(ready)
        if self._tier is not None:
            self._tier.refresh()
        used = status.total_pages - status.free_pages
        kv_usage = used / status.total_pages if status.total_pages else 0.0
        self._engine.running.set(status.running)
        self._engine.waiting.set(status.waiting)
        self._engine.waiting_for_room.set(status.waiting)
        self._engine.kv_usage.set(kv_usage)

    # Called by the engine.

    def count_tokens(self, prompt: int, generated: int) -> None:
        """Counts a step's tokens. A prompt token counts once, even if it is computed again."""
        self._engine.prompt_tokens.inc(prompt)
        self._engine.generation_tokens.inc(generated)

    def observe_step(
        self, kind: str, bucket: str, seconds: float, used: int, padded: int, late: bool
    ) -> None:
        """Reports a step.

        Args:
          kind, bucket: name the bucket, for example `decode` and `8`.
          used, padded: computed rows or tokens, and the size of the bucket.
          late: whether the step was launched after the previous one had ended.
        """
        self.last_step = StepSize(kind, padded, late)
        self._engine.steps.labels(kind=kind, bucket=bucket).observe(seconds)
        self._engine.padding.labels(kind=kind).observe(1.0 - used / padded)
        self._engine.step_tokens.observe(used)
        if late:
            self._engine.late_steps.labels(kind=kind).inc()

    def observe_correction(self, kind: str, bucket: str, seconds: float) -> None:
        """Reports the difference between a bucket's measured and planned step time."""
        self._engine.corrections.labels(kind=kind, bucket=bucket).set(seconds)

    def count_drafts(self, rows: int, drafts: int, accepted: Sequence[int]) -> None:
        """Counts rows that verified drafts, their drafts, and the accepted drafts by position in
        the row."""
        self._engine.draft_rows.inc(rows)
        self._engine.draft_tokens.inc(drafts)
        self._engine.accepted_tokens.inc(sum(accepted))
        for place, count in enumerate(accepted):
            self._engine.accepted_at.labels(**self._labels, position=str(place)).inc(count)

    def count_compile(self, phase: str) -> None:
        """Counts a compilation. `phase`: one of COMPILE_PHASES. A compilation while serving is a
        bug."""
        self._engine.compiles.labels(phase=phase).inc()

    def count_error(self) -> None:
        """Counts a sequence that ended with an error: its step failed, its logits were NaN, or its
        mask could not be computed."""
        self._engine.errors.inc()

    def count_shed(self) -> None:
        """Counts a waiting sequence whose deadline could not be met."""
        self._engine.shed.inc()

    def count_preemption(self) -> None:
        """Counts a sequence that gave its pages back."""
        self._engine.preemptions.inc()

    def observe_preemptions(self, times: int) -> None:
        """Reports the number of preemptions of a finished sequence."""
        self._engine.preemptions_each.observe(times)

    # Called by the publisher of KV cache events.

    def count_kv_event_batch(self) -> None:
        """Counts a published batch of KV cache events."""
        self._events.batches.inc()

    def count_dropped_kv_events(self) -> None:
        """Counts a step whose KV cache events were dropped."""
        self._events.dropped.inc()

    def count_kv_event_replay(self) -> None:
        """Counts a request for past KV cache events."""
        self._events.replays.inc()

    def observe_tokenizing(self, seconds: float) -> None:
        """Reports the seconds of rendering and encoding a request's prompts."""
        self._requests.tokenize_time.observe(seconds)

    def observe_first_write(self, seconds: float) -> None:
        """Reports the seconds from a stream's first token on the host to its write to the
        socket."""
        self._requests.first_write_time.observe(seconds)

    def observe_start(self, start: Start) -> None:
        """Reports a sequence's first token."""
        self._engine.queue_time.observe(start.queued)
        self._engine.prefill_time.observe(start.prefill)

    def open_tier(self, counters: TierCounters, *, num_bytes: int, slot_bytes: int) -> TierMetrics:
        """Adds and returns the metrics of the lower tiers."""
        self._tier = TierMetrics(
            self._registry,
            self._labels,
            counters=counters,
            num_bytes=num_bytes,
            slot_bytes=slot_bytes,
        )
        return self._tier

    def set_cache_info(self, *, page_size: int, num_pages: int) -> None:
        """Reports tokens per page and pages of the KV cache."""
        self.page_size = page_size
        info = self._registry.gauge(
            "vllm:cache_config_info",
            "Geometry of the KV cache; the value is 1",
            [*self._labels, "block_size", "num_gpu_blocks"],
        )
        info.labels(**self._labels, block_size=str(page_size), num_gpu_blocks=str(num_pages)).set(1)

    def set_weights(self, version: int) -> None:
        """Reports the version of the served weights."""
        self._engine.weights.set(version)

    def set_memory(self, kind: str, num_bytes: int) -> None:
        """Sets planned device memory. `kind`: weights, kv, state, temporaries, free."""
        self._engine.memory.labels(kind=kind).set(num_bytes)

    def set_fast_path(self, feature: str, *, on: bool) -> None:
        """Sets whether a fast path of GPU steps is on. Some installations lack one."""
        self._engine.fast_paths.labels(feature=feature).set(on)

    def set_fallback(self, operation: str) -> None:
        """Reports that a kernel of the operation did not compile for this GPU and that a slower
        implementation runs instead."""
        self._engine.fallbacks.labels(operation=operation).set(1)

    def set_startup(self, phase: str, seconds: float) -> None:
        """Reports the seconds of a start-up phase. `total` is from process start to ready."""
        self._engine.startup.labels(phase=phase).set(seconds)


def _distribution(histogram: Histogram) -> Distribution:
    counts, _ = histogram.state()
    return Distribution((*histogram.bounds, math.inf), tuple(counts))
