"""Converts a tokenizer to llguidance's tokenizer."""

from __future__ import annotations

import pickle

from llguidance import LLTokenizer, TokenizerWrapper

from jaxserve.grammar_server.wire import Setup
from jaxserve.tokenizer import Tokenizer


def make_vocabulary(setup: Setup) -> LLTokenizer:
    """Returns the tokenizer for llguidance. Takes a second or two for 150,000 tokens."""
    tokenizer: Tokenizer = pickle.loads(setup.tokenizer)
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    tokens += [b"<end>"] * (setup.num_tokens - len(tokens))  # this text then means the end
    asked = _Tokens(tokenizer, tokens, setup.end_token_ids)
    wrapper = TokenizerWrapper(asked)
    made = LLTokenizer(wrapper, n_vocab=len(tokens), eos_token=setup.end_token_ids)
    asked.tokens = wrapper.tokens = []  # llguidance has its own copy
    return made


class _Tokens:
    """The interface of a tokenizer that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], ends: list[int]):
        self.eos_token_id = min(ends)
        self.tokens = tokens
        # Text never contains markers: `</tool_call>` in a string is spelled by other tokens.
        self.special_token_ids = sorted({*tokenizer.markers.values(), self.eos_token_id})
        self._spell = tokenizer.spell

    def __call__(self, text: str) -> list[int]:
        """Encodes text that the grammar forces. The mask allows only these tokens."""
        return self._spell(text)
