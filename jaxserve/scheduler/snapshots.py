"""Snapshots of recurrent state, which a prefix hit needs in addition to pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.plan import KeptState, StateCopy
from jaxserve.scheduler.sequence import Sequence


class _Due(NamedTuple):
    """A boundary that a plan reaches, until the next plan begins."""

    content: bytes | None
    """Hash of the page before it; None: forgotten."""
    slot: int | None
    """Where the plan stores the state; None: nowhere, because it exists or there is no room."""
    uses: int | None
    """See `_Snapshot`; None: the boundary is only a multiple of the stride."""
    ends: bool
    """Whether it is the last boundary of a prompt."""


@dataclass(slots=True)
class _Snapshot:
    slot: int
    uses: int
    """Number of prompts that continued from it; one more at a junction."""


@dataclass(slots=True)
class _Held:
    """A snapshot from which a sequence will continue once its own tokens are computed."""

    seq: Sequence
    source: int
    """Slot of the snapshot. It is not reused before then."""
    ready: bool = False
    """Whether a plan with the last of its own tokens was made."""


class Snapshots:
    """Copies of the state of recurrent layers at the ends of pages. Their slots follow the slots of
    sequences.

    Recurrent state cannot go back to an earlier position. So a prefix hit ends where both the pages
    before it and a snapshot are found, under the same hash.

    **Where.** Prompts leave snapshots at three kinds of boundaries. The first is the last end of
    both a page and a block that leaves a token to compute; the next turn of a chat continues from
    it. The second is a junction, where a prompt leaves the cached pages of others; prompts with the
    same beginning continue from it. The third is every multiple of `stride` tokens. Outputs leave
    no snapshots: they are computed token by token, but a chat's next turn computes them in blocks.
    It continues from the end of the last prompt.

    **When.** A row that reaches or passes a boundary stores the state there (`Row.kept`). It can
    store one, so a chunk ends at its first boundary if it would reach a second one. The next plan
    is the first that finds the snapshot.

    Some formats keep the first tokens of a slot outside the pages (`CacheConfig.own_tokens`). A
    sequence with a hit computes those tokens first, and their state is useless. The copy from the
    snapshot comes after that plan, and the snapshot is held until then.

    **How long.** The least recently used snapshot is evicted. Two kinds go before all others:
    snapshots of the stride from which no prompt continued, which never evict others; and ends of
    prompts from which only the next turn continued, once that turn has its own end. A snapshot is
    dropped together with its page, because nobody could find it without the page.
    """

    def __init__(self, count: int, *, first_slot: int, stride: int, page_size: int, block: int = 1):
        """Makes `count` snapshot slots from `first_slot` on. `stride` is in tokens, a multiple of
        the page size and of `block` tokens."""
        self.num_total = count
        self._first_slot, self._stride, self._page_size = first_slot, stride, page_size
        self._block = block
        self._free = list(range(first_slot + count - 1, first_slot - 1, -1))
        self._found: OrderedDict[bytes, _Snapshot] = OrderedDict()
        """Snapshots by the hash of the page before the boundary, least recently used first."""
        self._spare: OrderedDict[bytes, None] = OrderedDict()
        """The snapshots in `_found` that are evicted first, in the same order."""
        self._ends: set[bytes] = set()
        """Hashes of the pages on the device at which prompts have ended."""
        self._origin: dict[int, bytes] = {}
        """By `Sequence.id`: the snapshot it continued from, until it has a later snapshot."""
        self._junction: dict[int, int] = {}
        """By `Sequence.id`: the position where its prompt leaves the pages of others."""
        self._due: list[_Due] = []
        self._copies: list[StateCopy] = []
        self._held: dict[int, _Held] = {}
        """Held snapshots by `Sequence.id`."""
        self._arriving: set[int] = set()
        """Slots of snapshots that are being loaded from a lower tier."""
        self.on_evict: list[Callable[[int, bytes], None]] = []
        """Called with slot and hash of an evicted snapshot, before a plan overwrites it."""

    @property
    def num_kept(self) -> int:
        """Number of snapshots that can be found."""
        return len(self._found)

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Returns where to end a chunk of a prompt that would end at `end`."""
        reached = self._boundaries(seq, seq.computed, end)
        return end if len(reached) < 2 else reached[0]

    def _boundaries(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Returns the boundaries of a prompt after `start` and up to `end`, in order."""
        last = self._last_boundary(seq)
        following = (start // self._stride + 1) * self._stride
        wanted = {*range(following, last, self._stride), self._junction.get(seq.id, 0), last}
        return sorted(each for each in wanted if start < each <= min(end, last))

    def _last_boundary(self, seq: Sequence) -> int:
        """Returns the last boundary in the prompt that leaves a token to compute."""
        return self._boundary(min(seq.num_prompt, seq.prefill_end - 1))

    def _boundary(self, tokens: int) -> int:
        """Returns the last position that ends both a page and a block."""
        unit = max(self._page_size, self._block)  # both are powers of two
        return tokens // unit * unit

    def admitted(self, seq: Sequence, pages: int) -> None:
        """Reports a sequence that begins and whose first `pages` pages are cached.

        If they end where a prompt ended, no other sequence has continued from there yet.
        """
        end = self._boundary(pages * self._page_size)
        if end and seq.page_hashes(end // self._page_size, self._page_size)[-1] not in self._ends:
            self._junction[seq.id] = end

    def planned(self, seq: Sequence, start: int, *, publishes: bool = True) -> KeptState | None:
        """Reports that a chunk from `start` was planned. Returns which state it stores.

        Args:
          publishes: whether others may find its results.
        """
        held = self._held.get(seq.id)
        if held is not None:  # the slot's state does not belong to a boundary
            held.ready = not seq.skip_to
            return None
        reached = self._boundaries(seq, start, seq.computed)
        if not publishes or not reached:
            return None
        (boundary,) = reached
        ends = boundary == self._last_boundary(seq)
        junction = boundary == self._junction.get(seq.id)
        uses = 1 if junction else 0 if ends else None
        content = seq.page_hashes(boundary // self._page_size, self._page_size)[-1]
        if uses is not None:
            self._leave_origin(seq, content)
        slot = None
        if content not in self._found:
            slot = self._make_room(self._spare if uses is None else self._in_order)
        self._due.append(_Due(content, slot, uses, ends))
        return None if slot is None else KeptState(boundary - start, slot)

    def settle(self) -> None:
        """Takes over the states that earlier plans store. Call it when a plan begins."""
        for held in [each for each in self._held.values() if each.ready]:
            self._copies.append(StateCopy(held.source, held.seq.slot))
            self._let_go(held)
        due, self._due = self._due, []
        for each in due:
            self._take(each)

    def _take(self, due: _Due) -> None:
        """Makes a stored state findable, unless another row of the plan has stored the same."""
        content = due.content
        if due.slot is not None and content is not None and content not in self._found:
            self._found[content] = _Snapshot(due.slot, due.uses or 0)
            if due.uses is None:
                self._spare[content] = None
        elif due.slot is not None:
            self._give_back(due.slot)
        if content is None or content not in self._found:
            return
        self._used(content, again=due.uses is None)
        if due.ends:
            self._ends.add(content)

    def _leave_origin(self, seq: Sequence, content: bytes) -> None:
        """Reports that the sequence has a snapshot after the one it continued from."""
        origin = self._origin.pop(seq.id, content)
        if origin != content and origin in self._found and self._found[origin].uses < 2:
            self._spare[origin] = None

    def _used(self, content: bytes, *, again: bool = False) -> None:
        """Makes a snapshot the last to be evicted; with `again`, the last of its kind."""
        self._found.move_to_end(content)
        if content in self._spare:
            if again:
                self._spare.move_to_end(content)
            else:
                del self._spare[content]

    @property
    def _in_order(self) -> list[bytes]:
        """All snapshots that can be found, in order of eviction."""
        return [*self._spare, *(each for each in self._found if each not in self._spare)]

    def _make_room(self, order: Iterable[bytes]) -> int | None:
        """Returns a slot for a snapshot; None if all are held or none in `order` can be evicted."""
        if self._free:
            return self._free.pop()
        content = self._oldest(order, self._kept)
        if content is None:
            return None
        self._evicted(content)
        return self._remove(content)

    def _oldest(self, order: Iterable[bytes], taken: set[int]) -> bytes | None:
        """Returns the first snapshot to evict whose slot is not in `taken`."""
        return next((each for each in order if self._found[each].slot not in taken), None)

    def _remove(self, content: bytes) -> int:
        self._spare.pop(content, None)
        return self._found.pop(content).slot

    def _evicted(self, content: bytes) -> None:
        for told in self.on_evict:
            told(self._found[content].slot, content)

    def longest(
        self, hashes: list[bytes], count: int, elsewhere: Callable[[bytes], bool] | None = None
    ) -> int:
        """Returns the most pages, up to `count`, that end at a snapshot.

        Args:
          elsewhere: whether a lower tier has a snapshot that the device lacks, by its hash.
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
        """Slots of the snapshots that can be found."""
        return {each.slot for each in self._found.values()}

    @property
    def _unreserved(self) -> set[int]:
        """Slots that `reserve` must not use. Loaded state is written before the copies of the next
        plan, and some of those copies may still read these slots."""
        return self._kept.union(*self._copies)

    def reserve(self) -> int:
        """Returns a slot for a loaded snapshot; requires `can_reserve`. The caller owns it until
        `release`."""
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
        """Reports that moves launched before the next plan complete the snapshot in a reserved
        slot."""
        if content not in self._found:
            self._found[content] = _Snapshot(slot, uses=0)

    def release(self, slot: int) -> None:
        """Gives back a reserved slot. A snapshot that has arrived stays."""
        self._arriving.discard(slot)
        self._give_back(slot)

    def restore(self, content: bytes, seq: Sequence) -> None:
        """Copies the snapshot of the page with this hash to the sequence's slot."""
        self._copies.append(StateCopy(self._goes_on(content, seq), seq.slot))

    def restore_later(self, content: bytes, seq: Sequence) -> None:
        """Does the same as `restore` once the tokens before `Sequence.skip_from` are computed."""
        self._held[seq.id] = _Held(seq, self._goes_on(content, seq))

    def _goes_on(self, content: bytes, seq: Sequence) -> int:
        """Reports that a sequence continues from a snapshot. Returns the slot of the snapshot."""
        found = self._found[content]
        found.uses += 1
        self._used(content)
        self._origin[seq.id] = content
        return found.slot

    @property
    def _kept(self) -> set[int]:
        """Slots in use, whether or not their snapshots can be found."""
        stored = {each.slot for each in self._due if each.slot is not None}
        return {each.source for each in self._held.values()} | self._arriving | stored

    def _let_go(self, held: _Held) -> None:
        del self._held[held.seq.id]
        self._give_back(held.source)

    def _give_back(self, slot: int) -> None:
        """Frees the slot if it is neither held, nor found, nor reserved."""
        if slot not in self._kept and slot not in self._slots:
            self._free.append(slot)

    def drop(self, content: bytes) -> None:
        """Drops the snapshot, if any, of a page that leaves the device."""
        self._ends.discard(content)
        if content in self._found:
            self._evicted(content)
            self._give_back(self._remove(content))

    def freed(self, seq: Sequence) -> None:
        """Reports that the sequence gives its slot back."""
        self._origin.pop(seq.id, None)
        self._junction.pop(seq.id, None)
        if (held := self._held.get(seq.id)) is not None:
            self._let_go(held)

    def forget(self) -> None:
        """Drops all snapshots: no earlier result may be found any more."""
        for content in list(self._found):
            self._give_back(self._remove(content))
        self._ends.clear()
        self._due = [each._replace(content=None) for each in self._due]
        self._copies.clear()

    def take_copies(self) -> tuple[StateCopy, ...]:
        """Returns the copies for the complete plan, in order."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def check(self) -> None:
        """Raises AssertionError unless each slot is free or holds one snapshot."""
        slots = sorted([*self._free, *self._kept.union(self._slots)])
        assert slots == list(range(self._first_slot, self._first_slot + self.num_total))
        assert self._spare.keys() <= self._found.keys()
