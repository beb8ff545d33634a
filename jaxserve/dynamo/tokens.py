"""Converts Dynamo's requests to the engine's, and the engine's events to Dynamo's chunks. Does not
import Dynamo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.api import (
    EngineLimits,
    FinishReason,
    Rejected,
    Request,
    SamplingParams,
    TokenEvent,
)
from jaxserve.config import SamplingDefaults
from jaxserve.server.request.params import GREEDY_BELOW, choice_seed

type Json = dict[str, Any]

_KNOWN = {
    "sampling_options": frozenset(
        {
            *("n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        }
    ),
    "stop_conditions": frozenset(
        {
            *("max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids"),
            "stop_token_ids_hidden",
        }
    ),
    "output_options": frozenset({"logprobs", "skip_special_tokens", "formatted_prompt"}),
}
"""Supported options. The frontend handles stop, skip_special_tokens and formatted_prompt."""
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "cancelled",
    FinishReason.ERROR: "error: the sequence failed",
    FinishReason.GRAMMAR: "error: the grammar met a limit",
}


def to_request(given: Json, name: str, limits: EngineLimits, defaults: SamplingDefaults) -> Request:
    """Returns the engine's request.

    Args:
      given: Dynamo's `GenerateRequest`; its `token_ids` is a list.
      name: id of the request.
      defaults: defaults of sampling fields.

    Raises:
      Rejected: the engine does not support an option.
    """
    options, stops, outputs = (_options(given, group) for group in _KNOWN)
    prompt = tuple(given["token_ids"])
    ends = {*(stops.get("stop_token_ids") or ()), *(stops.get("stop_token_ids_hidden") or ())}
    if not stops.get("ignore_eos"):
        ends |= set(given.get("eos_token_ids") or ())
    temperature = _set(options, "temperature", defaults.temperature)
    greedy = temperature < GREEDY_BELOW
    top_k = max(0, _set(options, "top_k", defaults.top_k))
    for field in ("n", "best_of"):  # the frontend ends an answer with its first choice
        if (options.get(field) or 1) > 1:
            raise Rejected(f"{field} is 1 at most: send several requests", param=field)
    nvext = (given.get("extra_args") or {}).get("nvext") or {}
    return Request(
        id=name,
        prompt=prompt,
        params=SamplingParams(
            max_tokens=stops.get("max_tokens") or max(1, limits.max_model_len - len(prompt)),
            min_tokens=stops.get("min_tokens") or 0,
            temperature=0.0 if greedy else temperature,
            top_k=0 if greedy or top_k >= limits.vocab_size else top_k,
            top_p=1.0 if greedy else _set(options, "top_p", defaults.top_p),
            min_p=0.0 if greedy else _set(options, "min_p", 0.0),
            seed=choice_seed(options.get("seed"), 0),
            stop_token_ids=frozenset(ends),
            presence_penalty=_set(options, "presence_penalty", 0.0),
            frequency_penalty=_set(options, "frequency_penalty", 0.0),
            repetition_penalty=_set(options, "repetition_penalty", 1.0),
            logprobs=outputs.get("logprobs"),
        ),
        priority=-int((given.get("routing") or {}).get("priority") or 0),
        cache_salt=nvext.get("cache_salt") or "",
    )


def to_chunk(events: Sequence[TokenEvent]) -> Json:
    """Returns a sequence's events as Dynamo's `GenerateChunk`, without usage."""
    tokens = [event for event in events if event.token is not None]
    chunk: Json = {"token_ids": [event.token for event in tokens], "index": 0}
    logprobs = [event.logprobs for event in tokens if event.logprobs is not None]
    if logprobs:
        chunk["log_probs"] = [each.logprob for each in logprobs]
        if any(each.top for each in logprobs):
            chunk["top_logprobs"] = [
                [
                    {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
                    for rank, (token, logprob) in enumerate(each.top, 1)
                ]
                for each in logprobs
            ]
    if (finish := events[-1].finish) is not None:
        chunk["finish_reason"] = _REASONS[finish]
    return chunk


def usage(prompt: int, sampled: int, cached: int) -> Json:
    """Returns OpenAI's usage for these numbers of tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _options(given: Json, group: str) -> Json:
    options: Json = given.get(group) or {}
    for name, value in options.items():
        if name not in _KNOWN[group] and value not in _NOTHING:
            raise Rejected(f"{name} is not supported by this worker", param=name)
    return options


def _set(options: Json, name: str, default: Any) -> Any:
    value = options.get(name)
    return default if value is None else value
