"""The contract between scheduler and runner: one step in plain integers.

The device keeps one row of state per *slot*: the last sampled token, the sampling parameters and
the page tables of the sequence in the slot, one for each cache group. A plan changes that state
(admissions, page table entries) and then says which slots compute how many tokens. Steps run on the
device in launch order, so the host may reuse a freed page or slot at once. In a group with a window
entries of pages wholly behind it are stale: a step reads nothing through them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxserve.api import PromptLogprobs, SamplingParams, TokenLogprobs


class Admission(NamedTuple):
    """A sequence takes a slot; its sampling parameters go to the device.

    `tokens` are the prompt and, after a preemption, the output so far. Penalties count them, cached
    or not.
    """

    slot: int
    params: SamplingParams
    tokens: tuple[int, ...] = ()
    """Empty if no penalty needs them."""
    num_prompt: int = 0


class PageCopy(NamedTuple):
    """Overwrites page `target` with the content of page `source`.

    Whole pages are copied, in all layers of the group. What a KV format keeps outside of the pages
    is not (see `CacheConfig.own_tokens`).
    """

    source: int
    target: int
    group: int = 0
    """Cache group of both pages."""


class PageEntry(NamedTuple):
    """Sets entry `position` of the slot's page table to `page`."""

    slot: int
    position: int
    page: int
    group: int = 0
    """Cache group whose page table changes."""


class Scored(NamedTuple):
    """Prompt tokens whose logprobs are requested. Each follows a position of the row."""

    offset: int
    """Offset in the row of the first such position; the others are consecutive."""
    tokens: tuple[int, ...]
    alternatives: int


class Row(NamedTuple):
    """One sequence's part of a step.

    A decode row has no `tokens`: it computes the slot's last sampled token, which only the device
    may know so far. Otherwise the row is a prefill chunk that computes `tokens`.
    """

    seq_id: int
    """`Sequence.id`; never reused, unlike the slot."""
    slot: int
    start: int
    """Position of the first token computed, equal to the number of tokens already in the cache."""
    tokens: tuple[int, ...]
    samples: bool
    """Whether the row's last position yields a token (all but the earlier chunks of a prompt)."""
    logprobs: bool = False
    """Whether logprobs of the sampled token are requested."""
    mask: bytes | None = None
    """Bit i allows token i to be sampled; None allows all. Little-endian 4-byte words."""
    scored: Scored | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) or 1


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step.

    `copies` apply first, in their order: a copy reads what the copies before it wrote. Then
    `admissions` and `pages` apply, and then the rows are computed. In every layer all rows write
    their keys and values before any row reads. A row may therefore share pages that another row of
    the same plan fills.
    """

    rows: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    pages: tuple[PageEntry, ...] = ()
    copies: tuple[PageCopy, ...] = ()

    @cached_property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @cached_property
    def decode_only(self) -> bool:
        return not any(row.tokens for row in self.rows)


class Sampled(NamedTuple):
    """The result of one row. Rows that neither sample nor are scored have None instead."""

    token: int | None
    """None if the row does not sample, or if its logits are NaN."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Logprobs of the tokens in the row's `scored`."""
