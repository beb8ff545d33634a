"""Log probabilities in the words of the OpenAI API."""

from __future__ import annotations

from typing import Any

from jaxserve.api import TokenLogprobs
from jaxserve.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have; the value is vLLM's."""


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def chat_logprobs(
    tokenizer: Tokenizer, token: int, logprobs: TokenLogprobs, num_top: int
) -> dict[str, Any]:
    entry = _entry(tokenizer, token, logprobs.logprob)
    entry["top_logprobs"] = [
        _entry(tokenizer, other, logprob) for other, logprob in logprobs.top[:num_top]
    ]
    return {"content": [entry], "refusal": None}


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token),
        "bytes": list(tokenizer.token_bytes(token)),
        "logprob": finite(logprob),
    }
