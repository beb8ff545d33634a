"""Conversations in turn, of which the device holds a fifth: what leaves it is on the host in time.

Steps take long beside copies here, as those of prompts do on a card, and a plan is made while the
step before it runs. So a slot of the store ring is free again two turns later, and everything is
counted in turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest import mock

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from tests.scheduler import fake_host
from tests.scheduler.fake_host import Ended, FakeCopier, Faults, Job, TierLoop

PAGE, STEP_PAGES = 4, 8
CHATS, HELD, CHAT_PAGES, TURNS = 50, 10, 23, 3


class TurnCopier(FakeCopier):
    """Loads end with the next turn, stores with the second: the step before which they are launched
    waits for one that runs, and they are on their way when the next one is planned."""

    turn = 0

    def __init__(self, *args: object):
        super().__init__(*args)  # pyright: ignore[reportArgumentType]
        self._due: dict[int, int] = {}

    def begin(
        self,
        tag: int,
        do: Callable[[], None],
        spoil: Callable[[], None],
        ready: Callable[[], bool] | None = None,
    ) -> None:
        do()
        self.jobs[tag] = Job(do, spoil, lambda: True)
        self._due[tag] = self.turn + (1 if ready is None else 2)

    def poll(self) -> list[Ended]:
        ended = [tag for tag, due in self._due.items() if due <= self.turn]
        for tag in ended:
            del self.jobs[tag], self._due[tag]
        return [Ended(tag, True, None) for tag in ended]


def chats_in_turn(ring: int) -> tuple[TierLoop, float]:
    """Returns the loop, and the share of known tokens that later turns of chats did not compute."""
    config = SchedulerConfig(
        max_num_seqs=2,
        max_model_len=(CHAT_PAGES + TURNS + 1) * PAGE,
        max_num_batched_tokens=STEP_PAGES * PAGE,
    )
    cache = CacheConfig(num_pages=HELD * (CHAT_PAGES + 2) + 1, page_size=PAGE)
    with mock.patch.object(fake_host, "FakeCopier", TurnCopier):
        slots = 2 * CHATS * CHAT_PAGES
        loop = TierLoop(config, cache, host_slots=slots, ring=ring, faults=Faults(late=0.0))
    loop.scheduler.check = lambda: None
    chosen, known, found = random.Random(0), 0, 0

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(chosen.randrange(4) for _ in range(count))

    said = [tokens(CHAT_PAGES * PAGE) for _ in range(CHATS)]
    for turn in range(TURNS):
        for chat in range(CHATS):
            prompt, hit = said[chat] + tokens(PAGE), loop.hit_tokens
            name = f"{turn} of {chat}"
            loop.add(Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=1)))
            serve(loop)
            if turn:
                known, found = known + len(said[chat]), found + loop.hit_tokens - hit
            said[chat] = prompt
    return loop, found / known


def serve(loop: TierLoop) -> None:
    while loop.scheduler.has_work:
        loop.copier.turn += 1  # pyright: ignore[reportAttributeAccessIssue]
        if loop.launch() is None and loop.in_flight:
            loop.commit()
        while len(loop.in_flight) > 1:
            loop.commit()


def test_later_turns_of_chats_find_what_the_device_has_evicted() -> None:
    """With the ring of `plan_rings`: two steps."""
    loop, share = chats_in_turn(2 * STEP_PAGES)
    assert share > 0.95, "in whole pages"
    assert not loop.observer.skipped, "nothing was lost"
    assert loop.copier.stores < CHATS * (CHAT_PAGES + 2 * TURNS), "each page once"


def test_a_ring_of_less_than_a_step_loses_pages_and_counts_them() -> None:
    loop, share = chats_in_turn(STEP_PAGES // 2)
    assert share < 0.9 and loop.observer.skipped["ring full"]
