"""Turns request fields into the engine's sampling parameters: defaults, limits and seeds."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from jaxserve.api import EngineLimits, Request, SamplingParams
from jaxserve.server.arrival import Standing
from jaxserve.server.errors import invalid
from jaxserve.server.output.generation import TextOptions
from jaxserve.server.request.schema import ChatRequest, GenerationFields
from jaxserve.server.request.validation import check_token_ids
from jaxserve.server.service import Service

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy sampling, as in vLLM."""


def sampling_params(
    service: Service, fields: GenerationFields, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """Returns the parameters of a request without a guide and without a seed, because each choice
    has its own seed. Raises ApiError if a value conflicts with another one or with the model."""
    defaults, limits = service.config.sampling_defaults, service.engine.limits
    ends = service.tokenizer.eos_token_ids
    if isinstance(fields, ChatRequest):
        ends |= service.chats.format.turn_ends
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(
            f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})", param="min_tokens"
        )
    stops = frozenset(fields.stop_token_ids or ())
    check_token_ids(tuple(stops), limits, "stop_token_ids")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=_given(fields.temperature, defaults.temperature),
        top_k=max(0, _given(fields.top_k, defaults.top_k)),
        top_p=_given(fields.top_p, defaults.top_p),
        min_p=_given(fields.min_p, 0.0),
        stop_token_ids=stops if fields.ignore_eos else stops | ends,
        min_tokens=min_tokens,
        presence_penalty=_given(fields.presence_penalty, 0.0),
        frequency_penalty=_given(fields.frequency_penalty, 0.0),
        repetition_penalty=_given(fields.repetition_penalty, 1.0),
        logit_bias=_logit_bias(fields, limits),
        allowed_token_ids=_allowed(fields, limits),
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(fields),
    )
    if params.top_k >= limits.vocab_size:
        params = replace(params, top_k=0)
    if params.temperature < GREEDY_BELOW:
        params = replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    return params


def _prompt_logprobs(fields: GenerationFields) -> int | None:
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid("prompt_logprobs is not available with stream", param="prompt_logprobs")
    return fields.prompt_logprobs


def _logit_bias(fields: GenerationFields, limits: EngineLimits) -> tuple[tuple[int, float], ...]:
    biases: list[tuple[int, float]] = []
    for key, bias in (fields.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20):
            last = limits.vocab_size - 1
            raise invalid(f"{key[:50]!r} is not a token id: 0 to {last}", param="logit_bias")
        if not -100 <= bias <= 100:
            param = f"logit_bias.{key}"
            raise invalid(f"{param} must be -100 to 100, got {bias:g}", param=param)
        biases.append((int(key), bias))
    check_token_ids([token for token, _ in biases], limits, "logit_bias")
    return tuple(biases)


def _allowed(fields: GenerationFields, limits: EngineLimits) -> tuple[int, ...]:
    allowed = tuple(fields.allowed_token_ids or ())
    check_token_ids(allowed, limits, "allowed_token_ids")
    sampled = limits.sampled_vocab
    if allowed and sampled is not None and min(allowed) >= sampled:
        raise invalid(
            f"none of allowed_token_ids is a token that can be generated: 0 to {sampled - 1}",
            param="allowed_token_ids",
        )
    return allowed


def text_options(
    fields: GenerationFields, shown_tokens: frozenset[int] = frozenset()
) -> TextOptions:
    """Returns the options for text. `shown_tokens`: special tokens that are kept in the text."""
    return TextOptions(
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special=fields.skip_special_tokens is not False,
        shown_tokens=shown_tokens,
        stop_token_logprobs=bool(fields.return_token_ids),
    )


def choice_requests(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    fields: GenerationFields,
    standing: Standing,
    predicted: Sequence[int] = (),
) -> list[Request]:
    """Makes one engine request per choice. Its seed depends only on the request's seed and its
    index."""
    ids, predicted = tuple(prompt), tuple(predicted)
    return [
        Request(
            id=f"{request_id}-{index}",
            prompt=ids,
            params=replace(params, seed=choice_seed(fields.seed, index)),
            predicted=predicted,
            **standing._asdict(),
        )
        for index in range(num_choices(fields))
    ]


def num_choices(fields: GenerationFields) -> int:
    """Returns the number of choices. Raises ApiError if `best_of` is more than `n`."""
    n = fields.n or 1
    if fields.best_of is not None and fields.best_of != n:
        raise invalid(
            f"best_of must equal n ({n}) or be absent, got {fields.best_of}: choosing the best of "
            "several completions is not supported",
            param="best_of",
            code="unsupported_parameter",
        )
    return n


def choice_seed(seed: int | None, index: int) -> int:
    """Returns a 32-bit seed; a random one if the request has none (in vLLM, -1 means none)."""
    if seed is None or seed == -1:
        return secrets.randbits(32)
    return int.from_bytes(blake2b(f"{seed}:{index}".encode(), digest_size=4).digest())


def _given[T](value: T | None, default: T) -> T:
    return default if value is None else value
