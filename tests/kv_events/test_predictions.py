"""Over real sockets: what a router rebuilds from events says of each of 10,000 requests exactly how
many tokens it finds, through evictions, preemptions, failures, resets and new weights; for a router
that loses messages, and for one that starts when the ring has rolled over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import pytest

from jaxserve.api import Request, SamplingParams, TokenEvent
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.kv_events.publisher import ZmqPublisher
from jaxserve.plan import Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from tests.kv_events.engines import PAGE, publishing, subscribed
from tests.kv_events.router import Index, Numbered, Subscriber
from tests.kv_events.watch import Prediction, Watch
from tests.scheduler.loop import Optimist

REQUESTS = 10_000
RING = 100
CONFIG = SchedulerConfig(
    max_num_seqs=12, max_model_len=64, max_num_batched_tokens=48, max_queued=10**6, policy="fcfs"
)
CACHE = CacheConfig(num_pages=81, page_size=PAGE)


def requests(random: Random, over: deque[list[int]]) -> Iterator[Request]:
    """Prompts that begin alike, often as an earlier one and its answer did."""
    documents = [[random.randrange(50) for _ in range(random.randrange(2, 30))] for _ in range(12)]
    for number in range(REQUESTS):
        head = random.choice(over if over and random.random() < 0.4 else documents)
        tail = [random.randrange(50) for _ in range(random.randrange(1, 6))]
        yield Request(
            id=f"r{number}",
            prompt=(*head[: random.randrange(1, 40)], *tail),
            params=SamplingParams(max_tokens=random.choice([1, 2, 5, 12, 16])),
            cache_salt=random.choice(["", "", "", "a", "b"]),
        )


class Engine:
    """A scheduler one step ahead, whose tokens are drawn."""

    def __init__(self, publisher: ZmqPublisher, seed: int):
        self.random = Random(seed)
        self.watch = Watch(publisher.publish)
        self.scheduler = Scheduler(CONFIG, CACHE, lengths=Optimist(), cache_events=self.watch.sink)
        self.watch.follow(self.scheduler)
        self.over: deque[list[int]] = deque(maxlen=30)
        self.cached: dict[str, int] = {}
        self.submitted = 0
        self._requests = requests(self.random, self.over)
        self._in_flight: StepPlan | None = None
        self._texts: dict[str, list[int]] = {}

    def step(self) -> bool:
        """Returns False when all requests are over."""
        while self.submitted < REQUESTS and self.scheduler.num_waiting < 6:
            request = next(self._requests)
            self.scheduler.add(request)
            self._texts[request.id] = list(request.prompt)
            self.submitted += 1
        if self.random.random() < 0.01 and self._texts:
            request_id = self.random.choice(list(self._texts))
            self.scheduler.abort(request_id)
            del self._texts[request_id]
        plan = self.scheduler.plan()
        self.finish()
        self._in_flight = plan
        return self.scheduler.has_work

    def finish(self) -> None:
        plan, self._in_flight = self._in_flight, None
        if plan is not None:
            draw = self.random.randrange
            sampled = [Sampled(draw(3)) if row.samples else None for row in plan.rows]
            self._take(self.scheduler.commit(plan, sampled))

    def fail(self) -> None:
        if self._in_flight is not None:
            self.watch.failed()
            self._take(self.scheduler.fail([self._in_flight]))
            self._in_flight = None

    def swap_weights(self, *, restart: bool) -> None:
        """As the engine does between two steps."""
        self.finish()
        if restart:
            self.scheduler.restart()
        self.scheduler.reset_prefix_cache()

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.start is not None:
                self.cached[event.request_id] = event.cached_tokens
            if event.token is not None:
                self._texts[event.request_id].append(event.token)
            if event.finish is not None:
                self.over.append(self._texts.pop(event.request_id))


@pytest.mark.slow
def test_an_index_predicts_the_cached_tokens_of_10_000_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jaxserve.kv_events.publisher._MERGED", 0.0)  # many small batches
    with ExitStack() as stack:
        publisher = stack.enter_context(publishing(buffer_steps=RING))
        engine = Engine(publisher, seed=1)
        router = stack.enter_context(subscribed(publisher))
        live, late = list[Numbered](), list[Numbered]()
        lossy = Random(2)
        late_router: Subscriber | None = None
        milestones = iter((2_000, 3_500, 5_000, 6_500, 8_000, REQUESTS + 1))
        milestone = next(milestones)
        while engine.step():
            time.sleep(0.0002)  # as while a device computes: the publisher's threads get their turn
            if milestone == 5_000 and publisher.num_batches <= RING:
                pass  # the late router comes once the first batches have left the ring
            elif engine.submitted >= milestone:
                if milestone == 2_000:
                    engine.swap_weights(restart=True)
                elif milestone == 3_500:
                    engine.fail()
                elif milestone == 5_000:
                    late_router = stack.enter_context(subscribed(publisher))
                    late += late_router.replay()
                elif milestone == 6_500:
                    engine.swap_weights(restart=False)
                else:
                    engine.scheduler.reset_prefix_cache()
                milestone = next(milestones)
            live += received(router, lossy)
            if publisher.num_batches > router.last + RING // 4:
                live += router.replay()  # or what it missed would have left the ring
            if late_router is not None:
                late += late_router.receive()
                if publisher.num_batches > late_router.last + RING // 4:
                    late += late_router.replay()
        engine.finish()
        assert late_router is not None
        while sum(map(changes, live)) < engine.watch.told:
            live += router.replay()
        late += late_router.replay()
        check(engine, live, late, replays=router.replays)


def changes(batch: Numbered) -> int:
    """How many changes of pages the batch tells of."""
    return sum(len(getattr(event, "block_hashes", " ")) for event in batch.events)


def received(router: Subscriber, random: Random) -> Iterator[Numbered]:
    """What comes live, of which the network loses some."""
    while router.poll():
        number, payload = router.next_live()
        if random.random() < 0.9:
            yield from router.take(number, payload)


def check(engine: Engine, live: list[Numbered], late: list[Numbered], *, replays: int) -> None:
    watch = engine.watch
    first = {each.request: each.found for each in reversed(watch.admissions) if not each.again}
    assert len(first) > REQUESTS * 0.97, "all but those that were aborted or failed early"
    told = [request for request in engine.cached if request in first]
    assert all(engine.cached[request] == first[request] for request in told)
    prediction = Prediction(watch.admissions, Index(page_size=PAGE))
    through: dict[int, int] = {}
    for number, events in live:
        prediction.take(events)
        through[number] = prediction.done
    prediction.end()
    assert prediction.done == watch.told and prediction.predicted == len(watch.admissions)
    assert replays > 10, "messages were lost"
    # The late one begins with everything that was cached under number 0.
    assert late[0].number == 0 and len(late[0].events) > 1
    index = Index(page_size=PAGE)
    Prediction([], index).take(late[0].events)
    empty = [each.number for each in late if not each.events]
    assert empty and empty == list(range(1, empty[-1] + 1))
    behind = Prediction(watch.admissions, index, done=through[empty[-1]])
    for each in late[len(empty) + 1 :]:
        behind.take(each.events)
    behind.end()
    assert 3_000 < behind.predicted < prediction.predicted
    # It was no idle walk.
    print(
        engine.scheduler.num_preemptions,
        sum(e.again for e in watch.admissions),
        prediction.found,
        replays,
        behind.predicted,
        len(live),
    )
    again = sum(each.again for each in watch.admissions)
    assert engine.scheduler.num_preemptions > 200 and again > 200
    removed = sum(type(e).__name__ == "BlockRemoved" for _, events in live for e in events)
    assert removed > 1_000 and prediction.found > 2 * REQUESTS
