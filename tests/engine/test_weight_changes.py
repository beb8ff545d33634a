"""Weights that change while an engine serves: a real runner of a tiny model, under load."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxserve.api import (
    EngineLimits,
    Overloaded,
    Request,
    Running,
    SamplingParams,
    TokenEvent,
    WeightChange,
    WeightsRefused,
)
from jaxserve.engine.engine import AsyncEngine
from jaxserve.engine.loop import Parts
from jaxserve.metrics.metrics import Metrics
from jaxserve.models import decoder
from jaxserve.runner.runner import Pending, Runner
from jaxserve.scheduler import Scheduler
from tests.runner.driver import Placed, generate, tokens_of
from tests.tiny_model import COMPILES, SPEC, make_config, make_params, make_runner, tiny_spec

CONFIG = make_config(max_num_seqs=4, max_model_len=64, num_pages=65, decode=(4,), prefill=(32,))
PROMPTS = [tuple((7 * i + j) % SPEC.vocab_size for j in range(5 + 3 * i)) for i in range(6)]
TOKENS = 10

type Engine = AsyncEngine[Pending]


class Versions:
    """A WeightStore over two sets of weights, by the names "0" and "1"."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._made = [make_params(SPEC, seed) for seed in (0, 1)]
        self.model = "0"
        self.fail = False
        self._dropped = False

    def load(self, change: WeightChange) -> Callable[[], None]:
        if self.fail:
            raise WeightsRefused("damaged")
        made = self._made[int(change.model)]
        params = jax.tree.map(lambda leaf: jax.device_put(np.array(leaf)), made)

        def use() -> None:
            self._runner.use_params(params)
            self.model = change.model

        return use

    def sleep(self, *, drop_weights: bool) -> None:
        self._runner.free_state()
        if drop_weights:
            self._runner.drop_params()
            self._dropped = True

    def reload(self) -> Callable[[], None]:
        use = self.load(WeightChange(self.model)) if self._dropped else lambda: None

        def both() -> None:
            use()
            self._runner.reset()

        return both


class Answer(NamedTuple):
    tokens: list[int]
    by_version: list[int]
    cached: int

    @property
    def versions(self) -> set[int]:
        return set(self.by_version)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return make_runner(CONFIG)


@pytest.fixture(scope="module")
def expected(runner: Runner) -> list[dict[tuple[int, ...], list[int]]]:
    """What each set of weights answers to each prompt, alone."""
    solo: list[dict[tuple[int, ...], list[int]]] = []
    for seed in (0, 1):
        alone(runner, seed)
        solo.append({prompt: greedy(runner, prompt, TOKENS) for prompt in PROMPTS})
    assert all(solo[0][prompt] != solo[1][prompt] for prompt in PROMPTS)
    return solo


def alone(runner: Runner, seed: int) -> None:
    """Give the runner a version's weights and a state in which nothing is left."""
    runner.use_params(make_params(SPEC, seed))
    runner.reset()


def greedy(runner: Runner, prompt: Sequence[int], tokens: int) -> list[int]:
    return tokens_of(generate(runner, Placed(), list(prompt), tokens))


@asynccontextmanager
async def serving(runner: Runner) -> AsyncGenerator[tuple[Engine, Versions]]:
    """An engine that serves "0" first."""
    alone(runner, 0)
    store = Versions(runner)
    scheduler = Scheduler(CONFIG.scheduler, CONFIG.cache)
    engine: Engine = AsyncEngine(
        build=lambda report: Parts(scheduler, runner, store),
        limits=EngineLimits(64, SPEC.vocab_size),
        metrics=Metrics("tiny"),
    )
    await engine.start()
    try:
        yield engine, store
    finally:
        await engine.stop()


