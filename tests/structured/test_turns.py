"""Turns are given fairly: nobody waits for all that one other tenant asks for."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.structured.turns import Turns


async def take(turns: Turns, tenant: str, log: list[str], until: asyncio.Event) -> None:
    async with turns.turn(tenant, patience=10):
        log.append(tenant)
        await until.wait()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_tenant_has_all_turns_but_one_and_the_next_one_goes_to_another() -> None:
    turns, log, until = Turns(3), list[str](), asyncio.Event()
    greedy = [asyncio.create_task(take(turns, "a", log, until)) for _ in range(5)]
    await settle()
    assert log == ["a", "a"]
    other = asyncio.create_task(take(turns, "b", log, until))
    await settle()
    assert log == ["a", "a", "b"] and turns.num_waiting == 3
    until.set()
    await asyncio.gather(*greedy, other)
    assert turns.num_waiting == 0


async def test_who_waits_for_too_long_is_told_and_leaves_no_trace() -> None:
    turns, log, until = Turns(1), list[str](), asyncio.Event()
    first = asyncio.create_task(take(turns, "a", log, until))
    await settle()
    with pytest.raises(TimeoutError):
        async with turns.turn("b", patience=0.01):
            raise AssertionError("there was no turn")
    assert turns.num_waiting == 0
    until.set()
    await first
    async with turns.turn("b", patience=0.01):
        pass


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30), st.integers(1, 4))
async def test_every_turn_comes_back_whoever_is_cancelled(
    asked: list[tuple[str, bool]], most: int
) -> None:
    turns, log, until = Turns(most), list[str](), asyncio.Event()
    tasks = [asyncio.create_task(take(turns, tenant, log, until)) for tenant, _ in asked]
    await settle()
    assert len(log) <= most
    for task, (_, cancelled) in zip(tasks, asked, strict=True):
        if cancelled:
            task.cancel()
    until.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert turns.num_waiting == 0
    log.clear()
    for _ in range(2):
        await asyncio.gather(*(take(turns, tenant, log, until) for tenant in "abcd"))
    assert len(log) == 8
