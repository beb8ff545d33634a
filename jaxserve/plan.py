"""The contract between scheduler and runner: one step in plain integers.

The device keeps one row of state per *slot*: the last sampled token, the sampling parameters and
the page tables of the sequence in the slot, one for each cache group. A plan changes that state
(admissions, page table entries) and then says which slots compute how many tokens. Steps run on the
device in launch order, so the host may reuse a freed page or slot at once. In a group with a window
entries of pages wholly behind it are stale: a step reads nothing through them.

**Verify steps.** A row with a `Verify` computes several positions and samples at each: the slot's
last token at position p, and drafts, which are guesses of the tokens at p + 1, p + 2 and so on.
What a position samples is what plain decoding would sample there after the same tokens: seed,
penalties, biases and mask are those of that position. A draft is accepted if and only if it equals
the token that is sampled at its position and all drafts before it are accepted. So whatever the
drafts are, the accepted tokens are those of plain decoding. The device counts them: a row yields
the tokens of its accepted positions, one more than accepted drafts, and the slot's last token and
length move on by as many. A rejected position leaves no trace. Nothing reads its key and value, and
a later row writes over them.

The device knows where a slot's next row begins, so the host may plan a row while it does not know
yet how many drafts of the row before are accepted (`Verify.follows`). A plan with such rows is a
verify plan. It may also hold decode rows, of sequences of which no verify row is in flight, but no
chunks.
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
    """Tokens of the prompt, however many were sampled before a preemption."""


class PageCopy(NamedTuple):
    """Overwrites page `target` with the content of page `source`.

    Whole pages are copied, in all layers of the group. What a KV format keeps outside of the pages
    is not (see `CacheConfig.own_tokens`).
    """

    source: int
    target: int
    group: int = 0
    """Cache group of both pages."""


class StateCopy(NamedTuple):
    """Overwrites the state of recurrent layers in slot `target` with that in slot `source`.

    Behind the slots of sequences and of padding come those of snapshots (`CacheConfig.snapshots`).
    A row that begins at position 0 begins with a state of zeros, whatever its slot holds. A row of
    a prompt begins and ends at multiples of `CacheConfig.state_block`, as long as the prompt fills
    such blocks: which positions are computed as one block never depends on the cuts between rows.
    """

    source: int
    target: int


class PageEntry(NamedTuple):
    """Sets entry `position` of the slot's page table to `page`."""

    slot: int
    position: int
    page: int
    group: int = 0
    """Cache group whose page table changes."""


class PageMove(NamedTuple):
    """A page of the KV cache and a slot of a ring (see `PageMoves`)."""

    page: int
    ring_slot: int
    """Of the group's ring."""
    group: int = 0
    """Cache group of the page."""


class PageMoves(NamedTuple):
    """Copies between the KV cache and rings, through which pages leave the device and come back.

    A ring is an array of the device with room for a few pages, one for each direction and cache
    group. Moves are launched before the plan that is made with them: first all `restores`, then
    all `stores`. So a store reads what earlier plans have written, and the plan may overwrite it.
    """

    restores: tuple[PageMove, ...] = ()
    """Slots of load rings that become the content of pages."""
    stores: tuple[PageMove, ...] = ()
    """Pages whose content goes to slots of store rings."""


class Scored(NamedTuple):
    """Prompt tokens whose logprobs are requested. Each follows a position of the row."""

    offset: int
    """Offset in the row of the first such position; the others are consecutive."""
    tokens: tuple[int, ...]
    alternatives: int


class Verify(NamedTuple):
    """What makes a row compute and sample several positions; see the module."""

    positions: int
    """The most positions to compute, at least 1. Fewer are computed where drafts are missing, at
    `end`, and with a format that encodes full pages at the end of the page in which the row begins
    (`KVFormat.rewrites_pages`)."""
    end: int
    """No position from `end` on is computed. The slot has pages for all before, and `end` is larger
    than any position at which the row may begin."""
    drafts: tuple[int, ...] | None = ()
    """Draft `i` is for position `Row.start` + 1 + i, wherever the row begins; they replace what the
    slot has on the device, where later rows find those that are not computed yet. At most twice the
    positions after the first of the largest verify bucket. None: those on the device."""
    follows: bool = False
    """A verify row of the sequence is in flight. The row begins where that one ends, which only
    the device knows, and at `Row.start` if all of its drafts are rejected."""
    masks: tuple[bytes, ...] = ()
    """The mask of each position as in `Row.mask`, after the drafts before it; none: all tokens are
    allowed everywhere. They need a known beginning and drafts from the host."""


class Row(NamedTuple):
    """One sequence's part of a step.

    A decode row has no `tokens`: it computes the slot's last sampled token, which only the device
    may know so far. With a `verify` it computes drafts after it. Otherwise the row is a prefill
    chunk that computes `tokens`.
    """

    seq_id: int
    """`Sequence.id`; never reused, unlike the slot."""
    slot: int
    start: int
    """Position of the first token computed, equal to the number of tokens already in the cache; the
    least one if `Verify.follows`."""
    tokens: tuple[int, ...]
    samples: bool
    """Whether the row's last position yields a token (all but the earlier chunks of a prompt)."""
    logprobs: bool = False
    """Whether logprobs of the sampled token are requested."""
    mask: bytes | None = None
    """Bit i allows token i to be sampled; None allows all. Little-endian 4-byte words."""
    scored: Scored | None = None
    verify: Verify | None = None

    @property
    def num_tokens(self) -> int:
        """The positions that it computes, of a verify row the most."""
        return len(self.tokens) or (1 if self.verify is None else self.verify.positions)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step.

    `copies` and `states` apply first, each in their order: a copy reads what those before it wrote.
    Then
    `admissions` and `pages` apply, and then the rows are computed. In every layer all rows write
    their keys and values before any row reads. A row may therefore share pages that another row of
    the same plan fills.
    """

    rows: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    pages: tuple[PageEntry, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    states: tuple[StateCopy, ...] = ()
    verify: bool = False
    """Rows may be verify rows, none is a chunk."""

    @cached_property
    def num_tokens(self) -> int:
        if self.verify:
            return sum(row.num_tokens for row in self.rows)
        return sum([len(row.tokens) or 1 for row in self.rows])  # in every step

    @cached_property
    def decode_only(self) -> bool:
        """Whether all rows are decode rows."""
        return not self.verify and not any(row.tokens for row in self.rows)

    @property
    def kind(self) -> str:
        """The kind of bucket that it needs: `decode`, `mixed` or `verify`."""
        return "verify" if self.verify else "decode" if self.decode_only else "mixed"


class Sampled(NamedTuple):
    """The result of one row. Rows that neither sample nor are scored have None instead."""

    token: int | None
    """None if the row does not sample, or if its logits are NaN."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Logprobs of the tokens in the row's `scored`."""
    further: tuple[Sampled, ...] = ()
    """Of a verify row, what follows: one for each accepted draft. They end with the first whose
    logits are NaN."""