async def ask(engine: Engine, number: int, tokens: int = TOKENS) -> Answer:
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    request = Request(id=f"r{number}", prompt=PROMPTS[number % len(PROMPTS)], params=params)
    events: list[TokenEvent] = []
    async for some in engine.generate(request):
        events += some
    assert len(events) == tokens
    answer = [event.token for event in events if event.token is not None]
    return Answer(answer, [event.weights for event in events], events[0].cached_tokens)


async def swap_under_load(
    runner: Runner, expected: list[dict[tuple[int, ...], list[int]]], swaps: int
) -> None:
    """Change the weights `swaps` times while six clients ask without a pause."""
    answers, done = list[tuple[int, Answer]](), asyncio.Event()
    async with serving(runner) as (engine, _):
        compiled = COMPILES.count

        async def client(first: int) -> None:
            number = first
            while not done.is_set():
                answers.append((number, await ask(engine, number)))
                number += len(PROMPTS)

        clients = [asyncio.create_task(client(first)) for first in range(len(PROMPTS))]
        for version in range(1, swaps + 1):
            await asyncio.sleep(0.02)
            if version == swaps // 5:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            changed = await engine.change_weights(WeightChange(str(version % 2)))
            assert changed.version == version == engine.weights.version
        done.set()
        await asyncio.gather(*clients)
        await asyncio.sleep(0.05)
        assert engine.status().free_pages == engine.status().total_pages
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert COMPILES.count == compiled
    assert grown < 40 << 10, "KiB"
    assert len(answers) > 2 * swaps
    for number, answer in answers:
        (version,) = answer.versions
        prompt = PROMPTS[number % len(PROMPTS)]
        assert answer.tokens == expected[version % 2][prompt], (number, version)
    assert {version for _, answer in answers for version in answer.versions} >= {0, swaps}


async def test_every_answer_is_of_the_version_it_names(runner: Runner, expected: Any) -> None:
    await swap_under_load(runner, expected, 10)


@pytest.mark.slow
async def test_a_hundred_changes_lose_nothing(runner: Runner, expected: Any) -> None:
    await swap_under_load(runner, expected, 100)


async def test_prefixes_of_earlier_weights_are_not_found(runner: Runner, expected: Any) -> None:
    async with serving(runner) as (engine, _):
        await ask(engine, 5)
        assert (await ask(engine, 5)).cached > 0
        for running in Running:
            await engine.change_weights(WeightChange("1", running=running))
            answer = await ask(engine, 5)
            assert answer.cached == 0 and answer.tokens == expected[1][PROMPTS[5]]
            assert (await ask(engine, 5)).cached > 0


async def begun(engine: Engine, number: int) -> tuple[asyncio.Task[Answer], Callable[[], int]]:
    """A long answer that has begun."""
    task = asyncio.create_task(ask(engine, number, 40))
    while not engine.status().running:
        await asyncio.sleep(0)
    await asyncio.sleep(0.002)
    return task, lambda: engine.status().running


@pytest.mark.parametrize("running", list(Running))
async def test_what_runs_ends_restarts_or_goes_on(
    runner: Runner, expected: Any, running: Running
) -> None:
    async with serving(runner) as (engine, _):
        task, _ = await begun(engine, 0)
        await engine.change_weights(WeightChange("1", running=running))
        ended = task.done() or not engine.status().running + engine.status().waiting
        following = await ask(engine, len(PROMPTS))
        answer = await task
    assert ended == (running is Running.DRAIN)
    assert answer.versions == ({0} if running is Running.DRAIN else {0, 1})
    assert following.tokens == expected[1][PROMPTS[0]] and following.versions == {1}
    if running is Running.DRAIN:
        assert answer.tokens[:TOKENS] == expected[0][PROMPTS[0]]
    if running is Running.RESTART:
        alone(runner, 1)
        cut = answer.by_version.count(0)
        kept = answer.tokens[:cut]  # a few, whatever the time that a step takes
        assert greedy(runner, [*PROMPTS[0], *kept], 6) == answer.tokens[cut : cut + 6]


