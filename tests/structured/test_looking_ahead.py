"""The masks behind drafts are those that a sequence gets there, and looking ahead changes none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxserve.api import Ahead, GuideState
from jaxserve.metrics.metrics import Metrics
from jaxserve.structured import Guides, Thinking, ThinkingBudget, grammars
from jaxserve.tokenizer import Tokenizer
from jaxserve.tokenizer.huggingface import HfTokenizer
from jaxserve_checkpoints.resolve import embedded_model

SCHEMA: Any = {
    "type": "object",
    "properties": {
        "temperature_of_the_place": {"type": "integer"},
        "conditions": {"enum": ["sunshine", "rain"]},
        "note": {"type": "string"},
    },
    "required": ["temperature_of_the_place", "conditions", "note"],
    "additionalProperties": False,
}
ANSWER = json.dumps({"temperature_of_the_place": 21, "conditions": "rain", "note": "a b c"})
MOST = 7


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return HfTokenizer.from_folder(embedded_model())


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Iterator[Guides]:
    made = Guides(tokenizer, Metrics("tiny"))
    yield made
    made.close()


def waited(state: GuideState) -> GuideState:
    assert state.wait(10) and state.error is None, state.error
    return state


def allows(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


async def test_masks_behind_drafts_are_those_of_a_sequence_that_got_them(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    """Guesses are right, wrong from some place on, or none. Runs are of one token or several."""
    guide = await guides.compile(grammars.json_schema(SCHEMA))
    tokens = [*tokenizer.encode(ANSWER), min(tokenizer.eos_token_ids)]
    rng, plain = np.random.default_rng(1), guide.start()
    masks = [plain.mask]
    for token in tokens[:-1]:
        plain.advance(token)
        masks.append(waited(plain).mask)
    found: list[int] = []
    for _ in range(6):
        state, place = guide.start(), 0
        while place < len(tokens) - 1:
            step = min(int(rng.integers(1, 4)), len(tokens) - 1 - place)
            drafts = tokens[place + step : place + step + int(rng.integers(0, MOST + 1))]
            cut = int(rng.integers(0, 2 * MOST))
            drafts[cut:] = [5 for _ in drafts[cut:]]
            state.advance(*tokens[place : place + step], drafts=drafts, most=MOST)
            place += step
            ahead = waited(state).ahead
            assert state.mask == masks[place]
            assert len(ahead.masks) == len(ahead.drafts) <= MOST
            right = [a == b for a, b in zip(ahead.drafts, tokens[place:], strict=False)]
            right = [all(right[: n + 1]) for n in range(len(right))]
            for n in range(sum(right)):
                assert ahead.masks[n] == masks[place + n + 1]
            for n, draft in enumerate(ahead.drafts):
                assert allows((state.mask, *ahead.masks)[n], draft), "it could be accepted"
            found.append(sum(right))
    assert set(range(MOST + 1)) <= set(found), "every number of right drafts occurs"


async def test_what_a_grammar_forces_is_drafted_without_a_guess(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    state = (await guides.compile(grammars.json_schema(SCHEMA))).start()
    state.advance(*tokenizer.encode("{"), *tokenizer.encode('"'), most=MOST)
    ahead = waited(state).ahead
    text = b"".join(map(tokenizer.token_bytes, ahead.drafts)).decode()
    assert ahead.forced == len(ahead.drafts) > 1
    assert 'temperature_of_the_place":'.startswith(text)
    state.advance(*ahead.drafts)
    assert waited(state).ahead == Ahead(), "nothing is looked for unasked"


async def test_no_draft_goes_beyond_the_end_of_a_grammar(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    state = (await guides.compile(grammars.choice(["abc"]))).start()
    end = min(tokenizer.eos_token_ids)
    first, *rest = tokenizer.spell("abc")
    state.advance(first, drafts=[*rest, end, end], most=MOST)
    ahead = waited(state).ahead
    assert ahead.drafts == tuple(rest)
    assert allows((state.mask, *ahead.masks)[-1], end)


async def test_thoughts_are_drafted_up_to_their_end(guides: Guides, tokenizer: Tokenizer) -> None:
    guide = await guides.compile(grammars.choice(["abc"]), Thinking.OPEN)
    closes = tokenizer.markers["</think>"]
    words, drafts = tokenizer.encode("a thought"), tokenizer.encode("and more")
    state = guide.start()
    state.advance(*words, drafts=[*drafts, closes, *drafts], most=MOST)
    assert state.ready and state.ahead.drafts == tuple(drafts)[:MOST]
    assert set(state.ahead.masks) == {state.mask} and allows(state.mask, closes)
    state.advance(*drafts, closes, drafts=drafts, most=MOST)
    assert state.mask == guide.compiled.mask and state.ahead == Ahead()


async def test_a_budget_of_thoughts_drafts_only_outside_of_them(
    guides: Guides, tokenizer: Tokenizer
) -> None:
    inner = await guides.compile(grammars.json_schema(SCHEMA), Thinking.MAY_OPEN)
    opens, closes = (tokenizer.markers[name] for name in ("<think>", "</think>"))
    state = ThinkingBudget(4, tokenizer, [], inner).start()
    state.advance(opens, drafts=tokenizer.encode("a b c d e f"), most=MOST)
    assert waited(state).ahead == Ahead()
    state.advance(closes)
    state.advance(*tokenizer.encode("{"), *tokenizer.encode('"'), most=MOST)
    assert waited(state).ahead.forced > 1
