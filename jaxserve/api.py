"""The contract between the HTTP side and the engine: plain types, no jax, no HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

MAX_LOGPROBS = 20
"""Alternatives that a request may ask for beside each sampled token (OpenAI's chat limit)."""

MAX_LOGIT_BIAS = 300
"""Entries of a request's logit_bias (OpenAI's limit)."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    GRAMMAR = "grammar"
    """Its grammar has met a limit: which token may be next is not known."""


class GuideError(NamedTuple):
    """Why a sequence cannot go on."""

    text: str
    finish: FinishReason = FinishReason.GRAMMAR
    """ERROR: its grammar is not what failed."""


class GuideState(Protocol):
    """Where a sequence stands in its grammar, and which tokens it may have next."""

    @property
    def ready(self) -> bool:
        """Whether `mask` is that of the next token: not until it is computed after `advance`."""
        ...

    @property
    def mask(self) -> bytes:
        """Bit i allows token i, the lowest bit first; what it does not reach is forbidden."""
        ...

    @property
    def following(self) -> bytes | None:
        """The mask of the token after the next one, where it is the same whatever the next one is:
        then a sequence need not wait for that. None where the next one decides."""
        ...

    @property
    def error(self) -> GuideError | None:
        """Why the sequence cannot go on, if it cannot."""
        ...

    def advance(self, token: int) -> None:
        """The sequence got this token, which the mask allowed. Returns at once."""
        ...

    def wait(self, timeout: float) -> bool:
        """Wait until it is ready, at most `timeout` seconds; whether it is."""
        ...


class Guide(Protocol):
    """A compiled grammar that sequences follow (structured output, forced tool calls)."""

    def start(self) -> GuideState:
        """At the beginning, ready."""
        ...


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next tokens of one sequence; every field already checked and resolved."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """With the position it fixes the random numbers of a token: 32 bits, drawn if not asked for."""
    stop_token_ids: frozenset[int] = frozenset()
    """End-of-sequence tokens included, unless the request ignores them."""
    min_tokens: int = 0
    """Stop tokens are not sampled before this many tokens."""
    presence_penalty: float = 0.0
    """Taken from the score of each token that was sampled already."""
    frequency_penalty: float = 0.0
    """Taken as often as it was sampled."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative scores of tokens in the prompt or the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number to add to its score); at most MAX_LOGIT_BIAS."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these are sampled; empty: all."""
    logprobs: int | None = None
    """None: not wanted; n: the sampled token's and those of the n most likely (n <= 20)."""
    prompt_logprobs: int | None = None
    """The same of each prompt token but the first; the prompt is computed as a whole for it."""
    guide: Guide | None = None
    """What the output must look like. Its end tokens must be among the stop tokens."""

    @property
    def penalised(self) -> bool:
        """Whether what was read and sampled before changes the scores."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to generate. A request for n choices is n of these."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    """Lower goes first, where the scheduler's policy looks at it."""
    cache_salt: str = ""
    """Sequences share prefixes only with those of the same salt."""
    ttft_slo: float | None = None
    """Seconds from arrival in which the first token must come to be of use; None: any time."""
    e2e_slo: float | None = None
    """Seconds from arrival in which the whole answer must be there to be of use; None: any time."""
    tenant: str = ""
    """Who is served no more than the others, where the policy is fair."""


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities at one output position, before temperature and truncation."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first."""


class PromptLogprobs(NamedTuple):
    """Of one token of a prompt, given those before it."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first."""


class Start(NamedTuple):
    """How a sequence came to its first token, in seconds."""

    queued: float
    """From the engine's receipt of the request to its admission."""
    prefill: float
    """From admission until the first token was on the host."""
    on_host: float
    """`time.perf_counter()` when it was."""


class TokenEvent(NamedTuple):
    """One step of one sequence, as the engine reports it.

    `token` is None only on an ending without a token (abort, error, grammar). A stop token is
    reported as the token of the event that finishes with STOP; it is counted in usage and not
    shown.
    """

    request_id: str
    token: int | None
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; set on the first event."""
    prompt_logprobs: tuple[PromptLogprobs, ...] | None = None
    """Of the prompt's tokens but the first, if they were asked for; set on the first event."""
    start: Start | None = None
    """Set on the event of the first token."""
    preemptions: int = 0
    """How often the sequence was preempted; set on an event that ends it with a token."""


class Rejected(ValueError):
    """A request that can never be served here; the message states the numbers (HTTP 400)."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(RuntimeError):
    """The queue is full or the engine is not accepting work (HTTP 429/503)."""

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds."""


class DeadlineMissed(Overloaded):
    """The first token cannot come before the request's deadline (HTTP 503)."""


class EngineFailed(RuntimeError):
    """The engine thread died; nothing more will be generated."""


class ReaderTooSlow(EngineFailed):
    """So much of an answer waited for its reader that it was given up (HTTP 408)."""


class EngineLimits(NamedTuple):
    """What the HTTP side needs to know to validate a request."""

    max_model_len: int
    vocab_size: int
    """Token ids a prompt may hold are below this."""
    sampled_vocab: int | None = None
    """Token ids that can be sampled are below this; None: all."""


class EngineStatus(NamedTuple):
    """A snapshot for health, load and metrics."""

    ready: bool
    """Weights are loaded and every bucket is compiled."""
    phase: str
    """starting | loading | compiling | serving | draining | failed"""
    progress: float
    """Of the start-up, 0 to 1."""
    running: int
    waiting: int
    free_pages: int
    total_pages: int
    last_step_age: float
    """Seconds since the engine thread last finished a step or was idle."""
    error: str | None = None


@runtime_checkable
class Engine(Protocol):
    """What the HTTP side sees of the engine. All calls are made on the event loop's thread."""

    @property
    def limits(self) -> EngineLimits: ...

    def status(self) -> EngineStatus: ...

    def generate(self, request: Request) -> AsyncGenerator[list[TokenEvent]]:
        """Submit and stream: all events since the last ones, of one step unless the caller was
        late. The iterator ends after the event whose `finish` is set.

        Closing it early (`aclose`) aborts the sequence and frees its pages at once.
        Raises, on the first step: Rejected, Overloaded, EngineFailed.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Prefixes computed so far are not found any more; running sequences keep theirs."""
        ...
