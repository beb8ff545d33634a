"""Limits on the lengths of prompts and outputs."""

from __future__ import annotations

from jaxserve.api import EngineLimits
from jaxserve.server.errors import PromptTooLong, invalid
from jaxserve.server.request.schema import GenerationFields
from jaxserve.tokenizer import Progress

_COUNTED_ON = 16 * 1024
"""Tokens beyond the context that are still counted, so that most errors have an exact number."""


def tokens_to_generate(
    asked: int | None, prompt_tokens: int, limits: EngineLimits, *, param: str = "prompt"
) -> int:
    """Returns how many tokens to generate: the requested number, or fewer if the context is full.
    Raises PromptTooLong if the prompt leaves no room."""
    room = limits.max_model_len - prompt_tokens
    if room < 1:
        raise PromptTooLong(prompt_tokens, limits.max_model_len, param=param)
    return room if asked is None else min(asked, room)


def fitting(limits: EngineLimits, param: str) -> Progress:
    """Makes a check that stops the encoding of a prompt that is too long, if the prompt is not
    truncated.

    Raises:
      PromptTooLong: raised by the returned check.
    """

    def check(tokens: int) -> None:
        if tokens > limits.max_model_len + _COUNTED_ON:
            raise PromptTooLong(tokens, limits.max_model_len, param=param, exact=False)

    return check


def truncated(
    prompt: list[int], asked: int | None, fields: GenerationFields, limits: EngineLimits
) -> list[int]:
    """Returns the tokens that `truncate_prompt_tokens` keeps: the last or the first ones.

    -1 keeps as many as leave room for `asked` output tokens, or for one.
    """
    keep = fields.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(1, limits.max_model_len - max(1, asked or 1))
    if not 1 <= keep < limits.max_model_len:
        raise invalid(
            f"truncate_prompt_tokens must be -1 or 1 to {limits.max_model_len - 1}, got {keep}",
            param="truncate_prompt_tokens",
        )
    return prompt[:keep] if fields.truncation_side == "right" else prompt[-keep:]
