"""Pages that only the disk has: what a load of them should take, and reads ahead of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api import Request, SamplingParams
from jaxserve.config import CacheConfig, HostTierConfig, SchedulerConfig
from jaxserve.scheduler.load_rates import FIXED_SECONDS, Decision, LoadRates
from jaxserve.scheduler.sequence import Sequence
from tests.scheduler.fake_host import Faults, Page, TierLoop

CONFIG = HostTierConfig(slots=9, page_bytes=(100,), store_ring=4, load_ring=4, lookahead=2)
RATES = st.floats(1e8, 1e11)


@settings(max_examples=30)
@given(RATES, RATES, st.lists(st.booleans(), min_size=20, max_size=20))
def test_rates_of_memory_and_disk_are_learned_apart(
    memory: float, disk: float, from_disk: list[bool]
) -> None:
    """However loads from either mix."""
    rates, size = LoadRates(CONFIG), 10**9
    for each in [*from_disk, *[False, True] * 40]:
        there = size if each else 0
        rates.learn(size, there, FIXED_SECONDS + size / memory + there / disk)
    assert rates.seconds(size, 0) == pytest.approx(FIXED_SECONDS + size / memory, rel=0.05)
    both = FIXED_SECONDS + size / memory + size / disk
    assert rates.seconds(size, size) == pytest.approx(both, rel=0.05)


def test_a_load_from_disk_says_nothing_about_memory_and_one_slow_load_little() -> None:
    rates = LoadRates(CONFIG)
    before = rates.seconds(10**9, 0)
    rates.learn(10**9, 10**9, 100.0)
    assert rates.seconds(10**9, 0) == before
    rates.learn(10**9, 0, 100.0)
    assert before < rates.seconds(10**9, 0) < 2 * before


def test_what_does_not_seem_to_pay_is_tried_again() -> None:
    rates = LoadRates(CONFIG)
    for _ in range(30):
        rates.learn(10**9, 10**9, 100.0)

    def decision() -> Decision:
        return Decision(1000, 10**9, 10**9, rates.seconds(10**9, 10**9), prefill_seconds=0.5)

    refused = 0
    while not decision().pays:
        rates.refused(decision())
        refused += 1
        assert refused < 1000
    assert refused > 3
    assert Decision(1000, 1, 1, 1e9, prefill_seconds=None).pays


def request(name: str, *prompt: int, max_tokens: int = 1) -> Request:
    return Request(id=name, prompt=prompt, params=SamplingParams(max_tokens=max_tokens))


KEPT = (1, 2, 3, 0) * 5


def loop_with_files(max_num_seqs: int) -> TierLoop:
    """Its disk alone has the pages of KEPT."""
    files: dict[bytes, Page] = {}

    def start() -> TierLoop:
        return TierLoop(
            SchedulerConfig(max_num_seqs=max_num_seqs, max_model_len=64, max_num_batched_tokens=24),
            CacheConfig(num_pages=12, page_size=4),
            host_slots=40,
            ring=8,
            faults=Faults(late=0.0),
            files=files,
        )

    before = start()
    for number in range(4):
        prompt = (*(2, number, 3, 1) * 5, 1, 2) if number else (*KEPT, 1)
        before.add(request(f"r{number}", *prompt))
        end(before)
    before.drain()
    assert len(files) >= 10
    return start()


def end(loop: TierLoop) -> None:
    """Until nobody runs or waits."""
    for _ in range(500):
        loop.launch()
        while loop.in_flight:
            loop.commit()
        if not loop.scheduler.has_work:
            return
    raise AssertionError("no progress")


def test_pages_on_disk_are_read_while_their_request_waits_for_its_turn() -> None:
    loop = loop_with_files(max_num_seqs=1)
    loop.add(request("runs", 3, 3, 2, max_tokens=30))
    assert loop.launch() is not None
    loop.add(request("waits", *KEPT, 1, 2))
    assert loop.disk is not None and not loop.disk.reads
    while len(loop.tier.index) < len(KEPT) // 4:
        assert loop.launch() is not None, "they are not read"
        loop.commit()
    reads = loop.disk.reads
    assert reads == len(KEPT) // 4 and "waits" not in loop.over
    end(loop)
    assert loop.disk.reads == reads, "admission found them in memory"
    assert loop.observer.tokens == {"host": len(KEPT)}
    loop.drain()


def test_whose_turn_comes_at_once_has_its_load_and_no_read_ahead() -> None:
    loop = loop_with_files(max_num_seqs=2)
    loop.add(request("again", *KEPT, 1, 2))
    end(loop)
    assert loop.tier._prefetch.pages == 0  # pyright: ignore[reportPrivateUsage]
    assert loop.disk is not None and loop.disk.reads == len(KEPT) // 4
    assert loop.observer.tokens == {"disk": len(KEPT)}
    loop.drain()


def test_what_is_in_memory_is_loaded_even_if_the_rest_is_not_worth_reading() -> None:
    loop = loop_with_files(max_num_seqs=2)
    loop.add(request("reads all", *KEPT, 1, 2))
    end(loop)
    loop.drain()
    begin, tier = loop.tier.begin, loop.tier

    def begin_with_slow_disk(seq: Sequence, cached: int, prefill_rate: float | None) -> bool:
        tier._loads.rates._disk = 100.0  # pyright: ignore[reportPrivateUsage]
        for content in seq.page_hashes(len(KEPT) // 4, 4)[3:]:
            tier.index.discard(content)
        return begin(seq, cached, 1000.0)

    loop.tier.begin = begin_with_slow_disk
    for pool in loop.scheduler.pools:
        pool.forget()
    loop.observer.tokens.clear()
    loop.add(request("again", *KEPT, 1, 2))
    end(loop)
    assert loop.observer.tokens == {"host": 12}, "three pages"
    loop.drain()
