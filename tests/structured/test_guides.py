"""Guides: where sequences stand, what is kept compiled, and what is compiled anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from jaxserve.api import Guide
from jaxserve.grammar_server.wire import Grammar
from jaxserve.metrics.metrics import Metrics
from jaxserve.structured import GrammarError, Guides, grammars
from jaxserve.tokenizer import ByteTokenizer, Tokenizer
from tests.structured.following import allowed


async def test_sequences_of_one_guide_do_not_share_their_place(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    guide = await guides.compile(grammars.choice(["abc", "xyz"]))
    first, second = guide.start(), guide.start()
    first.advance(*tokenizer.encode("a"))
    second.advance(*tokenizer.encode("x"))
    assert not set(allowed(first)) & set(allowed(second))
    assert len(allowed(guide.start())) > len(allowed(first))


async def test_a_token_that_the_mask_forbids_is_an_error(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    state = (await guides.compile(grammars.choice(["abc"]))).start()
    state.advance(*tokenizer.encode("x"))
    assert state.wait(10) and state.error is not None


@pytest.fixture
async def byte_guides() -> AsyncIterator[Guides]:
    made = Guides(ByteTokenizer(), Metrics("bytes"))
    yield made
    made.close()


async def test_a_tokenizer_without_an_end_gets_one(byte_guides: Guides) -> None:
    state = (await byte_guides.compile(grammars.choice(["é"]))).start()
    for byte in "é".encode():
        assert allowed(state) == [byte]
        state.advance(byte)
    assert allowed(state) == [256]


async def test_errors_are_short_and_compiled_grammars_are_kept(guides: Guides) -> None:
    with pytest.raises(GrammarError) as caught:
        await guides.compile(grammars.grammar("start: " + "x" * 5000))
    assert len(str(caught.value)) <= 500
    grammar = grammars.choice(["kept"])
    first, second = await guides.compile(grammar), await guides.compile(grammar)
    assert first.compiled is second.compiled


async def test_a_grammar_that_many_ask_for_at_once_is_compiled_once(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last ones of many would wait for longer than they may."""
    compiled: list[Grammar] = []
    compile_one = guides._compiler.compile

    def counted(grammar: Grammar, tenant: str) -> Any:
        compiled.append(grammar)
        return compile_one(grammar, tenant)

    monkeypatch.setattr(guides._compiler, "compile", counted)
    good, bad = grammars.choice(["at", "once"]), grammars.regex("(at once")
    made = await asyncio.gather(*(guides.compile(good) for _ in range(8)))
    assert len({id(guide.compiled) for guide in made}) == len(compiled) == 1
    told = await asyncio.gather(*(guides.compile(bad) for _ in range(8)), return_exceptions=True)
    assert {type(each) for each in told} == {GrammarError} and len(compiled) == 2


def followed(guide: Guide, most: int) -> int:
    """Tokens until the grammar cannot be followed any further."""
    state, rng = guide.start(), np.random.default_rng(0)
    for count in range(most):
        assert state.wait(10)
        if state.error is not None:
            return count
        state.advance(int(rng.choice(sorted({*allowed(state)} - guide.end_token_ids))))
    return most


async def test_a_grammar_that_met_a_limit_is_compiled_anew(guides: Guides) -> None:
    """Copies share llguidance's states: the next request met the limit at its first token."""
    grammar = grammars.regex("((a{1,100}){1,100}){1,100}")
    first = followed(await guides.compile(grammar), 400)
    assert 1 < first < 400
    assert followed(await guides.compile(grammar), 400) == first


async def test_a_grammar_that_many_tokens_have_followed_is_compiled_anew_meanwhile(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it."""
    monkeypatch.setattr("jaxserve.structured.guides.SHARED_TOKENS", 20)
    grammar = grammars.regex("[ab]{100}")
    first = await guides.compile(grammar)
    assert (await guides.compile(grammar)).compiled is first.compiled
    assert followed(first, 21) == 21
    compiling, compile_again = asyncio.Event(), guides._compiler.compile

    async def late(grammar: Grammar, tenant: str) -> Any:
        await compiling.wait()
        return await compile_again(grammar, tenant)

    monkeypatch.setattr(guides._compiler, "compile", late)
    assert (await guides.compile(grammar)).compiled is first.compiled
    compiling.set()
    async with asyncio.timeout(10):
        while (await guides.compile(grammar)).compiled is first.compiled:
            await asyncio.sleep(0.01)
