"""What a grammar may cost, and whom: its own request, and nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.api import FinishReason
from jaxserve.grammar_server.wire import Cause, Grammar, Limits
from jaxserve.metrics.metrics import Metrics
from jaxserve.server.chat_formats.choose import HERMES
from jaxserve.server.request.schema import ToolFunction
from jaxserve.structured import GrammarError, GrammarsBusy, Guides, grammars
from jaxserve.structured.compiling import CompileLimits
from jaxserve.structured.guides import Guide, GuideState
from tests.fakes import tiny_tokenizer

MULTIPLE = {"type": "integer", "multipleOf": 99999989}
SLOW = grammars.json_schema(MULTIPLE)
SMALL = Limits(process_bytes=64 * 2**20)


@pytest.fixture
async def guides() -> AsyncIterator[Guides]:
    limits = CompileLimits(quick_seconds=0.2, seconds=2.0, process=SMALL)
    made = Guides(tiny_tokenizer(), Metrics("tiny"), limits=limits)
    yield made
    made.close()


def server_pid(guides: Guides) -> int:
    processes = guides._compiler._processes
    assert processes is not None
    return processes.pid


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def resident_mib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


async def until(condition: Any, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def trivial(number: int) -> Grammar:
    return grammars.regex(f"{number}[ab]")


def linked(count: int, link: Any) -> Grammar:
    """Definitions, each of which refers to the next one."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    end = {f"d{count}": {"type": "integer"}}
    return grammars.json_schema({"$defs": {**definitions, **end}, "$ref": "#/$defs/d0"})


def rules(count: int, form: str, last: str) -> Grammar:
    return grammars.grammar("\n".join([*(form.format(i, i + 1) for i in range(count)), last]))


