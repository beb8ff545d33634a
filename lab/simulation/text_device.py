"""A device that knows what each sequence will say and how long each step takes, and no more."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxserve.api import Request, SamplingParams, TokenEvent
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.plan import Row, Sampled, StepPlan
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.verify import Verification
from jaxserve.step_times import StepTimes

type Text = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt, and what follows it."""


class Served(NamedTuple):
    """What was served until some second."""

    tokens: int
    seconds: float
    verify_steps: int
    steps: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def serve(
    texts: Callable[[random.Random], Text],
    times: StepTimes,
    verification: Verification | None,
    *,
    clients: int,
    steps: int,
    true: StepTimes | None = None,
    seed: int = 0,
    accepted: float = 0.0,
) -> Served:
    """A closed loop of so many clients over a device that is one step ahead of the host.

    Args:
      texts: draws the next request.
      times: those that the scheduler knows.
      true: those that steps take, if they differ.
      accepted: probability that a draft of a head is right if those before it are.
    """
    loop = _Loop(times, true or times, verification, clients, accepted)
    draw = random.Random(clients + 1000 * seed)
    for number in range(clients):
        loop.add(number, texts(draw))
    numbers = itertools.count(clients)
    for _ in range(steps):
        for _ in range(loop.turn()):
            loop.add(next(numbers), texts(draw))
    return Served(loop.tokens, loop.seconds, loop.verify_steps, steps)


def goodput(
    texts: Callable[[random.Random], Text],
    times: StepTimes,
    verification: Verification | None,
    *,
    slots: int,
    requests_per_s: float,
    seconds: float,
    ttft: float,
    tpot: float,
    seed: int = 1,
) -> tuple[float, float]:
    """Tokens per second of answers that came in time, and of all, of requests that come at random
    times.

    Args:
      slots: sequences that run at most.
      ttft: seconds until the first token that are in time.
      tpot: seconds per token after it, on average.
    """
    loop, draw = _Loop(times, times, verification, slots), random.Random(seed)
    arrived, firsts, lengths, good = list[float](), dict[int, float](), dict[int, int](), 0
    following = draw.expovariate(requests_per_s)
    while loop.seconds < seconds:
        while following <= loop.seconds:
            loop.add(len(arrived), texts(draw))
            arrived.append(following)
            following += draw.expovariate(requests_per_s)
        if not loop.busy:
            loop.seconds = following
            continue
        loop.turn()
        for event in loop.events:
            number = int(event.request_id)
            firsts.setdefault(number, loop.seconds)
            lengths[number] = lengths.get(number, 0) + 1
            if event.finish is not None:
                pace = (loop.seconds - firsts[number]) / max(lengths[number] - 1, 1)
                in_time = firsts[number] - arrived[number] <= ttft and pace <= tpot
                good += lengths[number] * in_time
    return good / loop.seconds, loop.tokens / loop.seconds


class _Loop:
    def __init__(
        self,
        times: StepTimes,
        true: StepTimes,
        verification: Verification | None,
        clients: int,
        accepted: float = 0.0,
    ):
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=clients,
                max_model_len=4096,
                max_num_batched_tokens=max(times.mixed),
                prefix_caching=False,
                max_queued=100_000,
            ),
            CacheConfig(num_pages=1 + clients * 64, page_size=64),
            times=times,
            verification=verification,
            clock=lambda: self.seconds,
        )
        self._true, self._right, self._draw = true, accepted, random.Random(clients)
        self.seconds = 0.0
        self.tokens = self.verify_steps = 0
        self.events: list[TokenEvent] = []
        """Of the last turn."""
        self._texts: dict[int, list[int]] = {}
        self._next_id = 0
        self._lengths: dict[int, int] = {}
        """Where each sequence's next row begins, which the host may not know yet."""
        self._flying: tuple[StepPlan, list[Sampled | None]] | None = None

    def add(self, number: int, text: Text) -> None:
        prompt, answer = text
        params = SamplingParams(max_tokens=len(answer), stop_token_ids=frozenset())
        self.scheduler.add(Request(id=str(number), prompt=prompt, params=params))
        self._texts[self._next_id] = [*prompt, *answer, *range(20)]
        self._next_id += 1

    def turn(self) -> int:
        """One step. Returns how many requests have ended."""
        plan = self.scheduler.plan()
        launched = None
        if plan is not None:
            launched = (plan, [self._compute(row) for row in plan.rows])
            took = self._true.of(plan)
            self.seconds += took
            self.scheduler.learn(plan, took)
            self.verify_steps += plan.verify
        self.events = [] if self._flying is None else self.scheduler.commit(*self._flying)
        self.tokens += len(self.events)
        self._flying = launched
        return sum(event.finish is not None for event in self.events)

    @property
    def busy(self) -> bool:
        return self.scheduler.has_work or self._flying is not None

    def _compute(self, row: Row) -> Sampled | None:
        text = self._texts[row.seq_id]
        if row.tokens:
            self._lengths[row.seq_id] = row.start + len(row.tokens)
            return Sampled(text[row.start + len(row.tokens)]) if row.samples else None
        begin = self._lengths[row.seq_id]
        tokens = [Sampled(each) for each in self._accepted(row, begin, text)]
        self._lengths[row.seq_id] = begin + len(tokens)
        return tokens[0]._replace(further=tuple(tokens[1:]))

    def _accepted(self, row: Row, begin: int, text: list[int]) -> Iterator[int]:
        yield text[begin + 1]
        asked = row.verify
        if asked is None:
            return
        if asked.drafts is None:  # a head's
            for place in range(1, min(asked.positions, asked.end - begin)):
                if self._draw.random() >= self._right:
                    return
                yield text[begin + place + 1]
            return
        drafts = asked.drafts[begin - row.start :]
        for place in range(1, min(asked.positions, asked.end - begin)):
            if place > len(drafts) or drafts[place - 1] != text[begin + place]:
                return
            yield text[begin + place + 1]