async def test_a_load_that_fails_changes_nothing(runner: Runner, expected: Any) -> None:
    async with serving(runner) as (engine, store):
        await ask(engine, 5)
        store.fail = True
        with pytest.raises(WeightsRefused, match="damaged"):
            await engine.change_weights(WeightChange("1"))
        store.fail = False
        assert engine.weights.version == 0 and engine.weights.model == "0"
        answer = await ask(engine, 5)
        assert answer.tokens == expected[0][PROMPTS[5]] and answer.versions == {0}
        assert answer.cached > 0


@pytest.mark.parametrize("tree", ["shapes", "structure"])
async def test_weights_of_another_shape_are_refused(
    runner: Runner, expected: Any, tree: str
) -> None:
    other = tiny_spec(ffn=64) if tree == "shapes" else tiny_spec(tie_embeddings=False)
    params: decoder.Params = make_params(other)
    async with serving(runner) as (engine, _):
        with pytest.raises(ValueError, match="gate_up is float32" if tree == "shapes" else "struc"):
            await engine.use_weights(lambda: runner.use_params(params))
        assert (await ask(engine, 2)).tokens == expected[0][PROMPTS[2]]
        assert engine.weights.version == 0


@pytest.mark.parametrize("finish", [False, True])
async def test_pause_and_resume(runner: Runner, expected: Any, finish: bool) -> None:
    async with serving(runner) as (engine, _):
        task, running = await begun(engine, 1)
        await engine.pause(finish=finish)
        assert engine.weights.paused and (running() == 0) == finish
        waiting = asyncio.create_task(ask(engine, 2))
        await asyncio.sleep(0.05)
        assert not waiting.done() and task.done() == finish
        assert engine.status().last_step_age == 0
        if not finish:
            with pytest.raises(WeightsRefused, match="paused with running sequences"):
                await engine.change_weights(WeightChange("1"))
        await engine.resume()
        assert (await waiting).tokens == expected[0][PROMPTS[2]]
        assert (await task).tokens[:TOKENS] == expected[0][PROMPTS[1]]


@pytest.mark.parametrize("drop", [False, True])
async def test_sleep_and_wake(runner: Runner, expected: Any, drop: bool) -> None:
    async with serving(runner) as (engine, _):
        task, _ = await begun(engine, 1)
        compiled = COMPILES.count
        await engine.sleep(drop_weights=drop)
        assert engine.weights.sleeping and not task.done()
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(runner._state.kv))  # pyright: ignore[reportPrivateUsage]
        assert (runner.params is None) == drop  # pyright: ignore[reportUnnecessaryComparison]
        with pytest.raises(WeightsRefused, match="wake it"):
            await engine.resume()
        with pytest.raises(WeightsRefused, match="sleeps already"):
            await engine.sleep()
        await engine.wake()
        assert (await task).tokens[:TOKENS] == expected[0][PROMPTS[1]]
        assert (await ask(engine, 4)).tokens == expected[0][PROMPTS[4]]
        with pytest.raises(WeightsRefused, match="does not sleep"):
            await engine.wake()
        assert COMPILES.count == compiled


async def test_weights_change_while_it_sleeps(runner: Runner, expected: Any) -> None:
    async with serving(runner) as (engine, store):
        await engine.sleep(drop_weights=True)
        await engine.change_weights(WeightChange("1"))
        store.fail = True
        with contextlib.suppress(WeightsRefused):
            await engine.wake()
        store.fail = False
        if engine.weights.sleeping:
            await engine.wake()
        answer = await ask(engine, 4)
        assert answer.tokens == expected[1][PROMPTS[4]] and answer.versions == {1}


async def test_a_change_ends_with_the_engine(runner: Runner) -> None:
    async with serving(runner) as (engine, _):
        task, _ = await begun(engine, 1)
        change = asyncio.create_task(engine.change_weights(WeightChange("1")))
        await asyncio.sleep(0.001)
    for each in (change, task):
        with contextlib.suppress(Overloaded):
            await each