HOSTILE = {
    "references": lambda: linked(2500, lambda ref: ref),
    "arrays": lambda: linked(2500, lambda ref: {"type": "array", "items": ref}),
    "all of": lambda: linked(2500, lambda ref: {"allOf": [ref]}),
    "any of": lambda: linked(2500, lambda ref: {"anyOf": [ref, {"type": "null"}]}),
    "rules": lambda: rules(5000, "r{}: r{}", 'r5000: "a"\nstart: r0'),
    "terminals": lambda: rules(5000, "T{}: T{}", 'T5000: "a"\nstart: T0'),
    "texts of terminals": lambda: rules(5000, 'T{}: "b" T{} "c"', 'T5000: "a"\nstart: T0'),
    "gbnf": lambda: rules(1000, "r{} ::= r{}", 'r1000 ::= "a"\nroot ::= r0'),
    "parentheses of gbnf": lambda: grammars.grammar("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    "parentheses of lark": lambda: grammars.grammar("start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "parentheses": lambda: grammars.regex("(" * 100_000 + "a" + ")" * 100_000),
    "a multiple": lambda: SLOW,
    "repetitions": lambda: grammars.regex("(((.{1,1000}){1,1000}){1,1000}){1,1000}"),
    "expressions of all": lambda: grammars.json_schema(
        {"allOf": [{"type": "string", "pattern": f"^.*a{{{i}}}.{{9}}$"} for i in range(1, 301)]}
    ),
    "parameters of a tool": lambda: grammars.tool_calls(
        HERMES.rules([ToolFunction(name="f", parameters={"properties": {"n": MULTIPLE}})], {}, 1)
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_a_hostile_grammar_is_compiled_or_refused_and_others_need_not_wait(
    guides: Guides, case: str
) -> None:
    await guides.compile(trivial(0))
    pid, memory = server_pid(guides), resident_mib(os.getpid())
    grammar = HOSTILE[case]()
    hostile = asyncio.create_task(guides.compile(grammar))
    waited: list[float] = []
    for number in range(1, 6):
        begun = time.perf_counter()
        await guides.compile(trivial(number))
        waited.append(time.perf_counter() - begun)
    try:
        async with asyncio.timeout(40):
            await hostile
    except GrammarError as error:
        assert len(str(error)) <= 500
    assert max(waited) < 5.0, "on a busy machine; 0.02 alone"
    assert server_pid(guides) == pid and resident_mib(os.getpid()) < memory + 32
    assert accepts(await guides.compile(trivial(7)), "7b")


def accepts(guide: Guide, text: str) -> bool:
    state = guide.start()
    for byte in text.encode():
        if not allows(state, byte):
            return False
        state.advance(byte)
    return any(allows(state, end) for end in guide.end_token_ids)


def allows(state: GuideState, token: int) -> bool:
    assert state.wait(10) and state.error is None, state.error
    bits = np.unpackbits(np.frombuffer(state.mask, np.uint8), bitorder="little")
    return bool(bits[token])


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (CompileLimits(quick_seconds=0.05, seconds=0.1), "0.1 s of a processor"),
        (CompileLimits(process=SMALL), "64 MiB"),
    ],
)
async def test_a_client_is_told_which_limit_its_grammar_met_and_at_once_the_next_time(
    limits: CompileLimits, words: str
) -> None:
    guides = Guides(tiny_tokenizer(), Metrics("tiny"), limits=limits)
    with pytest.raises(GrammarError, match=words):
        await guides.compile(SLOW)
    begun = time.perf_counter()
    with pytest.raises(GrammarError, match=words):
        await guides.compile(SLOW)
    assert time.perf_counter() - begun < 0.05
    guides.close()


async def test_what_is_nested_deeper_than_the_stack_is_refused() -> None:
    limits = CompileLimits(process=Limits(stack_bytes=2**20))
    guides = Guides(tiny_tokenizer(), Metrics("tiny"), limits=limits)
    with pytest.raises(GrammarError, match="nested too deeply"):
        await guides.compile(HOSTILE["arrays"]())
    guides.close()


async def test_a_process_that_ends_ends_the_sequences_of_its_grammar_alone(guides: Guides) -> None:
    first = await guides.compile(trivial(1))
    (doomed,) = children(server_pid(guides))
    second = await guides.compile(trivial(2))
    states = [guide.start() for guide in (first, second)]
    os.kill(doomed, signal.SIGABRT)  # as it ends without memory
    await until(lambda: first.compiled.at_limit)
    for state, token in zip(states, b"12", strict=True):
        state.advance(token)
        assert state.wait(10)
    failed = states[0].error
    assert failed is not None and failed.finish is FinishReason.ERROR
    assert states[1].error is None
    assert accepts(await guides.compile(trivial(1)), "1a"), "it is compiled anew"


async def test_a_mask_that_takes_too_long_ends_its_sequence() -> None:
    process = Limits(mask_seconds=0.001)
    guides = Guides(tiny_tokenizer(), Metrics("tiny"), limits=CompileLimits(process=process))
    guide = await guides.compile(grammars.regex("((a{1,100}){1,100}){1,100}"))
    state = guide.start()
    for _ in range(200):
        state.advance(ord("a"))
        assert state.wait(10)
        if state.error is not None:
            break
    assert state.error is not None and state.error.finish is FinishReason.GRAMMAR
    guides.close()


async def test_the_largest_process_ends_where_all_of_them_take_too_much() -> None:
    process = Limits(process_bytes=2**30, total_bytes=96 * 2**20)
    metrics = Metrics("tiny")
    limits = CompileLimits(quick_seconds=5, process=process)
    guides = Guides(tiny_tokenizer(), metrics, limits=limits)
    with pytest.raises(GrammarsBusy, match="memory"):
        await guides.compile(SLOW)
    assert f'jaxserve_grammar_limits_total{{cause="{Cause.TOTAL_MEMORY}"}} 1.0' in text_of(metrics)
    assert accepts(await guides.compile(trivial(1)), "1a")
    guides.close()


def text_of(metrics: Metrics) -> str:
    return metrics.exposition().decode()


async def test_a_grammar_server_that_dies_is_started_anew() -> None:
    metrics = Metrics("tiny")
    guides = Guides(tiny_tokenizer(), metrics)
    guide = await guides.compile(trivial(1))
    state, dead = guide.start(), server_pid(guides)
    its_own = children(dead)
    os.kill(dead, signal.SIGKILL)
    state.advance(ord("1"))
    assert await asyncio.to_thread(state.wait, 10)
    assert state.error is not None and state.error.finish is FinishReason.ERROR
    await until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in its_own))
    assert accepts(await guides.compile(trivial(1)), "1a")
    assert server_pid(guides) != dead
    assert "jaxserve_grammar_server_restarts_total 1.0" in text_of(metrics)
    guides.close()


async def test_a_grammar_that_nobody_waits_for_any_more_is_given_up(guides: Guides) -> None:
    await guides.compile(trivial(1))
    before = set(children(server_pid(guides)))
    clients = [asyncio.create_task(guides.compile(SLOW)) for _ in range(2)]
    await until(lambda: set(children(server_pid(guides))) - before)
    clients[0].cancel()
    await asyncio.sleep(0.05)
    assert set(children(server_pid(guides))) - before, "the other one still needs it"
    clients[1].cancel()
    await until(lambda: set(children(server_pid(guides))) == before)


