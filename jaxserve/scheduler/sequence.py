"""One request inside the scheduler: its tokens, how far they are computed and what it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxserve.api import GuideState, PromptLogprobs, Request, SamplingParams
from jaxserve.scheduler.prefix import page_hashes

NO_SLOT = -1


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Mutable, owned by the scheduler.

    `computed <= len(tokens) + in_flight <= limit`. A waiting sequence has no slot, no pages and
    nothing computed; after a preemption it may still have samples in flight.
    """

    id: int
    """Its number in order of arrival; never reused."""
    request_id: str
    params: SamplingParams
    tokens: list[int]
    """The prompt and every output token that the host knows."""
    num_prompt: int
    limit: int
    """It ends when it has this many tokens."""
    stops: frozenset[int]
    """Tokens that end it."""
    stops_from: int
    """They do from this many tokens on."""
    wants_logprobs: bool
    guide: GuideState | None
    """It computes the token after the mask of the next one is known: not one step ahead."""
    level: int
    """Of priority, where it counts; lower goes first."""
    tenant: str
    uncached: int
    """Tokens of the prompt that were not in the prefix cache when it came, at least 1."""
    first_by: float
    """Deadline of its first token; infinite if there is none, like the next."""
    ended_by: float
    """Deadline of its last token."""
    rank: tuple[float, int]
    """Lower is served first; all ranks differ."""
    root: bytes
    """What the hashes of its pages begin with."""
    arrived: float
    """On the scheduler's clock, in seconds, like `admitted`."""
    admitted: float = -1.0
    """When it was given a slot for the first time; negative before."""
    cached: int = 0
    """Tokens of the prompt that it did not have to compute when it was first admitted."""
    hashes: list[bytes] = field(default_factory=list[bytes])
    """Of its first full pages, as far as they were needed."""
    published: int = 0
    """Its first pages that others can find, or find equal ones of."""
    shared: int = 0
    """Its first pages that were there already when it was admitted."""
    slot: int = NO_SLOT
    pages: list[int] = field(default_factory=list[int])
    computed: int = 0
    """Positions whose keys and values the plans made so far compute, or that were there."""
    skip_from: int = 0
    """When so many are computed, those up to `skip_to` are there already. Both 0: none."""
    skip_to: int = 0
    preemptions: int = 0
    """How often it gave its pages back and computed again."""
    in_flight: int = 0
    """Output tokens that plans made so far will sample and that are not committed."""
    scored: int = 0
    """Positions of the prompt whose next token's probability was planned to be computed."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list[PromptLogprobs])
    """Until its first event."""
    plain_until: int = 0
    """What makes it shorter than this is one more token and nothing else, if it is no stop token:
    neither its first nor its last, no full page, nothing that a grammar or alternatives need."""
    prompt_read: int = 0
    """Tokens of the prompt that committed steps have computed, or that were there. Not less after
    a preemption."""
    prefill_end: int = 0
    """The tokens known at admission; below it the sequence computes known tokens in chunks."""

    @classmethod
    def of(
        cls,
        request: Request,
        *,
        seq_id: int,
        limit: int,
        level: int,
        root: bytes,
        now: float,
        ttft_slo: float | None,
    ) -> Sequence:
        """`limit` is what model and cache allow; `max_tokens` may lower it."""
        num_prompt = len(request.prompt)
        return cls(
            id=seq_id,
            request_id=request.id,
            params=request.params,
            tokens=list(request.prompt),
            num_prompt=num_prompt,
            limit=min(limit, num_prompt + request.params.max_tokens),
            stops=request.params.stop_token_ids,
            wants_logprobs=request.params.logprobs is not None,
            stops_from=num_prompt + request.params.min_tokens,
            guide=request.params.guide.start() if request.params.guide else None,
            level=level,
            tenant=request.tenant,
            uncached=num_prompt,
            first_by=math.inf if ttft_slo is None else now + ttft_slo,
            ended_by=math.inf if request.e2e_slo is None else now + request.e2e_slo,
            rank=(0.0, seq_id),
            root=root,
            arrived=now,
        )

    @property
    def running(self) -> bool:
        return self.slot != NO_SLOT

    @property
    def to_prefill(self) -> int:
        """Known tokens that it has still to compute."""
        return self.prefill_end - self.computed - (self.skip_to - self.skip_from)

    @property
    def guided_to_wait(self) -> bool:
        """Whether what it may generate next is not known yet."""
        guide = self.guide
        if guide is None:
            return False
        if not guide.ready or self.in_flight > 1:
            return True
        return self.in_flight == 1 and guide.following is None

    @property
    def mask(self) -> bytes | None:
        """Of the next token that a step samples, at most one is in flight."""
        guide = self.guide
        if guide is None:
            return None
        return guide.following if self.in_flight else guide.mask

    def read_up_to(self, end: int) -> int:
        """A committed step computed it so far; returns how many tokens of the prompt are new."""
        new = max(0, min(end, self.num_prompt) - self.prompt_read)
        self.prompt_read += new
        return new

    @property
    def most_cached(self) -> int:
        """Tokens at its beginning that it need not compute if they are in the prefix cache."""
        most = len(self.tokens) - 1
        return most if self.params.prompt_logprobs is None else min(most, self.scored)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def most_generated(self) -> int:
        """What `max_tokens`, the model and the cache allow."""
        return self.limit - self.num_prompt

    def page_hashes(self, count: int, page_size: int) -> list[bytes]:
        """Of its first `count` pages, which known tokens fill."""
        done = len(self.hashes)
        if count > done:
            parent = self.hashes[-1] if done else self.root
            tokens = self.tokens[done * page_size : count * page_size]
            self.hashes += page_hashes(parent, tokens, page_size)
        return self.hashes[:count]

    def check(self, page_size: int) -> None:
        """AssertionError if its own numbers contradict each other."""
        assert self.in_flight >= 0
        assert self.num_prompt <= len(self.tokens) < self.limit, f"{self.request_id} should be over"
        assert len(self.tokens) + self.in_flight <= self.limit
        assert self.computed <= len(self.tokens) + self.in_flight
        if not self.running:
            assert not self.pages and self.computed == 0, f"{self.request_id} waits but holds pages"
        elif self.computed < self.prefill_end:
            assert self.in_flight == 0 and self.prefill_end == len(self.tokens)
        else:
            assert self.computed == len(self.tokens) + self.in_flight - 1
        assert self.computed <= len(self.pages) * page_size
        assert len(set(self.pages)) == len(self.pages)
        assert self.published <= len(self.pages)
        there = max(self.computed, self.skip_to)
        assert self.published * page_size <= min(there, len(self.tokens))
        assert self.computed < self.skip_from < self.skip_to or self.skip_from == self.skip_to == 0
