"""An engine with KV offload, for scripts/bench_offload.py. The caller runs its turns, and learns in
which tier each request found its prefix."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.cli.options import parse_args
from jaxserve.metrics.metrics import Metrics
from jaxserve.plan import PageMoves
from jaxserve.scheduler.load import key_of
from jaxserve.startup import environment

WHOLE = 0.8
"""Least share of a prompt's tokens that counts as a hit: the last pages are always computed."""


class First(NamedTuple):
    """The time to a request's first token, and the tier in which its prompt was found."""

    ms: float
    known: int
    """Tokens of the prompt that an earlier request had."""
    cached: int
    """Tokens found in any tier."""
    restored: int
    """Cached tokens that were loaded from host memory or disk."""
    read: int
    """Bytes read from disk meanwhile."""
    loaded: int
    """Bytes loaded from host memory meanwhile."""
    refused: str
    """Why the policy recomputed tokens instead of loading them."""
    load_ms: float | None = None
    """Duration of the load; None if there was none."""

    @property
    def tier(self) -> str:
        if not self.cached:
            return "cold"
        if self.cached < WHOLE * self.known:
            return "partly cold"
        if not self.restored:
            return "device"
        if self.restored < WHOLE * self.cached:
            return "partly device"
        if not self.read:
            return "host"
        return "disk" if self.read >= WHOLE * self.loaded else "partly disk"


class Work(NamedTuple):
    """Counters of the engine's thread."""

    turns: float
    seconds: float
    """Seconds in turns, without waits for the device."""
    planning: float
    """Seconds of these until the plan exists."""
    before_step: float
    """Seconds until the step is launched."""
    late: float
    """Steps that were launched after the previous step had ended."""
    launches: float
    """Turns that moved pages."""
    restored: float
    stored: float
    """Pages."""

    def since(self, before: Work) -> Work:
        return Work(*(now - then for now, then in zip(self, before, strict=True)))


