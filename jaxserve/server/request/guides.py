"""Compiles the guides that keep a request's output within its constraints."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace

from jaxserve.api import SamplingParams
from jaxserve.server.errors import ApiError, invalid
from jaxserve.server.request.constraints import Constraint
from jaxserve.server.request.schema import GenerationFields
from jaxserve.server.service import Service
from jaxserve.server.tenant import CURRENT_TENANT
from jaxserve.structured import (
    BadWords,
    GrammarError,
    GrammarsBusy,
    Guide,
    Thinking,
    ThinkingBudget,
)
from jaxserve.tokenizer import Tokenizer

INLINE_WORDS = 8
"""Up to this many bad words are tokenised on the event loop; 128 words take 3 ms."""
_PLACES = re.compile(r"^at \d+\(\d+\): |(\n +\d+ \| .*)+(\n *\^)?$")
"""Positions in llguidance's messages: line and column, and the lines around them."""


def avoided(tokenizer: Tokenizer, fields: GenerationFields) -> BadWords | None:
    """Makes the guide against bad words, if there are any."""
    if not fields.bad_words:
        return None
    if fields.allowed_token_ids:
        raise invalid("allowed_token_ids and bad_words cannot be used together", param="bad_words")
    return BadWords(fields.bad_words, tokenizer)


async def guided(
    service: Service,
    params: SamplingParams,
    constraint: Constraint | None,
    bad_words: BadWords | None,
    thinking: Thinking = Thinking.NONE,
) -> SamplingParams:
    """Returns the parameters with the guide of the constraint or the guide against bad words.
    Raises ApiError if both are given, or if the grammar cannot be compiled."""
    if constraint is None:
        return params if bad_words is None else replace(params, guide=bad_words)
    others = {"allowed_token_ids": params.allowed_token_ids, "bad_words": bad_words}
    for name, given in others.items():
        if given:
            raise invalid(
                f"{name} and {constraint.param} cannot be used together", param=constraint.param
            )
    try:
        guide = await _compiled(service, constraint, thinking)
    except GrammarError as error:
        reason = _PLACES.sub("", str(error)) if constraint.written_here else str(error)
        raise invalid(
            f"{constraint.param}: {reason}", param=constraint.param, code="invalid_grammar"
        ) from None
    except GrammarsBusy as busy:
        raise ApiError(503, str(busy), code="grammars_busy", retry_after=busy.retry_after) from None
    stops = params.stop_token_ids | guide.end_token_ids
    return replace(params, guide=guide, stop_token_ids=stops)


async def _compiled(service: Service, constraint: Constraint, thinking: Thinking) -> Guide:
    try:
        grammar = await asyncio.to_thread(constraint.grammar)
        return await service.guides.compile(grammar, thinking, CURRENT_TENANT.get())
    except GrammarError:
        if constraint.looser is None:
            raise
    grammar = await asyncio.to_thread(constraint.looser)
    return await service.guides.compile(grammar, thinking, CURRENT_TENANT.get())


def within_budget(
    service: Service, params: SamplingParams, fields: GenerationFields, prompt: Sequence[int]
) -> SamplingParams:
    """Returns the parameters with a guide that ends reasoning after its token budget."""
    budget, tokenizer = fields.thinking_token_budget, service.tokenizer
    reasoning = service.chats.format.guided_reasoning
    if budget is None or budget >= params.max_tokens or reasoning is None:
        return params
    if params.allowed_token_ids:
        raise invalid(
            "allowed_token_ids and thinking_token_budget cannot be used together",
            param="thinking_token_budget",
        )
    guide = ThinkingBudget(budget, tokenizer, prompt, params.guide, reasoning.markers)
    return replace(params, guide=guide)
