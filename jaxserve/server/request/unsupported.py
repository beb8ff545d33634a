"""Fields of chats and completions that clients send but that this server does not support."""

from __future__ import annotations

from typing import Any

type Harmless = tuple[Any, ...]

REJECTED: dict[str, Harmless] = {
    "audio": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "chat_template": (),
    "documents": (),
    "ec_transfer_params": ({},),
    "function_call": ("none",),
    "functions": ([],),
    "guided_decoding_backend": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "lora_path": (),
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
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that would change the answer but are not supported. Each has the values that ask for
nothing, and null is always one of them. Any other value is a 400 that names the field."""

_ONE_SERVER = "this server reads prompts and answers them itself; it takes no part in a transfer"

INSTEAD = {
    "background": "wait for the answer, or stream it",
    "bootstrap_host": _ONE_SERVER,
    "bootstrap_port": _ONE_SERVER,
    "bootstrap_room": _ONE_SERVER,
    "chat_template": "the template is the model's or that of --chat-template",
    "conversation": "use previous_response_id, or send all of it in input",
    "documents": "put them into the messages",
    "ec_transfer_params": _ONE_SERVER,
    "function_call": "use tool_choice",
    "functions": "use tools",
    "kv_transfer_params": _ONE_SERVER,
    "length_penalty": "there is no beam search",
    "logits_processors": "no code is taken from requests; see logit_bias",
    "logprob_token_ids": "only the most likely tokens have logprobs, up to 20",
    "lora_path": "LoRA adapters are not served here",
    "no_stop_trim": "use include_stop_str_in_output",
    "output_format": "use output_config.format",
    "previous_response_id": "it is a field of /v1/responses; send all messages here",
    "prompt": "no prompts are stored here: send instructions and input",
    "prompt_embeds": "no tensors are taken from requests; token ids are",
    "repetition_detection": "see repetition_penalty",
    "return_tokens_as_token_ids": "use return_token_ids",
    "separate_reasoning": "thoughts are always apart; include_reasoning: false leaves them out",
    "stop_regex": "use stop",
    "stream_interval": "every token is an event",
    "suffix": "no model here fills in the middle",
    "use_beam_search": "there is no beam search",
    "web_search_options": "nothing is fetched here",
}
"""Advice in the error for a field that this API refuses, here or in another API's route."""

SILENT = frozenset(
    {
        "metadata",
        "moderation",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields that never have an effect on the answer. They are accepted and not reported."""
