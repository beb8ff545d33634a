"""What a scheduler tells of its pages, and what its admissions found at which moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxserve.kv_events.events import CacheEvent, Cleared, Sink
from jaxserve.kv_events.wire import encode
from jaxserve.scheduler import Scheduler
from tests.kv_events.router import Index
from tests.kv_events.wire_schema import decode


class Admission(NamedTuple):
    """A sequence that was admitted, or admitted again."""

    after: int
    """Changes of pages that had happened."""
    tokens: tuple[int, ...]
    salt: str
    most: int
    """Tokens that it was allowed to find."""
    found: int
    again: bool


def size(events: Iterable[CacheEvent]) -> int:
    """How many changes of pages these events are."""
    return sum(1 if isinstance(event, Cleared) else len(event.hashes) for event in events)


class Watch:
    """Use `sink` for a scheduler, then `follow` it."""

    def __init__(self, forward: Sink = lambda events: None):
        self.batches: list[list[CacheEvent]] = []
        self.admissions: list[Admission] = []
        self.told = 0
        self._forward = forward

    def sink(self, events: list[CacheEvent]) -> None:
        self.batches.append(list(events))
        self.told += size(events)
        self._forward(events)

    def follow(self, scheduler: Scheduler) -> None:
        kv_cache: Any = scheduler._kv_cache  # pyright: ignore[reportPrivateUsage]
        allocate: Callable[..., Any] = kv_cache.allocate
        own = kv_cache._own_tokens

        def watched(seq: Any, hit: Any) -> Any:
            found = hit.length * kv_cache.page_size - own if hit.length else 0
            self.admissions.append(
                Admission(
                    self.told + self._held_back(kv_cache._events),
                    tuple(seq.tokens),
                    seq.salt,
                    seq.max_cached_tokens,
                    found,
                    again=seq.admitted >= 0,
                )
            )
            return allocate(seq, hit)

        kv_cache.allocate = watched

    def _held_back(self, events: Any) -> int:
        return size(events._recorded) + sum(map(size, events._in_flight))

    def failed(self) -> None:
        """What was held back will not be told: nobody can know what these admissions found."""
        self.admissions = [each for each in self.admissions if each.after <= self.told]


def check_predictions(
    watch: Watch, index: Index, *, array: bool = False, exact: bool = True
) -> int:
    """Rebuild the index from the bytes of all batches, and predict every admission at its moment.
    Returns how many tokens were found.

    Args:
      exact: false where events do not suffice, because every group has a window.
    """
    admissions, done, found = iter(watch.admissions), 0, 0
    following = next(admissions, None)
    for batch in watch.batches:
        for event in decode(encode(1.8e9, batch, array=array), array=array):
            for change in index.changes(event):
                while following is not None and following.after == done:
                    assert not exact or predicted(index, following) == following.found
                    found += following.found
                    following = next(admissions, None)
                index.apply(change)
                done += 1
    while following is not None:
        assert following.after == done
        assert not exact or predicted(index, following) == following.found
        found += following.found
        following = next(admissions, None)
    return found


def predicted(index: Index, admission: Admission) -> int:
    return index.predict(admission.tokens, admission.salt, most=admission.most)
