"""A host tier over a real runner, with real copies and files: each request gets the tokens it would
get alone, whatever fails, is damaged, or is taken away meanwhile."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.api import FinishReason
from jaxserve.config import HostTierConfig
from jaxserve.models import decoder
from jaxserve.offload.copier import CpuCopier, Ring
from jaxserve.offload.counters import OffloadCounters
from jaxserve.offload.disk import DiskTier
from jaxserve.offload.lane import Chunk
from jaxserve.offload.links import CpuLink
from jaxserve.offload.slab import HostSlab
from jaxserve.plan import PageMoves
from jaxserve.runner.page_moves import Rings
from jaxserve.runner.programs import RunnerConfig
from jaxserve.runner.runner import Runner
from jaxserve.scheduler.host_tier import HostTier, TierParts
from jaxserve_kernels.cuda_driver import CudaError
from jaxserve_kernels.kv_format import KVFormat, named
from jaxserve_kernels.kv_format.kvarn import KVarN
from tests.runner.test_equivalence import LAST_ARRIVAL, Arrival, Solo, Workload, workloads
from tests.runner.test_windows import MOST_DIFFERENT, SPECS, windowed_workloads
from tests.scheduler.loop import Loop
from tests.tiny_model import COMPILES, SPEC, make_config, make_params, make_runner

RINGS = Rings(store=3, load=3)
FORMATS: tuple[KVFormat, ...] = (named("auto"), named("int8"), KVarN(value_bits=2, group=4))


class Faults(NamedTuple):
    """What goes wrong; shares, or at which turns."""

    failing_chunks: float
    slow: float
    """Seconds that a chunk takes at most."""
    damaged_slots: float
    """Per turn, of a byte in host memory."""
    damaged_files: float
    """Per turn, of a file."""
    failing_turn: int | None
    reset_turn: int | None
    swap_turn: int | None
    """The weights change."""


class Tiered(NamedTuple):
    work: Workload
    faults: Faults
    host_slots: int
    disk_pages: int
    """0: no disk."""
    seed: int


class FaultyLink(CpuLink):
    """Chunks that are late, or fail when some of their bytes are there already."""

    def __init__(self, faults: Faults, seed: int):
        self._faults, self._random = faults, random.Random(seed)

    def begin(self, chunk: Chunk, event: int) -> None:
        time.sleep(self._random.random() * self._faults.slow)
        if self._random.random() < self._faults.failing_chunks:
            super().begin(chunk._replace(nbytes=chunk.nbytes // 2), event)
            raise CudaError("the link failed")
        super().begin(chunk, event)


class TierLoop(Loop):
    """The loop of the scheduler's tests with a tier on a real device."""

    def __init__(self, served: Served, tiered: Tiered, folder: Path):
        self.served, self.faults = served, tiered.faults
        self.device, self._random = served.runner, random.Random(tiered.seed)
        config, mover = served.config, served.runner.mover
        assert mover is not None
        shapes = config.kv_shapes
        sizes = tuple(config.kv_format.page_bytes(shape, config.dtype) for shape in shapes)
        self.slab = HostSlab(tiered.host_slots, max(sizes))
        self.counters = OffloadCounters()
        links = [FaultyLink(tiered.faults, tiered.seed + each) for each in range(2)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jaxserve.offload.copier.CpuLink", links.pop)
            self.copier = CpuCopier(
                self.slab,
                Ring(mover.store_ring(), RINGS.store),
                Ring(mover.load_ring(), RINGS.load),
                wake=lambda: None,
                verify=True,
                chunk_bytes=4096,
                counters=self.counters,
            )
        self.disk = None
        if tiered.disk_pages:
            self.disk = DiskTier(
                folder,
                tiered.disk_pages * (4096 + self.slab.stride),
                self.slab,
                "a model",
                wake=lambda: None,
                threads=2,
                counters=self.counters,
            )
        parts = TierParts(
            config=HostTierConfig(
                slots=tiered.host_slots,
                page_bytes=sizes,
                store_ring=RINGS.store,
                load_ring=RINGS.load,
                lookahead=tiered.host_slots // 2,
            ),
            copier=self.copier,
            disk=self.disk,
        )
        super().__init__(tiered.work.config, tiered.work.cache, host=parts)
        mover.on_new_ring = lambda: self.copier.use_store_ring(
            Ring(mover.store_ring(), RINGS.store)
        )
        served.runner.reset()
        self.runner: Any = served.runner
        self._old_rings: list[Any] = []
        self.failures = tiered.seed

    @property
    def tier(self) -> HostTier:
        assert self.scheduler.host is not None
        return self.scheduler.host

    def move_pages(self, moves: PageMoves) -> Callable[[], bool]:
        return self.device.move_pages(moves)

    def fail(self) -> None:
        events = self.scheduler.fail([plan for plan, _ in self.in_flight])
        self.in_flight.clear()
        if self.failures % 2 == 0:
            self._lose_a_ring()
        self.failures += 1
        self.device.reset()
        self._take(events)

    def _lose_a_ring(self) -> None:
        """As if the failed step were a gather. The memory stays, because copies read it."""
        mover: Any = self.device.mover
        self._old_rings.append(mover._stores[-1])
        lost = tuple(jax.device_put(np.zeros(1)) for _ in mover._stores[-1])
        for part in lost:
            part.delete()
        mover._stores[-1] = lost

    def swap(self, params: decoder.Params) -> None:
        while self.in_flight:
            self.commit()
        self.device.use_params(params)
        self.scheduler.reset_prefix_cache()
        self.scheduler.check()

    def damage(self) -> None:
        """Of memory only what has its checksum, and is not on its way."""
        if self._random.random() < self.faults.damaged_slots and not self.tier.busy:
            slot = self._random.randrange(self.slab.num_slots)
            self.slab.slot(slot)[self._random.randrange(self.slab.slot_bytes)] ^= 16
        lost = self._random.random()
        if lost < 0.06:  # only the tiers have the pages now
            for pool in self.scheduler.pools:
                pool.forget()
        if lost < 0.02 and self.disk is not None:  # only files have them, as after a restart
            self.tier.index.clear()
        if self.disk is not None and self._random.random() < self.faults.damaged_files:
            files = sorted(self.disk._folder.directory.glob("*.kv"))  # pyright: ignore[reportPrivateUsage]
            if files:
                self._damage_file(self._random.choice(files))

    def _damage_file(self, path: Path) -> None:
        try:
            content = bytearray(path.read_bytes())
            if self._random.random() < 0.3:
                path.unlink()
            elif content:
                content[4096 + self._random.randrange(self.slab.slot_bytes)] ^= 4
                path.write_bytes(content[: self._random.choice([len(content), 5000])])
        except (FileNotFoundError, IndexError):
            pass  # it was evicted meanwhile, or is damaged already

    def turn(self, ahead: int = 1) -> bool:
        if self.launch() is None:
            if self.in_flight:
                self.commit()
            elif self.tier.busy or self.arrived:
                time.sleep(0.0002)
            else:
                assert not self.scheduler.has_work, "there is work, but nothing can be planned"
                return False
        while len(self.in_flight) > ahead:
            self.commit()
        return True

    def end(self) -> None:
        """Everything ends, and nothing is lost."""
        deadline = time.monotonic() + 20
        while self.tier.busy:
            assert time.monotonic() < deadline, "something never ends"
            self.launch()
            time.sleep(0.0002)
        self.scheduler.check()
        assert self.copier.close()
        assert self.disk is None or self.disk.close()
        self.copier.poll()
        self.slab.close()


class Served(NamedTuple):
    config: RunnerConfig
    runner: Runner
    params: list[decoder.Params]


CASES = {each.name: (SPEC, each) for each in FORMATS}
CASES["two groups"] = (SPECS["alternating"], FORMATS[0])


SELDOM = ("int8", FORMATS[2].name, "two groups")
"""Cases of the slow tests: compiling takes ten seconds each."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow) if name in SELDOM else name for name in CASES
    ],
)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    spec, kv_format = CASES[request.param]
    config = make_config(spec=spec, decode=(4,), prefill=(24,), max_model_len=24)
    config = replace(config, kv_format=kv_format, rings=RINGS)
    params = [make_params(spec, seed) for seed in (0, 1)]
    compiled = make_runner(config, params[0])
    before = COMPILES.count
    yield Served(config, compiled, params)
    assert COMPILES.count == before, "something was compiled while serving"


@st.composite
def tiered_workloads(draw: st.DrawFn, served: Served) -> Tiered:
    """What came once comes again, when others have displaced it."""
    if len(served.config.spec.cache_groups) > 1:
        work = draw(windowed_workloads(served.config))
    else:
        work = draw(workloads())
        own = served.config.kv_format.own_tokens
        work = work._replace(cache=replace(work.cache, own_tokens=own))
    arrivals = list(work.arrivals)
    for number in range(draw(st.sampled_from([12, 6, 20]))):
        first = draw(st.sampled_from(work.arrivals))
        request = replace(first.request, id=f"again{number}")
        delay = draw(st.sampled_from([None] * 6 + list(range(8))))
        arrivals.append(Arrival(request, draw(st.integers(0, 60)), delay))
    shares = st.sampled_from([0.0, 0.0, 0.2])
    turns = st.one_of(st.none(), st.none(), st.integers(5, 60))
    faults = Faults(
        failing_chunks=draw(shares),
        slow=draw(st.sampled_from([0.0, 0.001])),
        damaged_slots=draw(shares),
        damaged_files=draw(shares),
        failing_turn=draw(turns),
        reset_turn=draw(turns),
        swap_turn=draw(turns),
    )
    return Tiered(
        work._replace(arrivals=arrivals),
        faults,
        host_slots=draw(st.sampled_from([8, 4, 20, 60])),
        disk_pages=draw(st.sampled_from([40, 40, 0, 6])),
        seed=draw(st.integers(0, 1000)),
    )


class Played(NamedTuple):
    loop: TierLoop
    new: set[str]
    """Requests that came after the weights had changed."""
    unknown: set[str]
    """Requests that ran while the weights changed."""


def play(tiered: Tiered, served: Served, folder: Path) -> Played:
    served.runner.use_params(served.params[0])
    work, faults = tiered.work, tiered.faults
    loop = TierLoop(served, tiered, folder)
    new, unknown = set[str](), set[str]()
    last = max(LAST_ARRIVAL, *(arrival.turn for arrival in work.arrivals))
    for turn in range(20_000):
        if turn == faults.swap_turn:
            unknown = loop.events.keys() - loop.over
            loop.swap(served.params[1])
        for arrival in work.arrivals:
            name = arrival.request.id
            if arrival.turn == turn:
                loop.add(arrival.request)
                if faults.swap_turn is not None and turn >= faults.swap_turn:
                    new.add(name)
            if arrival.abort_delay is not None and turn == arrival.turn + arrival.abort_delay:
                loop.abort(name)
        if turn == faults.reset_turn:
            loop.scheduler.reset_prefix_cache()
        loop.damage()
        if turn == faults.failing_turn:
            loop.fail()
        if not loop.turn(work.ahead) and turn > last:
            loop.end()
            return Played(loop, new, unknown)
    raise AssertionError("no progress")


def different(tiered: Tiered, served: Served, solos: list[Solo], total: Counter[str]) -> int:
    """Returns how many requests did not get the tokens that they get alone."""
    folder = Path(tempfile.mkdtemp())
    try:
        loop, new, unknown = play(tiered, served, folder)
    finally:
        shutil.rmtree(folder)
    count, compared = 0, 0
    for request, _, abort_delay in tiered.work.arrivals:
        name = request.id
        finish = loop.finish(name)
        if name in unknown:
            continue
        served.runner.use_params(served.params[name in new])
        expected = [event.token for event in solos[name in new](request.prompt, request.params)]
        got = loop.tokens(name)
        if finish is None:
            assert abort_delay is not None
        if finish is None or finish is FinishReason.ERROR:
            expected = expected[: len(got)]
        compared += 1
        count += got != expected
    for pool, group in zip(loop.scheduler.pools, tiered.work.cache.groups, strict=True):
        assert pool.num_free == group.usable_pages
    counted = vars(loop.counters)
    total.update({name: number for name, number in counted.items() if isinstance(number, int)})
    total["requests"] += compared
    return count


def check(served: Served, examples: int) -> Counter[str]:
    solos = [Solo(served.runner, served.config) for _ in served.params]
    total = Counter[str]()

    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(tiered_workloads(served))
    def run(tiered: Tiered) -> None:
        found = different(tiered, served, solos, total)
        if not served.config.kv_format.quantized:
            assert not found
        total["different"] += found

    run()
    print(dict(total))
    assert total["different"] <= MOST_DIFFERENT * total["requests"]
    return total


def test_each_request_gets_its_tokens_over_a_tier_with_faults(served: Served) -> None:
    total = check(served, 20)
    assert total["loads"] and total["stores"] > 30  # how many is a matter of the copies' pace
    assert total["stores_failed"]


@pytest.mark.slow
def test_10_000_requests_get_their_tokens_over_a_tier_with_faults(served: Served) -> None:
    total = check(served, 1000)
    assert total["requests"] > 10_000
    for name in ("checksum_failures", "disk_damaged", "disk_reads", "disk_evicted", "loads_failed"):
        assert total[name], name
