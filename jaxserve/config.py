"""Settings: frozen, checked at construction, and passed down. No environment reads, no I/O."""

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
    """A setting or a model configuration that cannot work. The message says what to change."""


KV_CACHE_DTYPES = tuple(KV_FORMATS)
"""Names of the KV formats."""


@dataclass(frozen=True, kw_only=True)
class PagedGroup:
    """The pages of one cache group (`ModelSpec.cache_groups`).

    Page 0 is the padding page. Padding writes to it, and it is never allocated.
    """

    num_pages: int
    window: int | None = None
    """Keys that a query sees, its own included; None: all keys. Pages entirely before the window
    are freed."""

    def __post_init__(self) -> None:
        if self.num_pages < 2:
            raise ConfigError(f"the KV cache needs at least 2 pages, got {self.num_pages}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"a window must be at least 1, got {self.window}")

    @property
    def usable_pages(self) -> int:
        return self.num_pages - 1

    def pages_of(self, tokens: int, page_size: int, step_tokens: int = 1) -> int:
        """Returns the most pages that a sequence of `tokens` tokens holds at one time.

        Args:
          step_tokens: the most positions that one step computes.
        """
        pages = -(-tokens // page_size)
        if self.window is None:
            return pages
        seen = self.window - 1 + step_tokens  # the first may be the last position of a page
        return min(pages, -(-(seen - 1) // page_size) + 1)

    def longest(self, page_size: int) -> int:
        """Returns the most tokens that a sequence may compute if it holds all pages."""
        if self.window is not None and self.usable_pages >= self.pages_of(sys.maxsize, page_size):
            return sys.maxsize
        return self.usable_pages * page_size


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. Layers form groups, and each group has its own pages. All pages hold the
    same number of tokens. A sequence has one page table per group."""

    num_pages: int
    """Pages of the first group."""
    window: int | None = None
    """The window of the first group, see `PagedGroup.window`."""
    further: tuple[PagedGroup, ...] = ()
    """The groups after the first, in the order of `ModelSpec.cache_groups`."""
    page_size: int = 16
    identity: str = ""
    """Names the model and the KV format: keys and values depend on both, besides tokens and
    positions."""
    own_tokens: int = 0
    """The first tokens of a sequence, in whole pages, that it always computes itself, even on a
    prefix cache hit. The KV format stores them per slot, outside the pages."""
    snapshots: int = 0
    """Snapshots of recurrent state that fit, each taken at the end of a page. A model with
    recurrent layers needs them for prefix cache hits."""
    snapshot_stride: int = 1024
    """Tokens of a prompt between two snapshots: a multiple of the page size and of
    `state_block`."""
    state_block: int = 1
    """Tokens of a prompt that recurrent layers compute together. Blocks begin at multiples of this
    number. It is a power of two; 1 without recurrent layers."""
    most_prompts: int = sys.maxsize
    """The most prompts that a step may advance. Recurrent layers need scratch memory for each."""

    def __post_init__(self) -> None:
        _ = self.groups  # constructing the groups checks them
        if self.snapshots and self.snapshot_stride % max(self.page_size, self.state_block):
            raise ConfigError(
                f"the snapshot stride of {self.snapshot_stride} tokens must be a multiple of the "
                f"page size ({self.page_size}) and of the state block ({self.state_block})"
            )
        if self.snapshots and self.own_tokens % self.state_block:
            raise ConfigError(
                f"the {self.own_tokens} tokens that each slot keeps for itself must be a multiple "
                f"of the state block ({self.state_block})"
            )
        if self.state_block > self.page_size and any(each.window for each in self.groups):
            raise ConfigError(
                f"in groups with a window, pages of {self.page_size} tokens must be at least as "
                f"large as the state block ({self.state_block})"
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
        """The tokens that the cache holds for all sequences together. Groups with a window count
        only if every group has one, because they hold only a part of a long sequence."""
        full = [group for group in self.groups if group.window is None]
        return min(group.usable_pages for group in full or self.groups) * self.page_size

    @property
    def longest(self) -> int:
        """The most tokens that one sequence may compute."""
        return min(group.longest(self.page_size) for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class HostTierConfig:
    """A tier of the prefix cache in host memory. It stores the pages that the device evicts."""

    slots: int
    """Pages that the tier holds, of any group."""
    page_bytes: tuple[int, ...]
    """Bytes of one page of each cache group; the last entry is a piece of recurrent state, if the
    model has recurrent layers."""
    state_pieces: int = 0
    """Pieces per snapshot of recurrent state. Pieces move like the pages of one more group."""
    store_ring: int
    """Pages of each group that can be in flight to the host, see `plan.PageMoves`."""
    load_ring: int
    """Pages of each group that can be in flight back to the device."""
    lookahead: int
    """The tier stores this many of the next free pages of each group before they are evicted. One
    long prompt evicts more pages at once than the store ring holds."""
    expected_rate: float = 2e10
    """Bytes per second from host to device, used until loads have been measured."""
    expected_disk_rate: float = 2e9
    """Bytes per second from disk to host memory, used until reads have been measured."""
    load_rate: float | None = None
    """The most bytes per second that loads take while other sequences run, on average; None: as
    fast as the link."""

    def __post_init__(self) -> None:
        if self.load_rate is not None and self.load_rate <= 0:
            raise ConfigError(f"load_rate must be positive, got {self.load_rate} bytes per second")
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
    """Sequences with equal prefixes share pages."""
    policy: str = "fcfs"
    """One of POLICIES."""
    ttft_slo: float | None = None
    """Default deadline of the first token in seconds, for requests that set none; None: no
    deadline."""
    max_itl: float = 0.05
    """Seconds that a step with a prefill chunk may take while sequences decode."""
    max_chunk_context: int | None = None
    """The most tokens, in whole pages, that all chunks of one step may attend to; None: no
    limit."""

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
    """The static shapes that are compiled: rows of decode steps, tokens of mixed steps, and (rows,
    positions per row) of verify steps. See `jaxserve.plan`."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    verify: tuple[tuple[int, int], ...] = ()
    """Positions are one of VERIFY_POSITIONS. Empty: steps never verify drafts, and their programs
    have no inputs for it."""

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
    """Returns the number at `key`, or `default` if the file lacks the key or has null.

    Raises:
      ConfigError: the value is not a finite number. Python's JSON parser accepts Infinity and NaN.
    """
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
    """Default sampling parameters of the model, from its `generation_config.json`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def from_hf(cls, generation: Mapping[str, Any]) -> SamplingDefaults:
        """Reads a `generation_config.json`. `do_sample: false` means greedy sampling.

        Raises:
          ConfigError: a value is not a number, or is outside the range that requests may use.
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
"""Formats by vLLM's names. `jaxserve.server.chat_formats` implements them."""

TEMPLATE_VARIABLES = frozenset({"enable_thinking", "thinking", "preserve_thinking"})
"""Variables that `chat_template_kwargs` may set."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server."""

    model_names: tuple[str, ...]
    """Model names that clients may use. Replies report the first one."""
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    """A Unix domain socket to listen on instead of host and port."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    chat_template: str | None = None
    """The Jinja chat template; None: the template of the model."""
    template_variables: Mapping[str, Any] = MappingProxyType({})
    """Default `chat_template_kwargs`."""
    reasoning_field: str = "both"
    """The field of chat replies that holds reasoning: one of REASONING_FIELDS."""
    architecture: str = ""
    """The model class in `config.json`; empty: unknown."""
    tool_call_parser: str | None = None
    """One of TOOL_CALL_PARSERS; None: choose by chat template or architecture."""
    reasoning_parser: str | None = None
    """One of REASONING_PARSERS; None: choose by chat template or tokenizer."""
    by_priority: bool = False
    """Whether the scheduling policy uses priorities."""
    isolate_cache_by_key: bool = False
    """Only requests with the same API key share prefixes and compiled grammars."""
    max_request_bytes: int = 16 * 1024 * 1024
    keep_alive_interval: float = 15.0
    """Seconds between SSE comments on a stream that is waiting for its next token."""
    stall_timeout: float = 120.0
    """`/live` answers 503 after this many seconds without progress of the engine thread."""
    health_means: str = "ready"
    """What status 200 of `/health` means: one of HEALTH_MEANINGS."""
    api_key_digests: tuple[bytes, ...] = ()
    """SHA-256 digests of the API keys that clients may use; empty: no key is needed."""
    admin_key_digests: tuple[bytes, ...] = ()
    """SHA-256 digests of the administrators' keys; empty: the admin routes do not exist."""
    open_metrics: bool = False
    """`/metrics` needs no key."""
    open_render: bool = False
    """The routes that render prompts need no key."""
    trust_gateway: bool = False
    """Trust the tenant that a gateway names in a header."""
    objectives: Mapping[str, int] = MappingProxyType({})
    """Priorities of inference objectives by name; higher goes first, as in llm-d."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server (CORS); `*`: all."""
    max_queued_tokens: int | None = None
    """Prompt tokens of requests without a first output token; above this, requests get 429. None:
    no limit."""
    request_timeout: float | None = None
    """Seconds from a request's arrival until it is cancelled; None: no limit."""
    max_queue_time: float | None = None
    """Seconds from a request's arrival by which its first token must exist; None: no limit."""
    force_include_usage: bool = False
    """Every stream of chats and completions ends with usage, even if the client did not ask."""
    root_path: str = ""
    """A path prefix that routes also accept, for a proxy that does not strip it."""
    ui: bool = True
    """The pages at `/` and `/ui/engine` are served."""
    header_timeout: float = 75.0
    """Seconds in which a connection must send the complete headers of its next request."""
    write_timeout: float = 60.0
    """Seconds in which a client must read some of the data written to it."""
    body_timeout: float = 60.0
    """Seconds in which the body of a request must arrive."""
    response_store_bytes: int = 64 * 1024 * 1024
    """The most bytes of stored responses; 0: none is stored."""
    reasoning_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys that encrypt the reasoning that clients store; empty: the server makes a key at
    start."""
    kv_event_sources: Mapping[str, Any] = MappingProxyType({})
    """Endpoints that publish KV cache events, by data-parallel rank."""
    log_requests: bool = False
    """Write one log line per finished request."""
