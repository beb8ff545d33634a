"""Real copies between the runner's rings and host memory: what comes back is what was computed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from jaxserve.api import Request, SamplingParams
from jaxserve.config import HostTierConfig
from jaxserve.offload.copier import CpuCopier, Ring, RingPart
from jaxserve.offload.slab import HostSlab
from jaxserve.runner.page_moves import Rings
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.runner.state_pieces import StatePieces
from jaxserve.scheduler.host_tier import TierParts
from jaxserve_kernels.kv_format import KVFormat, named
from jaxserve_kernels.kv_format.kvarn import KVarN
from tests.runner.test_kv_formats import FEW_BUCKETS
from tests.runner.test_recurrent_models import SPECS, STATE
from tests.scheduler.fake_host import CountingObserver
from tests.scheduler.loop import Loop
from tests.tiny_model import COMPILES, make_config, make_runner

FORMATS: tuple[KVFormat, ...] = (
    named("auto"),
    named("int8"),
    named("fp8_e4m3"),
    KVarN(value_bits=2, group=4),
)
RINGS = Rings(store=5, load=3)
CONFIG = replace(
    make_config(max_model_len=24, prefill=(4, 24), num_pages=11), buckets=FEW_BUCKETS, rings=RINGS
)
_HYBRID = replace(
    make_config(spec=SPECS["attention last"], max_model_len=24, prefill=(4, 24), num_pages=11),
    buckets=FEW_BUCKETS,
    rings=RINGS,
)
HYBRID = replace(_HYBRID, cache=replace(_HYBRID.cache, **STATE))
"""Two recurrent layers: a snapshot has two pieces."""
SLOTS = 60


class Served(NamedTuple):
    runner: Runner
    config: RunnerConfig


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    config = HYBRID if request.param is None else replace(CONFIG, kv_format=request.param)
    runner = make_runner(config)
    before = COMPILES.count
    yield Served(runner, config)
    assert COMPILES.count == before, "something was compiled while serving"


class CopyingLoop(Loop):
    """The scheduler's loop on a real device, with a tier whose copies are real, or without."""

    def __init__(self, served: Served, *, tier: bool):
        runner, made = served
        config = replace(made.scheduler, max_queued=1000)
        cache = replace(made.cache, own_tokens=made.kv_format.own_tokens)
        self.observer = CountingObserver()
        self.copier: CpuCopier | None = None
        options: dict[str, TierParts] = {}
        if tier:
            each = [made.kv_format.page_bytes(made.kv_shapes[0], made.dtype)]
            if (state := made.recurrent_state) is not None:
                each.append(StatePieces.of(state).page_bytes(state))
            assert runner.mover is not None
            store, load = runner.mover.store_ring(), runner.mover.load_ring()
            rings = [
                Ring([[RingPart(*array) for array in arrays] for arrays in groups], slots)
                for groups, slots in zip((store, load), RINGS, strict=True)
            ]
            self.slab = HostSlab(SLOTS, max(each))
            self.copier = CpuCopier(self.slab, *rings, wake=lambda: None, verify=True)
            tier_config = HostTierConfig(
                slots=SLOTS,
                page_bytes=tuple(each),
                state_pieces=2 if len(each) > 1 else 0,
                store_ring=RINGS.store,
                load_ring=RINGS.load,
                lookahead=8,
            )
            options["host"] = TierParts(
                config=tier_config, copier=self.copier, observer=self.observer
            )
        super().__init__(config, cache, **options)
        runner.reset()
        self.runner = runner  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        if self.copier is not None:
            while self.scheduler.is_moving_pages:
                self.turn()
            assert self.copier.close()
            self.slab.close()


def requests(count: int, seed: int) -> list[Request]:
    """Few beginnings in turn, each longer than a third of the pool, with tails of their own."""
    chosen = random.Random(seed)
    beginnings = [tuple(chosen.randrange(97) for _ in range(13)) for _ in range(6)]
    return [
        Request(
            id=f"r{number}",
            prompt=(
                *beginnings[number % len(beginnings)][: chosen.choice([13, 13, 9])],
                *(chosen.randrange(97) for _ in range(chosen.randrange(1, 5))),
            ),
            params=SamplingParams(
                max_tokens=chosen.randrange(1, 6),
                temperature=chosen.choice([0.0, 1.0]),
                seed=number,
                logprobs=chosen.choice([None, 2]),
            ),
        )
        for number in range(count)
    ]


def serve(loop: CopyingLoop, each: list[Request]) -> None:
    """Two at a time, as they end. Now and then the copier's threads get time: a busy machine may
    leave them without any for longer than all requests take."""
    waiting = list(each)
    deadline = time.monotonic() + 300
    while waiting or loop.scheduler.has_work:
        assert time.monotonic() < deadline, "no progress"
        if len(waiting) % 4 == 0:
            settle(loop)
        while waiting and loop.scheduler.num_running + loop.scheduler.num_waiting < 2:
            loop.add(waiting.pop(0))
        step(loop)


def step(loop: CopyingLoop) -> None:
    if loop.launch() is None and loop.in_flight:
        loop.commit()
    while len(loop.in_flight) > 1:
        loop.commit()


def settle(loop: CopyingLoop) -> None:
    while loop.scheduler.has_work or loop.scheduler.is_moving_pages:
        step(loop)


def compare(served: Served, count: int, seed: int) -> CountingObserver:
    """Tokens and logprobs with a tier are those without a cache before them, bit for bit."""
    each = requests(count, seed)
    tiered = CopyingLoop(served, tier=True)
    serve(tiered, each)
    tiered.close()
    cold = CopyingLoop(served, tier=False)
    for request in each:
        cold.scheduler.reset_prefix_cache()
        serve(cold, [request])
    for request in each:
        got, expected = tiered.events[request.id], cold.events[request.id]
        assert [event.token for event in got] == [event.token for event in expected], request
        assert got[-1].finish is expected[-1].finish is not None
    return tiered.observer


@pytest.mark.parametrize("served", FORMATS[:1], indirect=True, ids=lambda it: it.name)
def test_tokens_are_those_of_a_cold_run_while_pages_come_and_go(served: Served) -> None:
    observer = compare(served, 32, seed=0)
    assert len(observer.loaded) > 10, "pages came back"
    assert not observer.recomputed["copy"]


@pytest.mark.slow
@pytest.mark.parametrize("served", [None], indirect=True, ids=["hybrid"])
def test_state_of_recurrent_layers_comes_back_with_its_pages(served: Served) -> None:
    restored = 0
    for seed in range(3):
        restored += len(compare(served, 60, seed).loaded)
    assert restored > 10, "pages and state came back"


@pytest.mark.slow
@pytest.mark.parametrize("served", FORMATS, indirect=True, ids=lambda it: it.name)
def test_tokens_are_those_of_a_cold_run_in_many_requests(served: Served) -> None:
    for seed in range(1, 7):
        assert compare(served, 150, seed).loaded


@pytest.mark.parametrize("served", FORMATS[:1], indirect=True, ids=lambda it: it.name)
def test_a_page_that_is_damaged_on_the_host_is_computed_again(served: Served) -> None:
    first = requests(12, seed=3)
    loop = CopyingLoop(served, tier=True)
    serve(loop, first)
    settle(loop)
    for slot in range(SLOTS):
        loop.slab.slot(slot)[:] = bytes(loop.slab.slot_bytes)
    again = [replace(request, id=f"{request.id} again") for request in first]
    serve(loop, again)
    loop.close()
    for request in first:
        assert loop.tokens(f"{request.id} again") == loop.tokens(request.id)
    assert loop.observer.recomputed["copy"], "what was damaged was noticed"
