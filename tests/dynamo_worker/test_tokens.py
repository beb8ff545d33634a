"""Dynamo's requests in the engine's words, and the engine's events in Dynamo's."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.api import EngineLimits, FinishReason, Rejected, Request, TokenEvent, TokenLogprobs
from jaxserve.config import SamplingDefaults
from jaxserve.dynamo.tokens import to_chunk, to_request, usage

LIMITS = EngineLimits(max_model_len=100, vocab_size=50)
DEFAULTS = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20)


def request_of(**given: Any) -> Request:
    return to_request({"token_ids": [1, 2, 3], **given}, "r", LIMITS, DEFAULTS)


def test_what_is_not_set_is_the_model_s() -> None:
    request = request_of(sampling_options={"temperature": None, "n": None}, output_options=None)
    params = request.params
    assert (request.id, request.prompt, request.cache_salt) == ("r", (1, 2, 3), "")
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.9, 20, 97)
    assert params.stop_token_ids == frozenset() and params.logprobs is None


def test_options_and_stops_are_honoured() -> None:
    request = request_of(
        eos_token_ids=[7],
        sampling_options={"temperature": 0.5, "top_p": 0.8, "top_k": -1, "min_p": 0.1},
        stop_conditions={"max_tokens": 5, "min_tokens": 2, "stop_token_ids_hidden": [8]},
        output_options={"logprobs": 3},
        routing={"priority": 4},
        extra_args={"nvext": {"cache_salt": "s"}},
    )
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.8, 0, 0.1)
    assert (params.max_tokens, params.min_tokens, params.logprobs) == (5, 2, 3)
    assert params.stop_token_ids == {7, 8}
    assert (request.priority, request.cache_salt) == (-4, "s"), "higher goes first in Dynamo"


def test_end_tokens_may_be_ignored() -> None:
    stops = {"ignore_eos": True, "stop_token_ids": [9]}
    request = request_of(eos_token_ids=[7], stop_conditions=stops)
    assert request.params.stop_token_ids == {9}


def test_a_temperature_of_nothing_is_greedy() -> None:
    request = request_of(sampling_options={"temperature": 0.0, "top_p": 0.5, "top_k": 3})
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


def test_a_seed_decides_what_is_drawn() -> None:
    seeds = [request_of(sampling_options={"seed": seed}).params.seed for seed in (5, 5, 6, None)]
    assert seeds[0] == seeds[1] and len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("sampling_options", "guided_decoding", {"json": {}}),
        ("sampling_options", "use_beam_search", True),
        ("sampling_options", "n", 2),
        ("sampling_options", "best_of", 2),
        ("stop_conditions", "max_thinking_tokens", 5),
        ("output_options", "prompt_logprobs", 1),
    ],
)
def test_what_the_worker_has_not_is_refused_by_name(group: str, name: str, value: Any) -> None:
    with pytest.raises(Rejected, match=name):
        request_of(**{group: {name: value}})
    assert request_of(**{group: {name: None}})


def test_events_of_steps_are_one_chunk() -> None:
    logprobs = TokenLogprobs(-0.5, ((4, -0.5), (9, -1.0)))
    events = [TokenEvent("r", 4, logprobs=logprobs), TokenEvent("r", 5, logprobs=logprobs)]
    chunk = to_chunk(events)
    assert (chunk["token_ids"], chunk["index"]) == ([4, 5], 0)
    assert chunk["log_probs"] == [-0.5, -0.5] and "finish_reason" not in chunk
    assert chunk["top_logprobs"][1] == [
        {"rank": 1, "token_id": 4, "token": None, "logprob": -0.5},
        {"rank": 2, "token_id": 9, "token": None, "logprob": -1.0},
    ]


@pytest.mark.parametrize(
    ("finish", "reason"),
    [("stop", "stop"), ("length", "length"), ("abort", "cancelled"), ("error", "error: ")],
)
def test_the_last_chunk_says_why(finish: str, reason: str) -> None:
    token = 4 if finish in ("stop", "length") else None
    chunk = to_chunk([TokenEvent("r", token, FinishReason(finish))])
    assert chunk["finish_reason"].startswith(reason)
    assert chunk["token_ids"] == ([4] if token else [])


def test_usage_counts_the_cache() -> None:
    assert usage(10, 3, 8)["prompt_tokens_details"] == {"cached_tokens": 8}
    assert usage(10, 3, 8)["total_tokens"] == 13
