"""One pass from a request's fields and headers to one value.

What to generate, how to constrain it, how to read it. Every API whose requests are chats goes
through here: the adapters only translate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from jaxserve.api import Request
from jaxserve.server.arrival import Arrival
from jaxserve.server.chat_formats.output_parser import OutputParser
from jaxserve.server.errors import invalid
from jaxserve.server.off_loop import lane, off_loop
from jaxserve.server.output.generation import Choice, Generation, TextOptions
from jaxserve.server.request.constraints import constrained_chat
from jaxserve.server.request.params import choice_requests, sampling_params, text_options
from jaxserve.server.request.prompts import chat_prompt
from jaxserve.server.request.schema import ChatRequest
from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """All that a request has asked for. Nothing is submitted yet."""

    requests: Sequence[Request]
    """What to generate, one for each choice, and in its parameters the guide that constrains it.
    Those of one prompt stand together."""
    choices_per_prompt: int
    options: TextOptions
    """How tokens become text."""
    parser: Callable[[], OutputParser] | None = None
    """How text is read: makes a parser for one choice. None: it is not told apart."""
    tokenizing: float
    """Seconds that rendering and encoding the prompts took."""
    ignored: tuple[str, ...] = ()
    """What the request has and the prompts leave out."""

    def generation(self, tokenizer: Tokenizer) -> Generation:
        """The choices, ready to be submitted."""
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
    """What a chat asks for.

    Args:
      request_id: the choices' ids begin with it.
      size: bytes of the body.

    Raises:
      ApiError: names a field of `ChatRequest`, or a header.
    """
    logprobs, service = _num_logprobs(fields), arrival.service
    begun = time.perf_counter()
    prompt = await off_loop(
        lane(size), chat_prompt, fields, service.chats, service.tokenizer, service.engine.limits
    )
    tokenizing = time.perf_counter() - begun
    params = sampling_params(service, fields, max_tokens=prompt.max_tokens, logprobs=logprobs)
    constrained = await constrained_chat(service, fields, prompt, params)
    requests = choice_requests(arrival, request_id, prompt.ids, constrained.params, fields)
    return Resolved(
        requests=requests,
        choices_per_prompt=len(requests),
        options=text_options(fields, service.chats.format.shown_tokens),
        parser=partial(
            service.chats.format.parser,
            constrained.thinking,
            prompt.tools.callable,
            parallel_calls=fields.parallel_tool_calls is not False,
            text_or_calls=constrained.text_or_calls,
        ),
        tokenizing=tokenizing,
        ignored=prompt.ignored,
    )


def _num_logprobs(fields: ChatRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise invalid("top_logprobs needs logprobs: true", param="top_logprobs")
    return None