async def test_a_process_lives_as_long_as_its_grammar_is_kept_or_followed(
    monkeypatch: pytest.MonkeyPatch, guides: Guides
) -> None:
    monkeypatch.setattr("jaxserve.structured.guides.CACHE_ENTRIES", 1)
    guide = await guides.compile(trivial(1))
    await guides.compile(trivial(2))
    await guides.compile(trivial(3))
    await until(lambda: len(children(server_pid(guides))) == 2)
    assert accepts(guide, "1a")
    del guide
    await until(lambda: len(children(server_pid(guides))) == 1)


async def test_no_turn_in_time_is_no_fault_of_the_grammar() -> None:
    limits = CompileLimits(quick_at_once=1, quick_seconds=5, queue_seconds=0.1)
    guides = Guides(tiny_tokenizer(), Metrics("tiny"), limits=limits)
    slow = asyncio.create_task(guides.compile(SLOW))
    await asyncio.sleep(0.05)
    with pytest.raises(GrammarsBusy, match="it has waited") as busy:
        await guides.compile(trivial(1))
    assert busy.value.retry_after > 0
    slow.cancel()
    await until(lambda: slow.done())
    await guides.compile(trivial(1))
    guides.close()


async def test_there_are_only_so_many_processes() -> None:
    guides = Guides(tiny_tokenizer(), Metrics("tiny"), limits=CompileLimits(processes=2))
    held = [await guides.compile(trivial(number)) for number in range(2)]
    with pytest.raises(GrammarsBusy, match="too many grammars are in use: at most 2"):
        await guides.compile(trivial(2))
    held.pop()
    assert accepts(await when_there_is_room(guides, trivial(2)), "2b")
    guides.close()


async def test_one_tenant_cannot_hold_all_processes() -> None:
    guides = Guides(tiny_tokenizer(), Metrics("tiny"), limits=CompileLimits(processes=20))
    held: list[Guide] = []
    with pytest.raises(GrammarsBusy, match="fewer for one client"):
        for number in range(20):
            held.append(await guides.compile(trivial(number), tenant="many"))
    assert len(held) == 18
    for number in (20, 21):
        held.append(await guides.compile(trivial(number), tenant="few"))
    with pytest.raises(GrammarsBusy):
        await guides.compile(trivial(22), tenant="few")
    guides.close()


@pytest.mark.parametrize("limits", [CompileLimits(processes=6), CompileLimits()])
async def test_what_is_kept_of_a_tenant_makes_room_for_its_own_grammars_first(
    limits: CompileLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.structured.guides.CACHE_ENTRIES", 6)
    guides = Guides(tiny_tokenizer(), Metrics("tiny"), limits=limits)
    kept = (await guides.compile(trivial(0), tenant="few")).compiled
    for number in range(1, 20):
        await when_there_is_room(guides, trivial(number), "many")
    assert (await guides.compile(trivial(0), tenant="few")).compiled is kept
    guides.close()


async def test_what_is_kept_has_so_many_bytes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    guides = Guides(tiny_tokenizer(), Metrics("tiny"))
    size = (await guides.compile(trivial(0))).compiled.size
    large = (await guides.compile(HOSTILE["rules"]())).compiled.size
    assert large > 2**21 > 2 * size
    monkeypatch.setattr("jaxserve.structured.guides.CACHE_BYTES", large)
    again = await guides.compile(trivial(1))
    del again
    await until(lambda: len(children(server_pid(guides))) <= 2)
    guides.close()


async def when_there_is_room(guides: Guides, grammar: Grammar, tenant: str = "") -> Guide:
    """The thread that reads may hold a grammar for a moment after those who asked for it have it,
    so room comes a moment after the last of them is gone. Clients are told to try again."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return await guides.compile(grammar, tenant=tenant)
        except GrammarsBusy:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("isolated", [True, False])
async def test_what_a_tenant_has_had_compiled_another_one_gets_unless_they_are_isolated(
    isolated: bool,
) -> None:
    guides = Guides(tiny_tokenizer(), Metrics("tiny"), isolated=isolated)
    made = [(await guides.compile(trivial(1), tenant=tenant)).compiled for tenant in "aba"]
    assert (made[0] is made[1]) == (not isolated)
    assert made[0] is made[2]
    guides.close()


async def test_closing_ends_all_processes(guides: Guides) -> None:
    await guides.compile(trivial(1))
    compiling = asyncio.create_task(guides.compile(SLOW))
    await until(lambda: len(children(server_pid(guides))) == 2)
    pids = [server_pid(guides), *children(server_pid(guides))]
    guides.close()
    await until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))
    with pytest.raises(GrammarsBusy):
        await compiling


async def test_a_grammar_server_is_small_and_forks_from_a_single_thread(guides: Guides) -> None:
    await guides.compile(trivial(1))
    assert len(list(Path(f"/proc/{server_pid(guides)}/task").iterdir())) == 1
    assert resident_mib(server_pid(guides)) < 80
