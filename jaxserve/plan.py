"""The contract between scheduler and runner: one step in plain integers.

The device keeps one row of state per *slot*: the last sampled token, the sampling parameters and
the page tables of the slot's sequence, one per cache group. A plan first changes that state
(admissions, page table entries). Then it says which slots compute how many tokens. The device runs
steps in launch order, so the host may reuse a freed page or slot at once. In a group with a window,
entries of pages entirely before the window are stale, and no step reads them.

**Verify steps.** A row with a `Verify` computes several positions and samples at each one. It
computes the slot's last token at position p, and drafts: guesses of the tokens at p + 1, p + 2 and
so on. Each position samples the token that plain decoding would sample there after the same tokens,
because it uses the seed, penalties, biases and mask of that position. A draft is accepted if and
only if it equals the token sampled at its position and all drafts before it are accepted. So the
accepted tokens are always those of plain decoding, whatever the drafts are. The device counts the
accepted drafts. A row yields one token more than that count, and the slot's last token and length
advance by as many tokens. A rejected position leaves no trace: nothing reads its key and value, and
a later row overwrites them.

Only the device knows where the next row of a slot begins. The host may plan that row before it
knows how many drafts of the previous row were accepted (`Verify.follows`). A plan with such rows is
a verify plan. It may also hold decode rows of sequences without a verify row in flight, but no
chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxserve.api import PromptLogprobs, SamplingParams, TokenLogprobs


class Admission(NamedTuple):
    """A sequence takes a slot; its sampling parameters go to the device.

    `tokens` are the prompt and, after a preemption, the output so far. Penalties count all of them,
    cached or not.
    """

    slot: int
    params: SamplingParams
    tokens: tuple[int, ...] = ()
    """Empty if the sequence uses no penalties."""
    num_prompt: int = 0
    """Tokens of the prompt, without tokens sampled before a preemption."""


class StateCopy(NamedTuple):
    """Copies the state of recurrent layers from slot `source` to slot `target`.

    Slots of snapshots (`CacheConfig.snapshots`) follow the slots of sequences and the padding slot.
    A row that begins at position 0 begins with zero state, whatever its slot holds. A row of a
    prompt begins at a multiple of `CacheConfig.state_block`, and ends at one or not before the end
    of the prompt. So the cuts between rows never change which positions form a block.
    """

    source: int
    target: int


class KeptState(NamedTuple):
    """Stores the state of recurrent layers after the first `tokens` tokens of a chunk, which end a
    block, in slot `slot` of a snapshot."""

    tokens: int
    slot: int


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
    """Slot in the ring of the page's group."""
    group: int = 0
    """Cache group of the page."""


class PageMoves(NamedTuple):
    """Copies between the KV cache and rings. Pages leave the device and return through rings.

    A ring is a device array with room for a few pages. Each direction and each cache group has its
    own ring. Moves are launched before the plan that was made with them: first all `restores`, then
    all `stores`. So a store reads the output of earlier plans, and the plan may overwrite the page.
    """

    restores: tuple[PageMove, ...] = ()
    """Copy these slots of load rings into pages."""
    stores: tuple[PageMove, ...] = ()
    """Copy these pages into slots of store rings."""


class Scored(NamedTuple):
    """Prompt tokens whose logprobs are requested. Each one follows a position of the row."""

    offset: int
    """Offset in the row of the first such position; the others are consecutive."""
    tokens: tuple[int, ...]
    alternatives: int


class Verify(NamedTuple):
    """Makes a row compute and sample several positions; see the module docstring."""

    positions: int
    """The most positions to compute, at least 1. The device computes fewer at `end`, or if drafts
    are missing. If the KV format encodes full pages (`KVFormat.rewrites_pages`), it also stops at
    the end of the page in which the row begins."""
    end: int
    """No position from `end` on is computed. The slot has pages for all positions before `end`, and
    the row always begins before `end`."""
    drafts: tuple[int, ...] | None = ()
    """Draft `i` is for position `Row.start` + 1 + i, wherever the row begins. The drafts replace
    the slot's drafts on the device, and later rows find the unused ones there. At most twice the
    drafts of a row in the largest verify bucket. None: use the drafts on the device."""
    follows: bool = False
    """A verify row of the sequence is in flight. This row begins where that one ends, which only
    the device knows. If all of its drafts are rejected, this row begins at `Row.start`."""
    masks: tuple[bytes, ...] = ()
    """The mask of each position, as in `Row.mask`, given the drafts before it; empty: all tokens
    are allowed at all positions. Masks need a known start and drafts from the host."""


class Row(NamedTuple):
    """One sequence's part of a step.

    A decode row has no `tokens`. It computes the slot's last sampled token, which only the device
    may know yet. With a `verify` it also computes drafts after that token. A row with `tokens` is a
    prefill chunk that computes them.
    """

    seq_id: int
    """`Sequence.id`; never reused, unlike the slot."""
    slot: int
    start: int
    """Position of the first computed token. It equals the number of tokens already in the cache;
    with `Verify.follows`, the smallest such number."""
    tokens: tuple[int, ...]
    samples: bool
    """Whether the row's last position yields a token. Earlier chunks of a prompt do not."""
    logprobs: bool = False
    """Whether logprobs of the sampled token are requested."""
    mask: bytes | None = None
    """Bit i allows token i to be sampled; None allows all. Little-endian 4-byte words."""
    scored: Scored | None = None
    verify: Verify | None = None
    kept: KeptState | None = None

    @property
    def num_tokens(self) -> int:
        """Positions that the row computes; for a verify row, the most."""
        return len(self.tokens) or (1 if self.verify is None else self.verify.positions)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step.

    The device first applies `states` in order: a copy reads the results of the copies before it.
    Then it applies `admissions` and `pages`, and then it computes the rows. In every layer all rows
    write their keys and values before any row reads them. So a row may share pages that another row
    of the same plan fills.
    """

    rows: tuple[Row, ...]
    admissions: tuple[Admission, ...] = ()
    pages: tuple[PageEntry, ...] = ()
    states: tuple[StateCopy, ...] = ()
    verify: bool = False
    """Rows may be verify rows. No row is a chunk."""

    @cached_property
    def num_tokens(self) -> int:
        if self.verify:
            return sum(row.num_tokens for row in self.rows)
        return sum([len(row.tokens) or 1 for row in self.rows])  # a list is faster

    @cached_property
    def decode_only(self) -> bool:
        """Whether all rows are decode rows."""
        return not self.verify and not any(row.tokens for row in self.rows)

    @property
    def kind(self) -> str:
        """The kind of bucket for this plan: `decode`, `mixed` or `verify`."""
        return "verify" if self.verify else "decode" if self.decode_only else "mixed"


class Sampled(NamedTuple):
    """The result of one row. A row that neither samples nor is scored has None instead."""

    token: int | None
    """None if the row does not sample, or if its logits are NaN."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Logprobs of the tokens in the row's `scored`."""
    further: tuple[Sampled, ...] = ()
    """Further results of a verify row, one for each accepted draft. They end with the first result
    whose logits are NaN."""
