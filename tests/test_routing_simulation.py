"""Routers choose as their sources say, and the fleet that they choose from serves everything."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.step_times import StepTimes
from lab.simulation.fleet import Metrics, Query, Replica, Sent, poisson, serve
from lab.simulation.routers import CacheAware, Dynamo, LeastLoaded, LlmD, PrefixAware, routers
from lab.simulation.routing_report import FILE, table
from lab.simulation.simulate_routing import TRAFFIC

PAGE = 16
NAMES = tuple(routers(1.0))
TIMES = StepTimes(decode={1: 4e-3, 8: 5e-3}, mixed={64: 6e-3, 256: 12e-3})


def query(number: int, pages: int = 10, own: int = 0) -> Query:
    """A prompt of so many pages of its tenant, and pages of its own."""
    shared = [b"%d:%d" % (number, page) for page in range(pages)]
    hashes = (*shared, *(b"own:%d" % page for page in range(own)))
    sent = Sent(number, 0.0, number, pages * PAGE, own * PAGE, 1)
    return Query(sent, hashes, PAGE)


def replica(
    *, load: int = 0, cached: int = 0, prefilling: int = 0, waiting: int = 0, usage: float = 0.0
) -> Any:
    """What routers look at. `cached`: tokens of any prompt that are in the cache."""
    return SimpleNamespace(
        open=[None] * load,
        held=Counter({b"held:%d" % page: 1 for page in range(load)}),
        matched=lambda _: cached,
        prefilling=prefilling,
        metrics=Metrics(waiting, usage),
    )


def choices(router: Any, replicas: list[Any], asked: Query, times: int = 20) -> set[int]:
    return {router.choose(asked, replicas) for _ in range(times)}


def test_least_loaded_takes_any_of_the_emptiest() -> None:
    fleet = [replica(load=3), replica(load=1), replica(load=1)]
    assert choices(LeastLoaded(random.Random(1)), fleet, query(1)) == {1, 2}


def test_prefixaware_stays_however_long_the_queue_is() -> None:
    router, fleet = PrefixAware(random.Random(1)), [replica() for _ in range(4)]
    first = router.choose(query(1), fleet)
    fleet[first] = replica(load=1000, waiting=1000)
    assert choices(router, fleet, query(1)) == {first}
    assert len(choices(router, fleet, query(2, pages=1), times=1)) == 1


def test_cache_aware_stays_until_the_loads_are_far_apart() -> None:
    router, fleet = CacheAware(random.Random(1)), [replica(), replica()]
    first = router.choose(query(1), fleet)
    for load, stays in ((64, True), (65, False)):
        fleet[first] = replica(load=load)
        assert choices(router, fleet, query(1), times=1) == {first if stays else 1 - first}
    # What was sent elsewhere meanwhile is remembered there.
    fleet[first] = replica(load=0)
    assert choices(router, fleet, query(1), times=1) == {1 - first}


def test_cache_aware_needs_a_part_of_the_prompt() -> None:
    router, fleet = CacheAware(random.Random(1)), [replica(), replica()]
    first = router.choose(query(1, pages=3), fleet)
    fleet[first] = replica(load=1)
    assert router.choose(query(1, pages=3, own=7), fleet) == 1 - first  # 30 %, not more
    fleet = [replica(), replica()]
    router = CacheAware(random.Random(1))
    first = router.choose(query(1, pages=4), fleet)
    fleet[first] = replica(load=1)
    assert router.choose(query(1, pages=4, own=6), fleet) == first


def test_llm_d_keeps_to_warm_replicas_unless_they_are_seconds_late() -> None:
    router = LlmD(random.Random(1), prefill_rate=1000.0)
    warm = {"cached": 8 * PAGE, "waiting": 9, "usage": 0.9}
    assert choices(router, [replica(), replica(**warm, prefilling=18_000)], query(1)) == {1}
    assert choices(router, [replica(), replica(**warm, prefilling=18_001)], query(1)) == {0}


def test_llm_d_weighs_queue_usage_and_prefix() -> None:
    router = LlmD(random.Random(1), prefill_rate=1000.0)
    half = replica(cached=5 * PAGE, waiting=3)  # 0 + 2 + 1.5
    assert choices(router, [replica(waiting=3), half], query(1)) == {1}
    assert choices(router, [replica(waiting=0), half], query(1)) == {0}  # 2 + 2 + 0
    assert choices(router, [replica(waiting=0, usage=0.3), half], query(1)) == {1}  # 2 + 1.4


def test_dynamo_adds_what_is_to_prefill_and_what_decodes() -> None:
    router, asked = Dynamo(random.Random(1)), query(1)
    warm = replica(cached=8 * PAGE, load=7)  # 2 pages to prefill, 7 + 10 held
    assert choices(router, [replica(), warm], asked) == {1}  # 10 to prefill, 10 held
    assert choices(router, [replica(), replica(cached=8 * PAGE, load=9)], asked) == {0}
    late = replica(cached=8 * PAGE, prefilling=9 * PAGE)
    assert choices(router, [replica(), late], asked) == {0}


def fleet(count: int = 3) -> list[Replica]:
    config = SchedulerConfig(max_num_seqs=8, max_model_len=1024, max_num_batched_tokens=256)
    cache = CacheConfig(num_pages=201, page_size=PAGE)
    return [Replica(config, cache, TIMES) for _ in range(count)]


def shape(rng: random.Random) -> tuple[int, int, int, int]:
    return rng.randrange(12), 320, rng.randint(10, 40), rng.randint(2, 12)


@pytest.mark.parametrize("name", routers(1.0))
def test_everything_is_served_the_same_way_every_time(name: str) -> None:
    def run() -> list[tuple[int, int, list[float]]]:
        router = routers(TIMES.prefill_rate)[name](random.Random(5))
        served = serve(poisson(60, 2, 3, shape), router, fleet(), page_size=PAGE)
        return [(place, outcome.cached, outcome.tokens) for _, place, outcome in served]

    first = run()
    assert first == run()
    assert all(tokens for _, _, tokens in first)


def hits(name: str) -> float:
    replicas, router = fleet(), routers(TIMES.prefill_rate)[name](random.Random(5))
    served = list(serve(poisson(60, 4, 3, shape), router, replicas, page_size=PAGE))
    for each in replicas:
        each.simulator.scheduler.check()
        assert not each.open and not +each.held
    tokens = sum(sent.shared + sent.own for sent, _, _ in served)
    return sum(outcome.cached for _, _, outcome in served) / tokens


def test_affinity_finds_more_in_caches_that_hold_a_part_of_the_prefixes() -> None:
    """12 prefixes of 20 pages; a replica has 200 pages, and those of running sequences go off."""
    blind = hits("random")
    assert hits("prefixaware") > blind + 0.1
    assert hits("llm-d") > blind + 0.1


def test_a_router_sees_the_pages_that_a_replica_really_has() -> None:
    """What `matched` says at the moment of sending is what the request finds."""
    seen: list[tuple[int, int]] = []

    class Watching(PrefixAware):
        def choose(self, query: Query, replicas: Any) -> int:
            chosen = super().choose(query, replicas)
            seen.append((query.sent.number, replicas[chosen].matched(query)))
            return chosen

    sent = [Sent(n, n * 1.0, n % 3, 320, 10, 2) for n in range(9)]
    served = serve(sent, Watching(random.Random(1)), fleet(), page_size=PAGE)
    assert [outcome.cached for _, _, outcome in served] == [matched for _, matched in seen]
    assert [matched for _, matched in seen] == [0] * 3 + [320] * 6


def test_the_log_shows_what_was_simulated() -> None:
    result = json.loads(FILE.read_text())
    assert result["simulated"] is True
    assert result["traffic"] == json.loads(json.dumps([asdict(each) for each in TRAFFIC]))
    points = {(each["traffic"], each["router"], each["rate"]) for each in result["points"]}
    expected = {
        (each.name, name, rate) for each in TRAFFIC for rate in each.rates for name in NAMES
    }
    assert points == expected and len(result["points"]) == len(expected)
    assert table(result) in (FILE.parents[1] / "logs" / "routing.md").read_text()


def test_the_weights_that_the_documentation_tries_were_simulated() -> None:
    """What it says of llm-d's filter and weights, at 60 requests per second."""
    result = json.loads(FILE.read_text())
    found = {
        (p["traffic"], p["router"]): p["goodput"] for p in result["variants"] if p["rate"] == 60
    }
    hot = "one hot prefix"
    assert found[hot, "llm-d, 1 s"] == found[hot, "llm-d, no filter"]
    (default,) = (
        p["goodput"]
        for p in result["points"]
        if (p["traffic"], p["router"], p["rate"]) == (hot, "llm-d", 60)
    )
    assert found[hot, "llm-d, 1 s"] == default < 25
    assert f"{found[hot, 'llm-d, no filter, prefix 1']:.1f}" == "59.5"
    assert found["many prefixes", "llm-d, no filter, prefix 1"] == 0
