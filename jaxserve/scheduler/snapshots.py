"""Snapshots of recurrent state: what a prefix hit needs beside pages."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from jaxserve.plan import StateCopy
from jaxserve.scheduler.sequence import Sequence


class _Due(NamedTuple):
    """A slot whose state, once the plans made so far have run, is that of a boundary."""

    seq: Sequence
    slot: int
    boundary: int
    """In tokens, at the end of a page."""


class Snapshots:
    """Copies of the state of recurrent layers at ends of pages, in slots behind those of sequences.

    State cannot be taken back to an earlier position. So a prefix hit ends where both the pages
    before and a snapshot are found, under the same hash.

    **Where.** A chunk of a prompt ends at every `stride` tokens and at the prompt's last end of a
    page and of a block that leaves a token to compute; there its state is kept. That of outputs is
    not: they are computed token by token, and the next turn of a chat, alone, computes them in
    blocks. It goes on from the end of the last prompt.

    **When.** A plan with the row that reaches a boundary is followed by one that copies the slot's
    state before anything else (`StepPlan.states`). Until then nothing changes the slot: whoever has
    it next computes in that later plan or after it. From then on the snapshot is found; the copy
    back to another slot comes behind it in the same plan at the earliest.

    **How long.** The least recently used one makes room. One whose page is given out again goes
    with it: nobody could find both.
    """

    def __init__(self, count: int, *, first_slot: int, stride: int, page_size: int, block: int = 1):
        """`count` snapshots in the state's slots from `first_slot` on; `stride` in tokens, whole
        pages and blocks of `block` tokens."""
        self.num_total = count
        self._first_slot, self._stride, self._page_size = first_slot, stride, page_size
        self._block = block
        self._free = list(range(first_slot + count - 1, first_slot - 1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        """By the hash of the page before the boundary, the least recently used first."""
        self._due: list[_Due] = []
        self._copies: list[StateCopy] = []

    @property
    def num_kept(self) -> int:
        """Snapshots that can be found."""
        return len(self._slot_of)

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Returns where a chunk of a prompt ends that would end at `end`."""
        following = (seq.computed // self._stride + 1) * self._stride
        wanted = (following, self._last_boundary(seq))
        return min([end, *(boundary for boundary in wanted if boundary > seq.computed)])

    def _last_boundary(self, seq: Sequence) -> int:
        """Returns the last end of a page and of a block in the prompt that leaves a token to
        compute."""
        unit = max(self._page_size, self._block)  # both are powers of two
        return min(seq.num_prompt, seq.prefill_end - 1) // unit * unit

    def planned(self, seq: Sequence) -> None:
        """A row of the sequence was planned."""
        end, last = seq.computed, self._last_boundary(seq)
        if 0 < end <= last and (end % self._stride == 0 or end == last):
            self._due.append(_Due(seq, seq.slot, end))

    def settle(self) -> None:
        """A plan begins: it copies what the plans before it have reached."""
        due, self._due = self._due, []
        for seq, slot, boundary in due:
            content = seq.page_hashes(boundary // self._page_size, self._page_size)[-1]
            if content in self._slot_of:
                self._slot_of.move_to_end(content)
                continue
            self._slot_of[content] = target = self._take()
            self._copies.append(StateCopy(slot, target))

    def _take(self) -> int:
        return self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]

    def longest(self, hashes: list[bytes], count: int) -> int:
        """Returns the most pages, up to `count`, at whose end there is a snapshot."""
        while count and hashes[count - 1] not in self._slot_of:
            count -= 1
        return count

    def restore(self, content: bytes, slot: int) -> None:
        """A sequence goes on in `slot` behind the page with this hash, which has a snapshot."""
        self._slot_of.move_to_end(content)
        self._copies.append(StateCopy(self._slot_of[content], slot))

    def drop(self, content: bytes) -> None:
        """Nobody looks for the hash any more, if it is known at all."""
        slot = self._slot_of.pop(content, None)
        if slot is not None:
            self._free.append(slot)

    def forget(self) -> None:
        """Nothing that was computed so far is found any more."""
        for content in list(self._slot_of):
            self.drop(content)
        self._due.clear()
        self._copies.clear()

    def take_copies(self) -> tuple[StateCopy, ...]:
        """Returns the copies of the plan that is complete, in their order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def check(self) -> None:
        """AssertionError unless each slot is free or holds one snapshot."""
        slots = sorted([*self._free, *self._slot_of.values()])
        assert slots == list(range(self._first_slot, self._first_slot + self.num_total))
