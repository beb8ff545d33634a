"""The contract between the HTTP server and the engine: plain types without jax or HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

from jaxserve.views import Occupancy, StepView

MAX_LOGPROBS = 20
"""The most alternatives per token that a request may ask for (OpenAI's chat limit)."""

MAX_LOGIT_BIAS = 300
"""The most entries of a request's logit_bias (OpenAI's limit)."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    GRAMMAR = "grammar"
    """The grammar met a limit, so the next mask is unknown."""


class GuideError(NamedTuple):
    """Why a sequence with a grammar cannot continue."""

    text: str
    finish: FinishReason = FinishReason.GRAMMAR
    """ERROR if something other than the grammar failed."""


class Ahead(NamedTuple):
    """Drafts of a guided sequence's next tokens, and the masks after each of them."""

    drafts: tuple[int, ...] = ()
    forced: int = 0
    """This many first drafts are forced: at their positions the grammar allows no other token."""
    masks: tuple[bytes, ...] = ()
    """For each draft, the mask of the token after it."""


class GuideState(Protocol):
    """A sequence's position in its grammar, and the tokens allowed next."""

    @property
    def ready(self) -> bool:
        """Whether `mask` is that of the next token. False after `advance` until it is computed."""
        ...

    @property
    def mask(self) -> bytes:
        """Bit i allows token i, the lowest bit first. Tokens beyond its end are forbidden."""
        ...

    @property
    def following(self) -> bytes | None:
        """The mask of the token after the next one, if it does not depend on the next one. Then the
        sequence need not wait for the next token. None if it depends."""
        ...

    @property
    def error(self) -> GuideError | None:
        """Why the sequence cannot continue; None if it can."""
        ...

    @property
    def ahead(self) -> Ahead:
        """The drafts after the reported tokens, up to the requested number. Valid whenever `mask`
        is."""
        ...

    def advance(self, *tokens: int, drafts: Sequence[int] = (), most: int = 0) -> None:
        """Reports the sequence's next tokens, which the masks allowed. Returns at once.

        Args:
          drafts: guesses of the following tokens. The grammar need not allow them.
          most: the most drafts in `ahead`. Forced drafts need no guess.
        """
        ...

    def wait(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds until the mask is ready. Returns whether it is."""
        ...


class Guide(Protocol):
    """A compiled grammar that sequences follow (structured output, forced tool calls)."""

    def start(self) -> GuideState:
        """Returns the state at the beginning of the grammar, with its mask ready."""
        ...


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one sequence. All fields are validated and have no unset values."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """32 bits. Seed and position determine a token's random numbers. Drawn at random by default."""
    stop_token_ids: frozenset[int] = frozenset()
    """Includes the end-of-sequence tokens unless the request ignores them."""
    min_tokens: int = 0
    """Stop tokens are not sampled before this many output tokens."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was sampled before."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per earlier sample."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number added to its logit); at most MAX_LOGIT_BIAS entries."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these tokens are sampled; empty: all."""
    logprobs: int | None = None
    """n: report the sampled token's logprob and the n most likely (n <= 20). None: report none."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each prompt token but the first. Such a prompt uses no cached prefix."""
    guide: Guide | None = None
    """The grammar of the output. Its end tokens must be among the stop tokens."""

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to generate. A request for n choices is n of these."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    """Lower goes first, if the scheduler's policy uses priorities."""
    cache_salt: str = ""
    """Only sequences with the same salt share prefixes."""
    ttft_slo: float | None = None
    """Deadline of the first token in seconds from arrival; None: no deadline."""
    e2e_slo: float | None = None
    """Deadline of the whole answer in seconds from arrival; None: no deadline."""
    tenant: str = ""
    """The account that a fair policy serves as much as any other."""
    predicted: tuple[int, ...] = ()
    """The output that the client predicts, or parts of it. It changes no token, only the speed."""


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities of one output token, before temperature, top-k and top-p."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first."""


class PromptLogprobs(NamedTuple):
    """Log probability of one prompt token given the tokens before it."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first."""


class Start(NamedTuple):
    """Times up to a sequence's first token, in seconds."""

    queued: float
    """From the request's arrival in the engine to its admission."""
    prefill: float
    """From admission until the first token reached the host."""
    on_host: float
    """`time.perf_counter()` at that moment."""


class TokenEvent(NamedTuple):
    """One step of one sequence.

    `token` is None only if the sequence ends without a token (abort, error, grammar). The event
    that finishes with STOP carries the stop token, which counts in usage and is not shown.
    """

    request_id: str
    token: int | None
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; set on the first event."""
    prompt_logprobs: tuple[PromptLogprobs, ...] | None = None
    """For each prompt token but the first, if requested; set on the first event."""
    start: Start | None = None
    """Set on the event with the first token."""
    preemptions: int = 0
    """Number of preemptions; set on the event that ends the sequence with a token."""
    weights: int = 0
    """The version of the weights that computed the token; see WeightState."""
    restored_tokens: int = 0
    """The part of `cached_tokens` that was loaded from lower tiers for this sequence."""


class Rejected(ValueError):
    """The engine can never serve the request. The message has the numbers (HTTP 400)."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(RuntimeError):
    """The queue is full or the engine does not accept requests now (HTTP 429 or 503)."""

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which the client may retry."""


class DeadlineMissed(Overloaded):
    """The first token cannot arrive before the request's deadline (HTTP 503)."""


class EngineFailed(RuntimeError):
    """The engine thread died. It generates no more tokens."""


class ReaderTooSlow(EngineFailed):
    """The client did not read its answer, so the answer was dropped (HTTP 408)."""


class EngineLimits(NamedTuple):
    """Limits that the HTTP server needs to validate a request."""

    max_model_len: int
    vocab_size: int
    """Token ids of a prompt must be below this."""
    sampled_vocab: int | None = None
    """Only token ids below this are sampled; None: all."""


class EngineStatus(NamedTuple):
    """A snapshot for health, load and metrics."""

    ready: bool
    """Weights are loaded and every bucket is compiled."""
    phase: str
    """starting | loading | compiling | serving | draining | failed"""
    progress: float
    """Progress of the start-up, 0 to 1."""
    running: int
    waiting: int
    free_pages: int
    total_pages: int
    last_step_age: float
    """Seconds since the engine thread last finished a step or was idle."""
    error: str | None = None


class Running(StrEnum):
    """What happens to running sequences when the weights change."""

    DRAIN = "drain"
    """Running sequences end first, with the old weights. Waiting sequences keep waiting."""
    RESTART = "restart"
    """Running sequences are recomputed with the new weights and then continue."""
    CONTINUE = "continue"
    """Running sequences continue with the keys and values of the old weights."""


class WeightChange(NamedTuple):
    """The weights to load, and how to load them."""

    model: str
    """A folder, or any other value of --model."""
    step: int | None = None
    """Step of a folder of Orbax checkpoints; None: the newest complete one."""
    running: Running = Running.DRAIN
    in_place: bool = False
    """Stage the weights in host memory and replace the old ones array by array, for a device
    without room for both. No step runs during the copy."""


class WeightsChanged(NamedTuple):
    """The result of a change of weights."""

    version: int
    load_seconds: float
    """Seconds from the call until the new weights were loaded."""
    gap_seconds: float
    """Seconds in which no step ran."""


class WeightState(NamedTuple):
    """The served weights."""

    version: int
    """0 at start; each change adds 1."""
    model: str
    """The source of the weights."""
    paused: bool
    sleeping: bool


class WeightsRefused(ValueError):
    """The weights cannot be loaded or do not fit. The old ones are still served (HTTP 400)."""


@runtime_checkable
class Engine(Protocol):
    """The engine's interface for the HTTP server. Call it only on the event loop's thread."""

    @property
    def limits(self) -> EngineLimits: ...

    def status(self) -> EngineStatus:
        """Returns a snapshot. Any thread may call this, and `weights`."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[list[TokenEvent]]:
        """Submits a request and streams its events.

        Each item holds the events since the previous item: those of one step, or of several if the
        caller was slow. The iterator ends after the event whose `finish` is set. Closing it early
        (`aclose`) aborts the sequence and frees its pages at once.

        Raises:
          Rejected, Overloaded, EngineFailed: on the first step.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache. Running sequences keep their pages."""
        ...

    # For people who watch the engine. They cost the engine thread nothing.

    def steps_since(self, number: int) -> list[StepView]:
        """Returns the finished steps after step `number`: the newest few dozen at most."""
        ...

    def occupancy(self, max_pages: int) -> Occupancy | None:
        """Returns the state of at most `max_pages` pages, evenly spaced, and of the queue.
        None before the engine serves."""
        ...

    def bucket_seconds(self) -> Mapping[str, Mapping[int, float]]:
        """Returns the seconds of each bucket as measured at start, by kind and size; empty if they
        were not measured."""
        ...

    @property
    def weights(self) -> WeightState: ...

    async def change_weights(self, change: WeightChange) -> WeightsChanged:
        """Loads other weights of the same shapes, and serves them from some step on.

        Raises:
          WeightsRefused: nothing has changed.
          Overloaded, EngineFailed: the engine does not serve.
        """
        ...

    async def pause(self, *, finish: bool = False) -> None:
        """Runs no steps until `resume`. New requests are accepted and wait.

        Args:
          finish: let running sequences end first. Otherwise they stay as they are.
        """
        ...

    async def resume(self) -> None: ...

    async def sleep(self, *, drop_weights: bool = False) -> None:
        """Pauses and frees the KV cache. Running sequences will be recomputed. Dropped weights are
        loaded again when the engine wakes."""
        ...

    async def wake(self) -> None:
        """Undoes `sleep`. Raises WeightsRefused if dropped weights cannot be loaded again."""
        ...