class Bench:
    """An engine without threads: the caller runs its turns."""

    def __init__(self, flags: Sequence[str], folder: Path):
        options = parse_args([*flags])
        environment.prepare(options.gpu_memory_utilization)
        from jaxserve.engine.engine import SWITCH_INTERVAL
        from jaxserve.startup.build import build_parts
        from jaxserve.startup.timeline import Timeline
        from jaxserve.weights.model_source import find_model

        sys.setswitchinterval(SWITCH_INTERVAL)
        options = replace(options, kv_offload_path=options.kv_offload_path or folder)
        source = find_model(options)
        self.metrics = Metrics("bench")
        self.parts = build_parts(
            options, source, self.metrics, lambda phase, done: None, Timeline()
        )
        self.scheduler, self.runner = self.parts.scheduler, self.parts.runner
        assert self.scheduler.host is not None, "pass --kv-offload-size"
        self.host = self.scheduler.host
        page_size = self.scheduler.occupancy(1).pages.page_size
        self.cache_tokens = min(pool.num_total for pool in self.scheduler.pools) * page_size
        cache = self.scheduler._kv_cache  # pyright: ignore[reportPrivateUsage]
        self.slots = cache.num_free_slots
        self.vocab = source.sampled_vocab
        self.random, self.number, self.in_flight = random.Random(0), 0, None
        self.arrived: list[Any] = []
        """Requests that arrived while a step was in flight."""
        self.firsts: dict[str, float] = {}
        self.found: dict[str, tuple[int, int]] = {}
        """Numbers of cached and of restored tokens, by request."""
        self.tokens = 0
        self.running: set[str] = set()
        self.work = Work(*[0.0] * len(Work._fields))
        self.load_ms: float | None = None
        """Duration of the last load."""
        self._watch_loads()

    def _watch_loads(self) -> None:
        observer: Any = self.host._observer  # pyright: ignore[reportPrivateUsage]
        told = observer.tier_loaded

        def loaded(num_bytes: int, seconds: float, **tokens: int) -> None:
            self.load_ms = seconds * 1e3
            told(num_bytes, seconds, **tokens)

        observer.tier_loaded = loaded

    def prompt(self, length: int) -> tuple[int, ...]:
        """Random tokens, different in each call."""
        return tuple(self.random.randrange(self.vocab) for _ in range(length))

    def add(self, prompt: tuple[int, ...], max_tokens: int) -> str:
        from jaxserve.api import Request, SamplingParams

        self.number += 1
        name = f"r{self.number}"
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = Request(id=name, prompt=prompt, params=params)
        if self.in_flight is None:
            self.scheduler.add(request)
        else:
            self.arrived.append(request)
        self.running.add(name)
        return name

    def turn(self) -> None:
        """Runs one turn, like `StepLoop._advance`."""
        began = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter() - began
        moves = self.move_pages()
        launched = None if plan is None else (plan, self.runner.launch(plan))
        before_step = time.perf_counter() - began
        arrived = self.scheduler.poll_host()
        moves += self.move_pages()
        restored, stored = (
            (sum(map(len, each)) for each in zip(*moves, strict=True)) if moves else (0, 0)
        )
        late = launched is not None and launched[1].late
        seconds = time.perf_counter() - began
        more = Work(1, seconds, planned, before_step, late, bool(moves), restored, stored)
        self.work = Work(*(sum(pair) for pair in zip(self.work, more, strict=True)))
        for request in self.arrived:  # while the device computes
            self.scheduler.add(request)
        self.arrived.clear()
        if self.in_flight is not None:
            before, pending = self.in_flight
            now_there = self.scheduler.commit(before, self.runner.collect(pending))
            now = time.perf_counter()
            for event in now_there:
                self.tokens += event.token is not None
                self.firsts.setdefault(event.request_id, now)
                if event.start is not None:
                    self.found[event.request_id] = event.cached_tokens, event.restored_tokens
                if event.finish is not None:
                    self.running.discard(event.request_id)
        elif launched is None and not arrived:
            time.sleep(2e-4)
        self.in_flight = launched

    def move_pages(self) -> list[PageMoves]:
        """Launches the page moves that are due, and returns them."""
        moves = self.host.take()
        if moves is None:
            return []
        self.host.launched(self.runner.move_pages(moves))
        return [moves]

    def until(self, done: Callable[[], bool], limit: float = 120.0) -> None:
        deadline = time.perf_counter() + limit
        while not done():
            assert time.perf_counter() < deadline, "no progress"
            self.turn()

    def first_token(self, prompt: tuple[int, ...], *, new: int = 0, forced: bool = False) -> First:
        """Runs a single request until its first token. Its last `new` tokens are new. `forced`:
        load from lower tiers even if the policy would recompute."""
        before, decided, begin = self.moved(), self.host.decision, self.host.begin
        if forced:
            self.host.begin = lambda seq, cached, prefill_rate: begin(seq, cached, None)
        self.load_ms = None
        began = time.perf_counter()
        name = self.add(prompt, 1)
        self.until(lambda: name not in self.running)
        ms = (self.firsts[name] - began) * 1e3
        self.host.begin = begin
        after, decision, refused = self.moved(), self.host.decision, ""
        if decision is not None and decision is not decided and not decision.pays:
            refused = (
                f"predicted: {decision.seconds * 1e3:.1f} ms to load "
                f"({decision.disk_bytes / max(decision.host_bytes, 1):.0%} from disk), "
                f"{(decision.prefill_seconds or 0) * 1e3:.1f} ms to compute"
            )
        read, loaded = (now - then for now, then in zip(after, before, strict=True))
        found = self.found[name]
        return First(ms, len(prompt) - new, *found, read, loaded, refused, self.load_ms)

    def moved(self) -> tuple[int, int]:
        """Bytes read from disk, and loaded to the device, since the start."""
        tier = self.metrics.figures().tier
        assert tier is not None
        return tier.read, tier.loaded

    @property
    def longest(self) -> int:
        """Length of the longest prompt that leaves half of the device's cache free."""
        return min(self.scheduler.max_model_len - 8, self.cache_tokens // 2)

    def displace(self) -> None:
        """Runs other requests until they have displaced the device's pages to the tier, and no
        longer: their own pages fill the disk too."""
        wanted = {
            key_of(group, content)
            for group, pool in enumerate(self.scheduler.pools)
            for content in pool._page_of  # pyright: ignore[reportPrivateUsage]
        }
        self.settle()
        for _ in range(2 * self.cache_tokens // max(self.longest // 4, 1)):
            if all(self.host.index.has(key) for key in wanted):
                return
            self.first_token(self.prompt(self.longest // 4))
            self.settle()

    def settle(self) -> None:
        """Waits until all pages have reached host memory and disk."""
        self.until(lambda: self.in_flight is None and not self.scheduler.is_moving_pages)

    @contextlib.contextmanager
    def bounded(self, load_rate: float) -> Iterator[None]:
        """Bounds loads like `--kv-offload-load-rate`, in bytes per second."""
        pace = self.host._loads.pace  # pyright: ignore[reportPrivateUsage]
        before, pace.rate = pace.rate, load_rate
        try:
            yield
        finally:
            pace.rate = before

    def forget_device(self) -> None:
        """Clears the device's prefix cache. The lower tiers keep theirs."""
        for pool in self.scheduler.pools:
            pool.forget()
