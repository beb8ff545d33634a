"""Settings: frozen, checked where they are made, passed down; no environment reads, no I/O."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxserve_kernels.kv_format_names import KV_FORMATS


class ConfigError(ValueError):
    """A setting or a model configuration that cannot work; the message says what to change."""


KV_CACHE_DTYPES = tuple(KV_FORMATS)
"""Names of the KV formats."""


@dataclass(frozen=True, kw_only=True)
class PagedGroup:
    """The pages of one cache group (`ModelSpec.cache_groups`).

    Page 0 is the padding page: written by padding, never given out.
    """

    num_pages: int
    window: int | None = None
    """Keys that a query sees, its own among them; None: all. Pages wholly behind it are freed."""

    def __post_init__(self) -> None:
        if self.num_pages < 2:
            raise ConfigError(f"the KV cache needs at least 2 pages, got {self.num_pages}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"a window must be at least 1, got {self.window}")

    @property
    def usable_pages(self) -> int:
        return self.num_pages - 1

    def pages_of(self, tokens: int, page_size: int, step_tokens: int = 1) -> int:
        """Returns the most pages that a sequence of `tokens` tokens holds at a time.

        Args:
          step_tokens: positions that one step may compute.
        """
        pages = -(-tokens // page_size)
        if self.window is None:
            return pages
        seen = self.window - 1 + step_tokens  # they may begin at the end of a page
        return min(pages, -(-(seen - 1) // page_size) + 1)

    def longest(self, page_size: int) -> int:
        """Returns the most tokens that a sequence with all pages may have computed."""
        if self.window is not None and self.usable_pages >= self.pages_of(sys.maxsize, page_size):
            return sys.maxsize
        return self.usable_pages * page_size


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache: groups of layers, each with pages of its own. All pages have the same
    number of tokens, and a sequence has a page table for each group."""

    num_pages: int
    """Of the first group."""
    window: int | None = None
    """Of the first group, see `PagedGroup.window`."""
    further: tuple[PagedGroup, ...] = ()
    """The groups after the first, in the order of `ModelSpec.cache_groups`."""
    page_size: int = 16
    identity: str = ""
    """What keys and values depend on beside tokens and positions: the model and their format."""
    own_tokens: int = 0
    """At its beginning, in whole pages, that each sequence computes itself, found in the prefix
    cache or not: the format keeps them for each slot as well."""
    snapshots: int = 0
    """Of the state of recurrent layers at ends of pages, without which a model that has some finds
    no prefix."""
    snapshot_stride: int = 1024
    """Tokens of a prompt between two of them, in whole pages and blocks."""
    state_block: int = 1
    """Tokens of a prompt that recurrent layers compute at once, from each multiple on. A power of
    two; 1 without such layers."""

    def __post_init__(self) -> None:
        _ = self.groups  # checks them
        if self.snapshots and self.snapshot_stride % max(self.page_size, self.state_block):
            raise ConfigError(
                f"snapshots every {self.snapshot_stride} tokens are not at ends of pages of "
                f"{self.page_size} tokens and of blocks of {self.state_block}"
            )
        if self.snapshots and self.own_tokens % self.state_block:
            raise ConfigError(
                f"the {self.own_tokens} tokens that a slot keeps for itself are no whole blocks of "
                f"{self.state_block}"
            )
        if self.state_block > self.page_size and any(each.window for each in self.groups):
            raise ConfigError(
                f"pages of {self.page_size} tokens in groups with a window do not hold blocks of "
                f"{self.state_block}"
            )
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}")

    @cached_property
    def groups(self) -> tuple[PagedGroup, ...]:
        """All groups, at least one."""
        return (PagedGroup(num_pages=self.num_pages, window=self.window), *self.further)

    @property
    def usable_pages(self) -> int:
        """Pages of the first group that sequences may hold."""
        return self.num_pages - 1

    @property
    def usable_tokens(self) -> int:
        """Tokens that the cache holds for all sequences together. Groups with a window count only
        if there are no others: of long sequences they hold a part."""
        full = [group for group in self.groups if group.window is None]
        return min(group.usable_pages for group in full or self.groups) * self.page_size

    @property
    def longest(self) -> int:
        """The most tokens that one sequence may have computed."""
        return min(group.longest(self.page_size) for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class HostTierConfig:
    """A tier of the prefix cache in the host's memory, which takes what the device evicts."""

    slots: int
    """Pages that it holds, of any group."""
    page_bytes: tuple[int, ...]
    """Of each cache group; then of a piece of recurrent state, if there are some."""
    state_pieces: int = 0
    """Of a snapshot of recurrent state, which move as pages of one more group."""
    store_ring: int
    """Pages of each group that may be on their way to the host, see `plan.PageMoves`."""
    load_ring: int
    """The same for pages that come back."""
    lookahead: int
    """Free pages of each group, of those that are allocated next, that the host should have before
    that: one long prompt evicts more at once than the store ring holds."""
    expected_rate: float = 2e10
    """Bytes per second of loads, until they have been measured."""
    expected_disk_rate: float = 2e9
    """The same from disk into the host's memory."""

    def __post_init__(self) -> None:
        for name in ("slots", "store_ring", "load_ring"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


POLICIES = ("fcfs", "priority", "slo")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of one sequence."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_queued: int = 1024
    prefix_caching: bool = True
    """Sequences share the pages of equal prefixes."""
    policy: str = "fcfs"
    """One of POLICIES."""
    ttft_slo: float | None = None
    """Seconds to the first token that requests without a deadline of their own have, if any."""
    max_itl: float = 0.05
    """Seconds that a step with a prefill chunk may take while sequences decode."""
    max_chunk_context: int | None = None
    """Tokens, in whole pages, that the chunks of one step may see together; None: any number."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "max_queued"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes in a step"
            )
        if self.policy not in POLICIES:
            raise ConfigError(f"the scheduling policy is {self.policy!r}, known: {POLICIES}")
        if self.max_itl <= 0:
            raise ConfigError(f"max_itl must be positive, got {self.max_itl} seconds")
        if self.max_chunk_context is not None and self.max_chunk_context < self.max_model_len:
            raise ConfigError(
                f"max_chunk_context ({self.max_chunk_context}) must be at least max_model_len "
                f"({self.max_model_len}): otherwise a long prompt would wait for ever"
            )


VERIFY_POSITIONS = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Static shapes that are compiled: rows of a decode step, tokens of a mixed step, and rows and
    positions per row of a verify step (`jaxserve.plan`)."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    verify: tuple[tuple[int, int], ...] = ()
    """The positions are among VERIFY_POSITIONS. None: no plan verifies, and steps carry nothing
    for it."""

    def __post_init__(self) -> None:
        for name, sizes in (("decode", self.decode), ("prefill", self.prefill)):
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ConfigError(f"{name} buckets must be increasing and positive, got {sizes}")
        for rows, positions in self.verify:
            if rows < 1 or positions not in VERIFY_POSITIONS:
                raise ConfigError(
                    f"verify buckets are pairs of rows and {VERIFY_POSITIONS} positions, "
                    f"got {(rows, positions)}"
                )
        if len(set(self.verify)) < len(self.verify):
            raise ConfigError(f"verify buckets must differ, got {self.verify}")


def number(config: Mapping[str, Any], key: str, default: float, file: str = "config.json") -> float:
    """`default` where the file has none, or null. ConfigError: it has something else, infinity and
    NaN included, which JSON of Python's has."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise ConfigError(f"{file}: {key} is {value!r}, which is not a number")
    if value is None:
        return default
    if not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{file}: {key} is {value!r:.40}, which is not a finite number")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What an unset sampling field means for this model (`generation_config.json`)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def from_hf(cls, generation: Mapping[str, Any]) -> SamplingDefaults:
        """Read a `generation_config.json`; `do_sample: false` means greedy.

        ConfigError: a value that is no number, or that a request could not have.
        """
        if generation.get("do_sample") is False:
            return cls(temperature=0.0)
        file = "generation_config.json"
        temperature = number(generation, "temperature", 1.0, file)
        top_p, top_k = number(generation, "top_p", 1.0, file), number(generation, "top_k", 0, file)
        for name, value, allowed in (
            ("temperature", temperature, 0 <= temperature < math.inf),
            ("top_p", top_p, 0 < top_p <= 1),
            ("top_k", top_k, -1 <= top_k < 2**31),
        ):
            if not allowed:
                raise ConfigError(f"{file}: {name} is {value:g}, which no request may have")
        return cls(temperature=temperature, top_p=top_p, top_k=int(top_k))


HEALTH_MEANINGS = ("ready", "live")
REASONING_FIELDS = ("both", "reasoning", "reasoning_content")

NO_PARSER = "none"
TOOL_CALL_PARSERS = (
    *("hermes", "llama3_json", "mistral", "openai", "qwen3_coder", "qwen3_xml"),
    NO_PARSER,
)
REASONING_PARSERS = ("deepseek_r1", "mistral", "openai_gptoss", "qwen3", NO_PARSER)
"""vLLM's names of formats, which are defined in `jaxserve.server.chat_formats`."""

TEMPLATE_VARIABLES = frozenset({"enable_thinking", "thinking", "preserve_thinking"})
"""Names that `chat_template_kwargs` may set."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    model_names: tuple[str, ...]
    """Names clients may use; the first one is reported."""
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    """A Unix domain socket to listen on instead."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    chat_template: str | None = None
    """Jinja for chats; None: the model's own."""
    template_variables: Mapping[str, Any] = MappingProxyType({})
    """`chat_template_kwargs` of chats that do not set them."""
    reasoning_field: str = "both"
    """Where chats have thoughts: one of REASONING_FIELDS."""
    architecture: str = ""
    """The model's class in `config.json`; empty: not known."""
    tool_call_parser: str | None = None
    """One of TOOL_CALL_PARSERS; None: found from the chat template or the architecture."""
    reasoning_parser: str | None = None
    """One of REASONING_PARSERS; None: found from the chat template or the tokenizer."""
    by_priority: bool = False
    """The scheduler's policy looks at priorities."""
    isolate_cache_by_key: bool = False
    """Prefixes and compiled grammars are shared only among requests with the same API key."""
    max_request_bytes: int = 16 * 1024 * 1024
    keep_alive_interval: float = 15.0
    """Seconds between SSE comments on a stream that waits for its next token."""
    stall_timeout: float = 120.0
    """Seconds without progress of the engine thread after which `/live` is 503."""
    health_means: str = "ready"
    """What 200 of `/health` says: one of HEALTH_MEANINGS."""
    api_key_digests: tuple[bytes, ...] = ()
    """SHA-256 of the keys that clients may use; none: no key is needed."""
    admin_key_digests: tuple[bytes, ...] = ()
    """SHA-256 of the keys of administrators; none: their routes do not exist."""
    open_metrics: bool = False
    """`/metrics` needs no key."""
    open_render: bool = False
    """The routes that render prompts need no key."""
    trust_gateway: bool = False
    """The tenant that a gateway names in a header is believed."""
    objectives: Mapping[str, int] = MappingProxyType({})
    """Priorities of inference objectives by name, higher first as in llm-d."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that browsers let use the server; `*`: all."""
    max_queued_tokens: int | None = None
    """Prompt tokens that may wait for their first output token before 429; None: any number."""
    request_timeout: float | None = None
    """Seconds from a request's arrival until it is given up; None: as long as it takes."""
    max_queue_time: float | None = None
    """Seconds from a request's arrival until its first token must be there; None: any time."""
    force_include_usage: bool = False
    """Every stream of chats and completions ends with usage, asked for or not."""
    root_path: str = ""
    """A path that the routes stand under, too, for a proxy that does not take it away."""
    ui: bool = True
    """The pages at `/` and `/ui/engine` are served."""
    header_timeout: float = 75.0
    """Seconds that a connection may wait for the whole header of its next request."""
    write_timeout: float = 60.0
    """Seconds in which a client has to take a part of what is written to it."""
    body_timeout: float = 60.0
    """Seconds that the body of a request may take to arrive."""
    response_store_bytes: int = 64 * 1024 * 1024
    """What responses that are kept for later requests may take; 0: none is kept."""
    reasoning_keys: tuple[str, ...] = field(default=(), repr=False)
    """They seal the thoughts that clients keep; none: one is made at the start."""
    kv_event_sources: Mapping[str, Any] = MappingProxyType({})
    """Where KV cache events are published, by data-parallel rank."""
    log_requests: bool = False
    """One log line per request that has ended."""
