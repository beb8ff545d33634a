"""What a grammar lets through."""

from __future__ import annotations

import numpy as np

from jaxserve.api import Guide, GuideState
from jaxserve.tokenizer import Tokenizer, decode


def allowed(state: GuideState) -> list[int]:
    assert state.wait(10) and state.error is None, state.error
    bits = np.unpackbits(np.frombuffer(state.mask, np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def accepts(guide: Guide, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text, in any spelling by tokens, is complete under the grammar."""
    state = guide.start()
    for token in tokenizer.encode(text):
        if token not in allowed(state):
            return False
        state.advance(token)
    return bool(tokenizer.eos_token_ids & set(allowed(state)))


def random_text(guide: Guide, tokenizer: Tokenizer, seed: int, most: int) -> str | None:
    """What uniformly random tokens give; None if it is not complete after `most` of them.

    After half of them an end is taken as soon as there is one, and short tokens are preferred.
    """
    rng, state, tokens = np.random.default_rng(seed), guide.start(), list[int]()
    while len(tokens) < most:
        ids = allowed(state)
        ends = [i for i in ids if i in tokenizer.eos_token_ids]
        if ends and (len(ends) == len(ids) or len(tokens) > most // 2 or rng.random() < 0.1):
            return decode(tokenizer, tokens)
        ids = [i for i in ids if i not in tokenizer.eos_token_ids]
        if len(tokens) > most // 2:
            closing = [i for i in ids if tokenizer.token_bytes(i) in (b'"', b"}", b"]", b"0", b",")]
            ids = closing or ids
        tokens.append(int(rng.choice(ids)))
        state.advance(tokens[-1])
    return None
