"""Log probabilities in the format of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.api import PromptLogprobs, TokenLogprobs
from jaxserve.tokenizer import Tokenizer

LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have. The value is vLLM's."""


def finite(logprob: float) -> float:
    """Returns a logprob that JSON can hold: minus infinity becomes LOWEST."""
    return max(logprob, LOWEST)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[PromptLogprobs]
) -> list[dict[str, Any] | None]:
    """Returns logprobs in vLLM's format: by position, then by token id; None for the first
    token."""
    shown: list[dict[str, Any] | None] = [None]
    for token, entry in zip(prompt[1:], logprobs, strict=True):
        ranked = [(other, value, rank) for rank, (other, value) in enumerate(entry.top, 1)]
        shown.append(
            {
                str(other): {
                    "logprob": finite(value),
                    "rank": rank,
                    "decoded_token": token_text(tokenizer, other),
                }
                for other, value, rank in [(token, entry.logprob, entry.rank), *ranked]
            }
        )
    return shown


class TextLogprobs:
    """The logprobs of a completion in parts. Text offsets continue from one part to the next."""

    def __init__(self, tokenizer: Tokenizer, offset: int):
        """`offset`: number of characters before the first part."""
        self._tokenizer = tokenizer
        self._offset = offset

    def of(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | PromptLogprobs | None]
    ) -> dict[str, list[Any]]:
        part: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        for token, entry in zip(tokens, logprobs, strict=True):
            text = token_text(self._tokenizer, token)
            part["tokens"].append(text)
            part["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            part["top_logprobs"].append(None if entry is None else self._top(text, entry))
            part["text_offset"].append(self._offset)
            self._offset += len(text)
        return part

    def _top(self, text: str, entry: TokenLogprobs | PromptLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for other, logprob in entry.top:
            top.setdefault(token_text(self._tokenizer, other), finite(logprob))
        top.setdefault(text, finite(entry.logprob))
        return top


def chat_logprobs(
    tokenizer: Tokenizer, token: int, logprobs: TokenLogprobs, num_top: int
) -> list[dict[str, Any]]:
    """Returns the entry of one token, in a list."""
    entry = _entry(tokenizer, token, logprobs.logprob)
    entry["top_logprobs"] = [
        _entry(tokenizer, other, logprob) for other, logprob in logprobs.top[:num_top]
    ]
    return [entry]


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token),
        "bytes": list(tokenizer.token_bytes(token)),
        "logprob": finite(logprob),
    }
