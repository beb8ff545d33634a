"""Text to token ids and back: the contract, a Hugging Face tokenizer, a byte-level stand-in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxserve.tokenizer.bytelevel import ByteTokenizer
from jaxserve.tokenizer.huggingface import HfTokenizer
from jaxserve.tokenizer.incremental import Detokenizer, StopStrings, decode

__all__ = [
    "ByteTokenizer",
    "Detokenizer",
    "HfTokenizer",
    "StopStrings",
    "Tokenizer",
    "decode",
]


@runtime_checkable
class Tokenizer(Protocol):
    """What the server needs of a tokenizer. Methods may be called from any thread."""

    @property
    def vocab_size(self) -> int:
        """Ids with a text are below this; a model may have more rows."""
        ...

    @property
    def markers(self) -> Mapping[str, int]:
        """Added tokens by spelling, such as `<|im_end|>` and `<think>`."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that text leaves out by default: `<|im_end|>` is one, `<think>` is not."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source."""
        ...

    def encode(self, text: str, breaker: str = "") -> list[int]:
        """A marker spelled in the text becomes its token, except where `breaker` splits it.

        `breaker` is a character that the caller put into text which must not be read as markers;
        it is taken out before the text around it is encoded.
        """
        ...

    def spell(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly those of the text: none is a marker."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 of one token, perhaps a part of a character; empty for ids it does not know."""
        ...
