"""Who waits, and who is next."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from jaxserve.scheduler.sequence import Sequence


class WaitingQueue:
    """Sequences in the order of their `rank`: new ones, and preempted ones at their old place."""

    def __init__(self) -> None:
        self._order: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._order)

    def push(self, seq: Sequence) -> None:
        insort(self._order, seq, key=_rank)

    def remove(self, seq: Sequence) -> None:
        self._order.remove(seq)

    def first(self) -> Sequence | None:
        return self._order[0] if self._order else None


def _rank(seq: Sequence) -> tuple[float, int]:
    return seq.rank
