"""The generation behind every API whose requests are chats: the adapters only translate."""

from __future__ import annotations

import time

from jaxserve.server.errors import invalid
from jaxserve.server.off_loop import lane, off_loop
from jaxserve.server.output.generation import Choice, Generation
from jaxserve.server.output.output_parser import END_THINK, THINK, OutputParser
from jaxserve.server.request.constraints import (
    avoided,
    chat_constraint,
    constrained,
    text_constraint,
    within_budget,
)
from jaxserve.server.request.params import (
    check_token_ids,
    choice_requests,
    fitting,
    sampling_params,
    text_options,
    tokens_to_generate,
    truncated,
)
from jaxserve.server.request.prompts import ChatPrompt, chat_prompt
from jaxserve.server.request.schema import ChatRequest
from jaxserve.server.request.tools import ChatTools
from jaxserve.server.service import Service
from jaxserve.structured import Thinking


async def chat_generation(
    service: Service, fields: ChatRequest, request_id: str, size: int
) -> Generation:
    """One choice or several, each with a parser; nothing is submitted yet. `size`: of the body.

    Raises ApiError, naming the fields of `ChatRequest`.
    """
    limits, tokenizer = service.engine.limits, service.tokenizer
    begun = time.perf_counter()
    fits = None if fields.truncate_prompt_tokens else fitting(limits, "messages")
    prompt = await off_loop(lane(size), chat_prompt, fields, service.template, tokenizer, fits)
    tokenizing = time.perf_counter() - begun
    asked = _asked(fields)
    ids = truncated(prompt.ids, asked, fields, limits)
    params = sampling_params(
        fields,
        max_tokens=tokens_to_generate(asked, len(ids), limits, param="messages"),
        logprobs=_num_logprobs(fields),
        defaults=service.config.sampling_defaults,
        limits=limits,
        eos_token_ids=tokenizer.eos_token_ids,
        guide=await avoided(service, fields),
    )
    check_token_ids(ids, limits, "messages")
    thinking = _thinking(service, fields, prompt)
    constraint = chat_constraint(fields, prompt.tools, tokenizer.markers)
    params = await constrained(service, params, constraint, thinking)
    if thinking is not Thinking.NONE:
        params = within_budget(service, params, fields, ids)
    options = text_options(fields)
    choices = [
        Choice(index, request, tokenizer, options, _output_parser(fields, thinking, prompt.tools))
        for index, request in enumerate(choice_requests(request_id, ids, params, fields))
    ]
    return Generation(choices, len(choices), tokenizing=tokenizing, ignored=prompt.ignored)


def _asked(fields: ChatRequest) -> int | None:
    """Tokens to generate: the newer name goes before the older one."""
    newer = fields.max_completion_tokens
    return fields.max_tokens if newer is None else newer


def _num_logprobs(fields: ChatRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise invalid("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


def _thinking(service: Service, fields: ChatRequest, prompt: ChatPrompt) -> Thinking:
    """Follows from the model's markers and the prompt's end."""
    ending = prompt.ending.rstrip()
    if ending.endswith(THINK):
        return Thinking.OPEN
    closed = fields.continue_final_message or ending.endswith(END_THINK)
    return Thinking.NONE if closed or THINK not in service.tokenizer.markers else Thinking.MAY_OPEN


def _output_parser(fields: ChatRequest, thinking: Thinking, tools: ChatTools) -> OutputParser:
    return OutputParser(
        thinking=thinking is not Thinking.NONE,
        tools=bool(tools.callable),
        free_text=tools.free_text,
        opened=thinking is Thinking.OPEN,
        parallel_calls=fields.parallel_tool_calls is not False,
        # A text that follows a grammar has no calls in it, but may hold their markers in a string.
        text_or_calls=text_constraint(fields) is not None,
    )
