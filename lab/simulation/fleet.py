"""Replicas behind a router, on simulated time: each has the real scheduler and measured step times.

A router sees what it would see of a running fleet: requests that it sent and their first tokens;
what pages each replica has, as its KV events tell; and metrics that it scraped some time ago. A
replica's clock may be part of a step ahead of the router's, because a step that was launched ends.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.scheduler import prefix
from jaxserve.scheduler.prefix import page_hashes
from jaxserve.step_times import StepTimes
from lab.simulation.simulator import STOP, Arrival, Outcome, Simulator


class Sent(NamedTuple):
    """A request before it has a prompt: its first tokens are of its tenant, the others its own."""

    number: int
    at: float
    """Seconds."""
    tenant: int
    shared: int
    """Tokens of the tenant's prefix."""
    own: int
    """Tokens after them."""
    output: int
    """Tokens of the answer."""

    @property
    def prompt(self) -> tuple[int, ...]:
        return (self.tenant,) * self.shared + (1_000_000 + self.number,) * self.own


type Shape = Callable[[random.Random], tuple[int, int, int, int]]
"""Draws tenant, shared tokens, own tokens, and tokens of the answer."""


class Metrics(NamedTuple):
    """What a replica's /metrics said when it was scraped last."""

    waiting: int
    usage: float
    """Share of the pages that running sequences hold."""


class Query(NamedTuple):
    """A request as a router sees it."""

    sent: Sent
    hashes: tuple[bytes, ...]
    """Of the full pages of its prompt."""
    page_size: int

    @property
    def tokens(self) -> int:
        return self.sent.shared + self.sent.own


class Router(Protocol):
    def choose(self, query: Query, replicas: Sequence[Replica]) -> int:
        """Returns the number of the replica that gets the request."""
        ...


class InFlight(NamedTuple):
    """A request that has not ended, as the router that sent it counts it."""

    outcome: Outcome
    new_tokens: int
    """Prompt tokens that the replica's cache did not have when it was sent."""
    hashes: tuple[bytes, ...]


class Replica:
    """A simulated server and the router's books about it."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, times: StepTimes):
        self.simulator = Simulator(config, cache, times)
        self.open: list[InFlight] = []
        self.held = Counter[bytes]()
        """Pages of prompts in flight: how many requests have each."""
        self.metrics = Metrics(0, 0.0)

    def advance(self, now: float) -> None:
        """Serve until the clock says so."""
        self.simulator.run((), until=now)
        going = list[InFlight]()
        for each in self.open:
            if not each.outcome.ended:
                going.append(each)
                continue
            self.held.subtract(each.hashes)
            arrival = each.outcome.arrival  # long prompts of all requests would fill the memory
            short = dataclasses.replace(arrival.request, prompt=(0,))
            each.outcome.arrival = dataclasses.replace(arrival, request=short)
        if len(going) < len(self.open):
            self.open = going
            self.held += Counter[bytes]()  # leaves out what nobody has

    def send(self, query: Query) -> Outcome:
        """Returns what the request will experience here."""
        sent, prompt = query.sent, query.sent.prompt
        new_tokens = len(prompt) - self.matched(query)
        params = SamplingParams(max_tokens=sent.output, stop_token_ids=frozenset({STOP}))
        request = Request(id=str(sent.number), prompt=prompt, params=params)
        arrival = Arrival(at=sent.at, request=request, output=sent.output)
        outcome = self.simulator.send(arrival)
        self.open.append(InFlight(outcome, new_tokens, query.hashes))
        self.held.update(query.hashes)
        return outcome

    def scrape(self) -> None:
        scheduler = self.simulator.scheduler
        pages = scheduler.pages
        self.metrics = Metrics(scheduler.num_waiting, 1 - pages.num_free / pages.num_total)

    def matched(self, query: Query) -> int:
        """Returns the tokens of the prompt whose pages are in the replica's cache, from the
        beginning."""
        return len(self.simulator.scheduler.pages.find(query.hashes)) * query.page_size

    @property
    def prefilling(self) -> int:
        """Prompt tokens to compute of requests without a first token."""
        return sum(each.new_tokens for each in self.open if not each.outcome.tokens)


def serve(
    traffic: Iterable[Sent],
    router: Router,
    replicas: Sequence[Replica],
    *,
    page_size: int,
    scrape_every: float = 0.05,
) -> Iterator[tuple[Sent, int, Outcome]]:
    """Send all requests in the order of time, and serve them to the end.

    Args:
      scrape_every: seconds between two looks at the replicas' metrics; 0.05 is llm-d's.

    Yields: each request, the number of its replica, and what it experienced, once all have ended.
    """
    scraped, done = -1.0, list[tuple[Sent, int, Outcome]]()
    root = prefix.root("", "")  # of no salt
    for sent in traffic:
        for replica in replicas:
            replica.advance(sent.at)
        if sent.at - scraped >= scrape_every:
            scraped = sent.at
            for replica in replicas:
                replica.scrape()
        query = Query(sent, tuple(page_hashes(root, sent.prompt, page_size)), page_size)
        number = router.choose(query, replicas)
        done.append((sent, number, replicas[number].send(query)))
    for replica in replicas:
        replica.advance(float("inf"))
    yield from done


def poisson(rate: float, seconds: float, seed: int, shape: Shape) -> list[Sent]:
    """Returns requests that come `rate` times a second on average for so many seconds."""
    rng, now, sent = random.Random(seed), 0.0, list[Sent]()
    while (now := now + rng.expovariate(rate)) < seconds:
        sent.append(Sent(len(sent), now, *shape(rng)))
    return sent
