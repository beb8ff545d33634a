"""The common parts of chat and completion chunks: head, usage, end."""

from __future__ import annotations

from typing import Any

from jaxserve.server.arrival import Arrival
from jaxserve.server.errors import ApiError
from jaxserve.server.output.generation import Generation
from jaxserve.server.request.schema import GenerationFields, StreamOptions
from jaxserve.server.service import Service
from jaxserve.server.sse import DONE, data_event, event_encoder

type Json = dict[str, Any]


def check_stream_options(service: Service, fields: GenerationFields) -> StreamOptions:
    """Returns the stream options, combined with the server's flags. Raises ApiError if there are
    options but no stream was requested."""
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    options = fields.stream_options or StreamOptions()
    if service.config.force_include_usage:
        options.include_usage = True
    return options


class OpenAIReply:
    """The common parts of replies of both APIs. Subclasses format choices."""

    def __init__(
        self,
        *,
        arrival: Arrival,
        prefix: str,
        kind: str,
        model: str,
        generation: Generation,
        options: StreamOptions,
        fields: GenerationFields,
    ):
        """`prefix`: prefix of the id; `kind`: the object type of chunks."""
        self.generation = generation
        self._head: Json = {
            "id": f"{prefix}-{arrival.id}",
            "object": kind,
            "created": arrival.created,
            "model": model,
            **arrival.tier(fields),
        }
        self._arrived = arrival.at
        self._options = options
        self._encode = event_encoder(options)
        self._tokenizer = arrival.service.tokenizer
        self._return_token_ids = bool(fields.return_token_ids)
        self._plain = not (options.continuous_usage_stats or options.include_obfuscation)
        self._plain &= not fields.return_token_ids

    def _chunk(self, choice: Json) -> Json:
        chunk: Json = {**self._head, "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def last_events(self) -> bytes:
        return self._encode(self._usage_chunk()) + DONE if self._options.include_usage else DONE

    def error_events(self, error: ApiError) -> bytes:
        return data_event(error.body()) + DONE

    def _usage(self) -> Json:
        prompt, completion = self.generation.prompt_tokens, self.generation.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.generation.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.generation.reasoning_tokens,
                "accepted_prediction_tokens": self.generation.accepted_prediction_tokens,
                "rejected_prediction_tokens": self.generation.rejected_prediction_tokens,
            },
        }

    def _usage_chunk(self) -> Json:
        """Returns the usage chunk before the end of a stream. `metrics` has vLLM's format."""
        chunk: Json = {**self._head, "choices": [], "usage": self._usage()}
        if (start := self.generation.choices[0].start) is not None:
            chunk["metrics"] = {
                "queue_time_ms": round(start.queued * 1e3, 3),
                "time_to_first_token_ms": round((start.on_host - self._arrived) * 1e3, 3),
            }
        return chunk
