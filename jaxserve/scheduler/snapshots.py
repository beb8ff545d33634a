"""Snapshots of recurrent state: what a prefix hit needs beside pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.plan import StateCopy
from jaxserve.scheduler.sequence import Sequence


class _Due(NamedTuple):
    """A slot whose state, once the plans made so far have run, is that of a boundary."""

    seq: Sequence
    slot: int
    boundary: int
    """In tokens, at the end of a page."""
    uses: int | None
    """See `_Snapshot`; None: of the stride alone."""


@dataclass(slots=True)
class _Snapshot:
    slot: int
    uses: int
    """Prompts that went on from it; of one at a junction one more."""


@dataclass(slots=True)
class _Held:
    """A snapshot that a sequence will go on from when its own tokens are computed."""

    seq: Sequence
    source: int
    """The snapshot's slot: it is not given out until then."""
    ready: bool = False
    """A plan with the last of its own tokens was made."""


class Snapshots:
    """Copies of the state of recurrent layers at ends of pages, in slots behind those of sequences.

    State cannot be taken back to an earlier position. So a prefix hit ends where both the pages
    before and a snapshot are found, under the same hash.

    **Where.** A chunk of a prompt ends at the prompt's last end of a page and of a block that
    leaves a token to compute, for the next turn; at a junction, where a prompt leaves the pages of
    others, for whoever begins like them; and at every `stride` tokens. There its state is kept.
    That of outputs is not: they are computed token by token, and the next turn of a chat, alone,
    computes them in blocks. It goes on from the end of the last prompt.

    **When.** A plan with the row that reaches a boundary is followed by one that copies the slot's
    state before anything else (`StepPlan.states`). Until then nothing changes the slot: whoever has
    it next computes in that later plan or after it. From then on the snapshot is found; the copy
    back to another slot comes behind it in the same plan at the earliest.

    Of a format that keeps the first tokens of a slot outside the pages (`CacheConfig.own_tokens`) a
    hit computes these first, and with them a state that nobody wants. The copy back comes behind
    that plan; until then the snapshot is held.

    **How long.** The least recently used one makes room. Before all others go those of the stride
    that nobody went on from, which take no other's place, and ends of prompts once the next turn,
    and nobody else, went on from them and has an end of its own. One whose page is given out again
    goes with it: nobody could find both.
    """

    def __init__(self, count: int, *, first_slot: int, stride: int, page_size: int, block: int = 1):
        """`count` snapshots in the state's slots from `first_slot` on; `stride` in tokens, whole
        pages and blocks of `block` tokens."""
        self.num_total = count
        self._first_slot, self._stride, self._page_size = first_slot, stride, page_size
        self._block = block
        self._free = list(range(first_slot + count - 1, first_slot - 1, -1))
        self._found: OrderedDict[bytes, _Snapshot] = OrderedDict()
        """By the hash of the page before the boundary, the least recently used first."""
        self._spare: OrderedDict[bytes, None] = OrderedDict()
        """Those of them that make room before the others, in the same order."""
        self._ends: set[bytes] = set()
        """Hashes of the pages at which prompts have ended, while the pages are on the device."""
        self._origin: dict[int, bytes] = {}
        """What a sequence went on from, until it has a snapshot behind it; by `Sequence.id`."""
        self._junction: dict[int, int] = {}
        """Where a sequence's prompt leaves the pages of others, in tokens; by `Sequence.id`."""
        self._due: list[_Due] = []
        self._copies: list[StateCopy] = []
        self._held: dict[int, _Held] = {}
        """By `Sequence.id`."""
        self._arriving: set[int] = set()
        """Slots of snapshots that come back from below the device."""
        self.on_evict: list[Callable[[int, bytes], None]] = []
        """Called with slot and hash of a snapshot that makes room, before a plan overwrites it."""

    @property
    def num_kept(self) -> int:
        """Snapshots that can be found."""
        return len(self._found)

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Returns where a chunk of a prompt ends that would end at `end`."""
        following = (seq.computed // self._stride + 1) * self._stride
        wanted = (following, self._junction.get(seq.id, 0), self._last_boundary(seq))
        return min([end, *(boundary for boundary in wanted if boundary > seq.computed)])

    def _last_boundary(self, seq: Sequence) -> int:
        """Returns the last boundary in the prompt that leaves a token to compute."""
        return self._boundary(min(seq.num_prompt, seq.prefill_end - 1))

    def _boundary(self, tokens: int) -> int:
        """Returns the last end of a page and of a block."""
        unit = max(self._page_size, self._block)  # both are powers of two
        return tokens // unit * unit

    def admitted(self, seq: Sequence, pages: int) -> None:
        """A sequence begins, whose first `pages` pages others have computed.

        If they end where a prompt did, nobody else has gone on from there.
        """
        end = self._boundary(pages * self._page_size)
        if end and seq.page_hashes(end // self._page_size, self._page_size)[-1] not in self._ends:
            self._junction[seq.id] = end

    def planned(self, seq: Sequence, *, publishes: bool = True) -> None:
        """A row of the sequence was planned. `publishes`: others may find what it computes."""
        held = self._held.get(seq.id)
        if held is not None:  # the slot's state is none of a boundary that is looked for
            held.ready = not seq.skip_to
            return
        end, last = seq.computed, self._last_boundary(seq)
        if not publishes or not 0 < end <= last:
            return
        if end == self._junction.get(seq.id):
            self._due.append(_Due(seq, seq.slot, end, uses=1))
        elif end == last:
            self._due.append(_Due(seq, seq.slot, end, uses=0))
        elif end % self._stride == 0:
            self._due.append(_Due(seq, seq.slot, end, uses=None))

    def settle(self) -> None:
        """A plan begins: it copies what the plans before it have reached."""
        for held in [each for each in self._held.values() if each.ready]:
            self._copies.append(StateCopy(held.source, held.seq.slot))
            self._let_go(held)
        due, self._due = self._due, []
        for each in due:
            count = each.boundary // self._page_size
            self._take(each, each.seq.page_hashes(count, self._page_size)[-1])

    def _take(self, due: _Due, content: bytes) -> None:
        """Copy a state that a plan has reached, unless that was done, or all slots are held."""
        if due.uses is not None:
            self._leave_origin(due.seq, content)
        if content not in self._found:
            slot = self._make_room(self._spare if due.uses is None else self._in_order)
            if slot is None:
                return
            self._found[content] = _Snapshot(slot, due.uses or 0)
            self._copies.append(StateCopy(due.slot, slot))
            if due.uses is None:
                self._spare[content] = None
        self._used(content, again=due.uses is None)
        if due.uses is not None and due.boundary == self._last_boundary(due.seq):
            self._ends.add(content)

    def _leave_origin(self, seq: Sequence, content: bytes) -> None:
        """The sequence has a snapshot behind the one it went on from, which others may want."""
        origin = self._origin.pop(seq.id, content)
        if origin != content and origin in self._found and self._found[origin].uses < 2:
            self._spare[origin] = None

    def _used(self, content: bytes, *, again: bool = False) -> None:
        """It is the last to make room; `again`: among those like it."""
        self._found.move_to_end(content)
        if content in self._spare:
            if again:
                self._spare.move_to_end(content)
            else:
                del self._spare[content]

    @property
    def _in_order(self) -> list[bytes]:
        """All that can be found, as they make room."""
        return [*self._spare, *(each for each in self._found if each not in self._spare)]

    def _make_room(self, order: Iterable[bytes]) -> int | None:
        """Returns a slot for a snapshot; None: all are held, or not in `order`."""
        if self._free:
            return self._free.pop()
        content = self._oldest(order, self._kept)
        if content is None:
            return None
        self._evicted(content)
        return self._remove(content)

    def _oldest(self, order: Iterable[bytes], taken: set[int]) -> bytes | None:
        """Returns which one makes room, but for those in `taken` slots."""
        return next((each for each in order if self._found[each].slot not in taken), None)

    def _remove(self, content: bytes) -> int:
        self._spare.pop(content, None)
        return self._found.pop(content).slot

    def _evicted(self, content: bytes) -> None:
        slot = self._found[content].slot
        if any(slot == copy.target for copy in self._copies):
            return  # the plan that is being made has not filled it yet
        for told in self.on_evict:
            told(slot, content)

    def longest(
        self, hashes: list[bytes], count: int, elsewhere: Callable[[bytes], bool] | None = None
    ) -> int:
        """Returns the most pages, up to `count`, at whose end there is a snapshot.

        Args:
          elsewhere: whether one that the device lacks is somewhere else, by its hash.
        """
        while count and hashes[count - 1] not in self._found:
            if elsewhere and elsewhere(hashes[count - 1]):
                return count
            count -= 1
        return count

    def __contains__(self, content: object) -> bool:
        """Whether there is a snapshot at the end of the page with this hash."""
        return content in self._found

    @property
    def can_reserve(self) -> bool:
        """Whether `reserve` would find a slot."""
        return not self._unreserved.issuperset([*self._free, *self._slots])

    @property
    def _slots(self) -> set[int]:
        """Those of snapshots that can be found."""
        return {each.slot for each in self._found.values()}

    @property
    def _unreserved(self) -> set[int]:
        """Slots that `reserve` leaves alone: what comes back is written before the copies of the
        next plan, of which some may be waiting for it."""
        return self._kept.union(*self._copies)

    def reserve(self) -> int:
        """Returns a slot for a snapshot that comes back; `can_reserve` is true. It is the caller's
        until `release`."""
        taken = self._unreserved
        slot = next((each for each in self._free if each not in taken), None)
        if slot is None:
            content = self._oldest(self._in_order, taken)
            assert content is not None, "can_reserve was false"
            self._evicted(content)
            slot = self._remove(content)
        else:
            self._free.remove(slot)
        self._arriving.add(slot)
        return slot

    def arrived(self, slot: int, content: bytes) -> None:
        """What is launched before the next plan completes the snapshot in a reserved slot."""
        if content not in self._found:
            self._found[content] = _Snapshot(slot, uses=0)

    def release(self, slot: int) -> None:
        """Give a reserved slot back. A snapshot that has arrived stays."""
        self._arriving.discard(slot)
        self._give_back(slot)

    def restore(self, content: bytes, seq: Sequence) -> None:
        """A sequence goes on behind the page with this hash, which has a snapshot."""
        self._copies.append(StateCopy(self._goes_on(content, seq), seq.slot))

    def restore_later(self, content: bytes, seq: Sequence) -> None:
        """As `restore`, when the sequence has computed the tokens before `Sequence.skip_from`."""
        self._held[seq.id] = _Held(seq, self._goes_on(content, seq))

    def _goes_on(self, content: bytes, seq: Sequence) -> int:
        """Returns the snapshot's slot."""
        found = self._found[content]
        found.uses += 1
        self._used(content)
        self._origin[seq.id] = content
        return found.slot

    @property
    def _kept(self) -> set[int]:
        """Slots that are not given out, whether their snapshots can be found or not."""
        return {each.source for each in self._held.values()} | self._arriving

    def _let_go(self, held: _Held) -> None:
        del self._held[held.seq.id]
        self._give_back(held.source)

    def _give_back(self, slot: int) -> None:
        """The slot is free if it is neither held, nor found, nor reserved."""
        if slot not in self._kept and slot not in self._slots:
            self._free.append(slot)

    def drop(self, content: bytes) -> None:
        """The page with this hash leaves the device: so does its snapshot, if there is one."""
        self._ends.discard(content)
        if content in self._found:
            self._evicted(content)
            self._give_back(self._remove(content))

    def freed(self, seq: Sequence) -> None:
        """The sequence gives its slot back."""
        self._origin.pop(seq.id, None)
        self._junction.pop(seq.id, None)
        if (held := self._held.get(seq.id)) is not None:
            self._let_go(held)

    def forget(self) -> None:
        """Nothing that was computed so far is found any more."""
        for content in list(self._found):
            self._give_back(self._remove(content))
        self._ends.clear()
        self._due.clear()
        self._copies.clear()

    def take_copies(self) -> tuple[StateCopy, ...]:
        """Returns the copies of the plan that is complete, in their order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def check(self) -> None:
        """AssertionError unless each slot is free or holds one snapshot."""
        slots = sorted([*self._free, *self._kept.union(self._slots)])
        assert slots == list(range(self._first_slot, self._first_slot + self.num_total))
        assert self._spare.keys() <= self._found.keys()
