"""OpenAI's `prediction` through the official client: what the engine gets, and usage."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.output.prediction import PredictedTokens
from tests.fakes import IM_END, FakeEngine
from tests.server.conftest import MODEL, Serve
from tests.server.conftest import openai_client as client

USER: Any = [{"role": "user", "content": "Hi"}]
tokens = st.lists(st.integers(0, 3), max_size=40)


def counted(predicted: list[int], answer: list[int]) -> PredictedTokens:
    found = PredictedTokens(predicted)
    for token in answer:
        found.add(token)
    return found


def common_subsequence(one: list[int], other: list[int]) -> int:
    row = [0] * (len(other) + 1)
    for a in one:
        new = [0]
        for n, b in enumerate(other):
            new.append(row[n] + 1 if a == b else max(row[n + 1], new[n]))
        row = new
    return row[-1]


@given(predicted=tokens, answer=tokens)
def test_what_is_accepted_is_in_both_in_the_same_order(
    predicted: list[int], answer: list[int]
) -> None:
    found = counted(predicted, answer)
    assert 0 <= found.accepted <= common_subsequence(predicted, answer)
    assert found.accepted + found.rejected == len(predicted)


@given(predicted=tokens, more=tokens)
def test_a_prediction_that_came_true_is_accepted_whole(
    predicted: list[int], more: list[int]
) -> None:
    assert counted(predicted, predicted + more).rejected == 0


def test_an_edit_costs_what_it_changed() -> None:
    old = list(range(100, 150))
    replaced = [*old[:20], 1, 2, *old[21:]]
    inserted, deleted = [*old[:20], 1, 2, *old[20:]], [*old[:20], *old[25:]]
    assert counted(old, replaced).rejected == 1
    assert counted(old, inserted).rejected == 0
    assert counted(old, deleted).rejected == 5
    assert counted(old, [1, 2, 3]).accepted == 0


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prediction_reaches_the_engine_and_usage(
    serve: Serve, parts: bool, stream: bool
) -> None:
    engine = FakeEngine([*b"Hello, you", IM_END])
    text: Any = "Hello, world"
    content = [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with client(serve, engine) as api:
        reply: Any = await api.chat.completions.create(
            model=MODEL,
            messages=USER,
            prediction={"type": "content", "content": content if parts else text},
            **options,
        )
        usage = [chunk async for chunk in reply][-1].usage if stream else reply.usage
    assert engine.requests[0].predicted == tuple(text.encode())
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == len("Hello, ")
    assert details.rejected_prediction_tokens == len("world")
    assert usage.completion_tokens == 11, "what was rejected is no output"


async def test_choices_are_counted_together_and_no_prediction_is_none(serve: Serve) -> None:
    async with client(serve, FakeEngine([*b"ab", IM_END])) as api:
        two = await api.chat.completions.create(
            model=MODEL, messages=USER, n=2, prediction={"type": "content", "content": "abc"}
        )
        plain = await api.chat.completions.create(model=MODEL, messages=USER)
    details = two.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 2)
    details = plain.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "content", "content": "x" * 5000}, "prediction"),
        ({"type": "else", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]"),
    ],
)
async def test_predictions_that_cannot_be_are_refused(
    serve: Serve, prediction: Any, param: str
) -> None:
    async with client(serve, FakeEngine(b"x", max_model_len=1000)) as api:
        with pytest.raises(openai.BadRequestError) as error:
            await api.chat.completions.create(model=MODEL, messages=USER, prediction=prediction)
    assert error.value.param is not None and error.value.param.startswith(param.partition(".")[0])
