"""Fields of chats and completions that clients send and that are not honoured here."""

from __future__ import annotations

from typing import Any

type Harmless = tuple[Any, ...]

REJECTED: dict[str, Harmless] = {
    "audio": (),
    "chat_template": (),
    "documents": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding_backend": (),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "previous_response_id": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "stop_regex": (),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that would change the answer and are not supported, with the values that ask for nothing
(null is always one of them). Any other value is a 400 that names the field."""

SILENT = frozenset(
    {
        "metadata",
        "moderation",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "session_id",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields that have no effect on the answer anywhere: accepted without a word."""
