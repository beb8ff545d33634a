"""What a scheduler tells of its pages, and what its admissions found at which moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxserve.kv_events.events import CacheEvent, Cleared, Sink
from jaxserve.kv_events.wire import encode
from jaxserve.scheduler import Scheduler
from tests.kv_events.router import Index
from tests.kv_events.wire_schema import Event, decode


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
    request: str


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
                    request=seq.request_id,
                )
            )
            return allocate(seq, hit)

        kv_cache.allocate = watched

    def _held_back(self, events: Any) -> int:
        return size(events._recorded) + sum(map(size, events._in_flight))

    def failed(self) -> None:
        """What was held back will not be told: nobody can know what these admissions found."""
        self.admissions = [each for each in self.admissions if each.after <= self.told]


class Prediction:
    """Predicts admissions, each at its moment, while events come."""

    def __init__(
        self, admissions: Iterable[Admission], index: Index, done: int = 0, *, exact: bool = True
    ):
        """
        Args:
          done: changes that the index knows already; admissions before are left out.
          exact: false where events do not suffice, because every group has a window.
        """
        self._admissions = iter([each for each in admissions if each.after >= done])
        self._following = next(self._admissions, None)
        self._index, self._exact = index, exact
        self.done = done
        self.predicted = self.found = 0
        """Admissions so far, and tokens that they found."""

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            for change in self._index.changes(event):
                self.admit()
                self._index.apply(change)
                self.done += 1

    def admit(self) -> None:
        """Those whose moment is now."""
        while (each := self._following) is not None and each.after == self.done:
            expected = self._index.predict(each.tokens, each.salt, most=each.most)
            assert expected == each.found or not self._exact, each
            self.predicted += 1
            self.found += each.found
            self._following = next(self._admissions, None)

    def end(self) -> None:
        self.admit()
        assert self._following is None, "the events end before it"


def check_predictions(watch: Watch, index: Index, *, exact: bool = True) -> int:
    """Rebuild the index from the bytes of all batches and predict every admission. Returns how many
    tokens were found."""
    prediction = Prediction(watch.admissions, index, exact=exact)
    for batch in watch.batches:
        prediction.take(decode(encode(1.8e9, batch, array=False)))
    prediction.end()
    return prediction.found
