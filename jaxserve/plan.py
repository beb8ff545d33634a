"""What the scheduler tells the runner: one step, in plain integers.

The device keeps one row of state per *slot*: the last sampled token, the sampling parameters and
the page table of the sequence that holds the slot. A plan changes that state (admissions, page
table entries) and then says which slots compute how many tokens. Steps run on the device in the
order in which they are launched, so a page or slot freed by the host may be given out again at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxserve.api import PromptLogprobs, SamplingParams, TokenLogprobs


class Admission(NamedTuple):
    """A sequence takes a slot: its sampling parameters go to the device.

    `tokens` are the prompt and the output so far (more than nothing after a preemption): penalties
    count them, however much of them is already in the KV cache.
    """

    slot: int
    params: SamplingParams
    tokens: tuple[int, ...] = ()
    """Empty if the parameters do not depend on them."""
    num_prompt: int = 0


class PageEntry(NamedTuple):
    """Entry `position` of the slot's page table becomes `page`."""

    slot: int
    position: int
    page: int


class Scored(NamedTuple):
    """Prompt tokens whose probabilities are wanted: each follows a position of a row."""

    offset: int
    """Of the first such position in the row; the others come next to it."""
    tokens: tuple[int, ...]
    alternatives: int


class Row(NamedTuple):
    """One sequence's part of a step.

    A decode row has no `tokens`: it computes the slot's last sampled token, which only the device
    may know so far. Otherwise the row is a prefill chunk that computes `tokens`.
    """

    seq_id: int
    """The scheduler's own number of the sequence; never reused, unlike the slot."""
    slot: int
    start: int
    """Position of the first token computed, equal to the number of tokens already in the cache."""
    tokens: tuple[int, ...]
    samples: bool
    """Whether the row's last position yields a token (all but the earlier chunks of a prompt)."""
    logprobs: bool = False
    """Whether alternatives of the sampled token are wanted."""
    mask: bytes | None = None
    """Bit i allows token i to be sampled; None allows all. Little-endian 4-byte words."""
    scored: Scored | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) or 1


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step. `admissions` and `pages` apply before the rows are computed.

    In every layer all rows write their keys and values before any row reads: a row may share the
    pages that another row of the same plan fills.
    """

    rows: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    pages: tuple[PageEntry, ...] = ()

    @cached_property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @cached_property
    def decode_only(self) -> bool:
        return not any(row.tokens for row in self.rows)


class Sampled(NamedTuple):
    """What the device found for one row; None in its place if it neither samples nor is scored."""

    token: int | None
    """None if the row does not sample, or if its logits are not numbers."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Of the tokens in the row's `scored`."""
