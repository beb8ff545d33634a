"""One request in the scheduler: its tokens, its progress, its slot and pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxserve.api import GuideState, PromptLogprobs, Request, SamplingParams
from jaxserve.scheduler.prefix import page_hashes
from jaxserve.scheduler.speculation.own_text import OwnText

NO_SLOT = -1


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Mutable state of a request; owned by the scheduler.

    Invariant: `computed <= len(tokens) + in_flight <= limit`. A waiting sequence has no slot, no
    pages and no computed tokens. After a preemption it may still have sampled tokens in flight.
    """

    id: int
    """A number in order of arrival; never reused."""
    request_id: str
    params: SamplingParams
    tokens: list[int]
    """The prompt and all output tokens that the host knows."""
    num_prompt: int
    limit: int
    """The sequence ends when it has this many tokens."""
    stops: frozenset[int]
    """Stop tokens."""
    stops_from: int
    """Stop tokens count only from this length on (`min_tokens`)."""
    wants_logprobs: bool
    guide: GuideState | None
    """State of structured output. Such a sequence waits for the mask of each token, so it is never
    one step ahead."""
    level: int
    """Priority; lower goes first. 0 unless the policy uses priorities."""
    tenant: str
    uncached: int
    """Prompt tokens that were not in the prefix cache at arrival, at least 1."""
    first_by: float
    """Deadline of the first token on the scheduler's clock; infinite if there is none."""
    ended_by: float
    """Deadline of the last token; infinite if there is none."""
    rank: tuple[float, int]
    """Lower is served first. All ranks differ."""
    root: bytes
    """The hash that precedes the first page, see `prefix.root`."""
    salt: str
    """See `Request.cache_salt`."""
    predicted: tuple[int, ...]
    """See `Request.predicted`."""
    arrived: float
    """Time of arrival, in seconds on the scheduler's clock."""
    admitted: float = -1.0
    """Time of the first admission; negative before it."""
    cached: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    hashes: list[bytes] = field(default_factory=list[bytes])
    """Hashes of the first full pages, computed on demand."""
    published: int = 0
    """Number of first pages that are published, as this page or as an equal one."""
    shared: int = 0
    """Number of first pages that came from the prefix cache at admission."""
    slot: int = NO_SLOT
    pages: list[list[int]] = field(default_factory=list[list[int]])
    """The page table of each cache group; 0 for pages behind its window."""
    behind: list[int] = field(default_factory=list[int])
    """For each group, the number of first pages that the sequence does not hold."""
    capacity: int = 0
    """Tokens that its pages hold at the end of its prefill."""
    computed: int = 0
    """Positions whose keys and values are cached, or computed by the plans made so far. Counts
    drafts in flight as rejected."""
    skip_from: int = 0
    """When this many tokens are computed, the tokens from here up to `skip_to` are cached. Both are
    0 without such a gap."""
    skip_to: int = 0
    preemptions: int = 0
    """Number of preemptions."""
    loading: bool = False
    """Whether it waits for pages in flight from the host."""
    waits_for_loads: int = 0
    """Number of loads that it has waited for since its last admission."""
    looked_ahead: bool = False
    """Whether its pages on disk were already looked up while it waits."""
    restored_tokens: int = 0
    """Prompt tokens loaded from lower tiers before the first admission."""
    in_flight: int = 0
    """Output tokens that are planned and not committed. A verify row counts as one."""
    drafts_in_flight: int = 0
    """Positions of the verify rows in flight, without the first of each; see `scheduler.verify`."""
    drafts_on_device: bool = False
    """Whether its newest planned row is a verify row, after which a draft head, if any, drafts."""
    own_text: OwnText | None = None
    """Made at the first lookup of drafts."""
    guessed: tuple[float, ...] = ()
    """For the drafts that its guide got: the probabilities that each and all before it come."""
    scored: int = 0
    """Prompt positions whose logprobs are planned."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list[PromptLogprobs])
    """Collected until the first event."""
    plain_until: int = 0
    """Fast path of `commit`. A token needs no other work if it is no stop token and leaves the
    sequence shorter than this. Such a token is not the first or last, fills no page, and no grammar
    or logprobs depend on it."""
    prompt_computed: int = 0
    """Prompt tokens that committed steps computed or found cached. Preemption does not lower it."""
    prefill_end: int = 0
    """Number of tokens at admission. The sequence computes tokens up to here in chunks."""

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
        """Returns a waiting sequence.

        Args:
          limit: the most tokens that model and cache allow; `max_tokens` may lower it.
          level: priority, see `Sequence.level`.
          root: see `prefix.root`.
          now: seconds on the scheduler's clock.
          ttft_slo: seconds until the first token is due; None: no deadline.
        """
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
            salt=request.cache_salt,
            predicted=request.predicted,
            arrived=now,
        )

    @property
    def running(self) -> bool:
        return self.slot != NO_SLOT

    @property
    def prefill_remaining(self) -> int:
        """Known tokens that are not computed or cached."""
        return self.prefill_end - self.computed - (self.skip_to - self.skip_from)

    @property
    def guided_to_wait(self) -> bool:
        """Whether the mask of the next token is not known yet."""
        guide = self.guide
        if guide is None:
            return False
        if not guide.ready or self.in_flight > 1:
            return True
        return self.in_flight == 1 and guide.following is None

    @property
    def mask(self) -> bytes | None:
        """The mask of the next token to sample, with at most one in flight; None allows all
        tokens."""
        guide = self.guide
        if guide is None:
            return None
        return guide.following if self.in_flight else guide.mask

    def count_prompt_tokens(self, end: int) -> int:
        """Reports that a committed step computed positions up to `end`. Returns the number of new
        prompt tokens."""
        new = max(0, min(end, self.num_prompt) - self.prompt_computed)
        self.prompt_computed += new
        return new

    @property
    def max_cached_tokens(self) -> int:
        """The longest prefix that may come from the prefix cache, in tokens."""
        most = len(self.tokens) - 1
        return most if self.params.prompt_logprobs is None else min(most, self.scored)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_generated(self) -> int:
        """The most output tokens that `max_tokens`, the model and the cache allow."""
        return self.limit - self.num_prompt

    def page_hashes(self, count: int, page_size: int) -> list[bytes]:
        """Returns the hashes of the first `count` pages, which known tokens fill."""
        done = len(self.hashes)
        if count > done:
            parent = self.hashes[-1] if done else self.root
            tokens = self.tokens[done * page_size : count * page_size]
            self.hashes += page_hashes(parent, tokens, page_size)
        return self.hashes[:count]

    def check(self, page_size: int) -> None:
        """Raises AssertionError if the sequence's numbers contradict each other."""
        assert self.in_flight >= 0
        assert self.num_prompt <= len(self.tokens) < self.limit, f"{self.request_id} should be over"
        assert len(self.tokens) + self.in_flight <= self.limit
        assert self.computed <= len(self.tokens) + self.in_flight
        assert not (self.loading and self.running)
        if not self.running:
            assert not self.pages and self.computed == 0, f"{self.request_id} waits but holds pages"
        elif self.computed < self.prefill_end:
            assert self.in_flight == 0 and self.prefill_end == len(self.tokens)
        else:
            assert self.computed == len(self.tokens) + self.in_flight - 1
        assert not self.running or self.computed <= self.capacity
        for table, behind in zip(self.pages, self.behind, strict=True):
            assert self.computed <= len(table) * page_size
            held = table[behind:]
            assert table[:behind] == [0] * behind and 0 not in held
            assert len(set(held)) == len(held)
            assert self.published <= len(table)
            assert self.computed < self.prefill_end or self.capacity == len(table) * page_size
        there = max(self.computed, self.skip_to)
        assert self.published * page_size <= min(there, len(self.tokens))
        assert self.computed < self.skip_from < self.skip_to or self.skip_from == self.skip_to == 0
