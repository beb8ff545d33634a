"""Resolves the fields and headers of a chat to one value: the requests to generate, their
constraints, and how to read their output.

Every API whose requests are chats uses this module. The adapters only translate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from jaxserve.api import Request
from jaxserve.server.arrival import Arrival
from jaxserve.server.chat_formats.tool_format import Parser
from jaxserve.server.errors import invalid
from jaxserve.server.off_loop import Lane, lane, off_loop
from jaxserve.server.output.generation import Choice, Generation, TextOptions
from jaxserve.server.request.constraints import chat_constraint
from jaxserve.server.request.guides import INLINE_WORDS, avoided, guided, within_budget
from jaxserve.server.request.params import choice_requests, sampling_params, text_options
from jaxserve.server.request.prompts import ChatPrompt, chat_prompt
from jaxserve.server.request.schema import ChatRequest, GenerationFields
from jaxserve.server.service import Service
from jaxserve.structured import BadWords, Thinking
from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Everything that a request asks for. Nothing is submitted yet."""

    requests: Sequence[Request]
    """The engine requests, one for each choice, with the guide in their parameters. Requests of one
    prompt are adjacent."""
    choices_per_prompt: int
    options: TextOptions
    """Options for the conversion of tokens to text."""
    parser: Callable[[], Parser] | None = None
    """Makes the parser of one choice. None: the text is not parsed."""
    tokenizing: float
    """Seconds to render and encode the prompts."""
    ignored: tuple[str, ...] = ()
    """Parts of the request that the prompts leave out."""

    def generation(self, tokenizer: Tokenizer) -> Generation:
        """Makes the choices, ready to be submitted."""
        choices = [
            Choice(index, request, tokenizer, self.options, self.parser() if self.parser else None)
            for index, request in enumerate(self.requests)
        ]
        return Generation(
            choices, self.choices_per_prompt, tokenizing=self.tokenizing, ignored=self.ignored
        )


async def resolve_chat(
    arrival: Arrival, fields: ChatRequest, request_id: str, size: int
) -> Resolved:
    """Resolves the fields and headers of a chat.

    Args:
      request_id: prefix of the choices' ids.
      size: size of the body in bytes.

    Raises:
      ApiError: names a field of `ChatRequest` or a header.
    """
    logprobs, where = num_logprobs(fields), lane_of(fields, size)
    service, form = arrival.service, arrival.service.chats.format
    begun = time.perf_counter()
    prompt, bad_words = await off_loop(where, read_chat, service, fields)
    tokenizing = time.perf_counter() - begun
    thinking, constraint = prompt.thinking, chat_constraint(form, fields, prompt.tools)
    if constraint is not None and form.guided_reasoning is None:
        thinking = Thinking.NONE  # the grammar applies from the first token on
    params = sampling_params(service, fields, max_tokens=prompt.max_tokens, logprobs=logprobs)
    params = await guided(service, params, constraint, bad_words, thinking)
    if thinking is not Thinking.NONE:
        params = within_budget(service, params, fields, prompt.ids)
    standing = arrival.standing(fields)
    requests = choice_requests(request_id, prompt.ids, params, fields, standing, prompt.predicted)
    shown = form.shown_tokens(thinking, calls=bool(prompt.tools.callable))
    parser = partial(
        form.parser,
        thinking,
        prompt.tools.callable,
        parallel_calls=fields.parallel_tool_calls is not False,
        text_or_calls=constraint is not None and constraint.text_or_calls,
    )
    return Resolved(
        requests=requests,
        choices_per_prompt=len(requests),
        options=text_options(fields, shown),
        parser=parser,
        tokenizing=tokenizing,
        ignored=prompt.ignored,
    )


def lane_of(fields: GenerationFields, size: int) -> Lane:
    """Returns where to encode the prompt and the bad words of a request."""
    many = len(fields.bad_words or ()) > INLINE_WORDS
    return max(lane(size), Lane.LARGE if many else Lane.INLINE)


def read_chat(service: Service, fields: ChatRequest) -> tuple[ChatPrompt, BadWords | None]:
    """Returns the prompt of a chat, and the words to avoid.

    Raises:
      ApiError: the prompt is too long, or a field is wrong.
      Abandoned: the request is over.
    """
    prompt = chat_prompt(fields, service.chats, service.tokenizer, service.engine.limits)
    return prompt, avoided(service.tokenizer, fields)


def num_logprobs(fields: ChatRequest) -> int | None:
    """Returns how many alternatives per token a chat asks for; None: no logprobs.

    Raises:
      ApiError: `top_logprobs` is given without `logprobs`.
    """
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise invalid("top_logprobs needs logprobs: true", param="top_logprobs")
    return None
