"""Text to token ids and back: the contract, a Hugging Face tokenizer, a byte-level stand-in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxserve.tokenizer.bytelevel import ByteTokenizer
from jaxserve.tokenizer.huggingface import HfTokenizer
from jaxserve.tokenizer.incremental import Detokenizer, StopStrings, decode
from jaxserve.tokenizer.pieces import Progress, nothing

__all__ = [
    "ByteTokenizer",
    "Detokenizer",
    "HfTokenizer",
    "Progress",
    "StopStrings",
    "Tokenizer",
    "decode",
    "nothing",
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
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end the model's output."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source."""
        ...

    @property
    def template_tokens(self) -> Mapping[str, str]:
        """Markers that the template knows by their roles: `bos_token`, `eos_token`."""
        ...

    def encode(
        self,
        text: str,
        breaker: str = "",
        progress: Progress = nothing,
        *,
        prefix: bool = True,
    ) -> list[int]:
        """A marker spelled in the text becomes its token, except where `breaker` splits it.

        With `prefix` the tokens that begin every prompt of the model come first, unless the text
        begins with them: Llama's `<|begin_of_text|>`.

        `breaker` is a character that the caller put into text which must not be read as markers;
        it is taken out before the text around it is encoded. `progress` is called now and then,
        with the number of tokens so far, and may raise to end it.
        """
        ...

    def encode_part(self, text: str) -> list[int]:
        """Of what stands in the middle of a text: nothing is put before it."""
        ...

    def for_tenant(self, tenant: str) -> Tokenizer:
        """The same; how long it takes depends on texts of this tenant alone."""
        ...

    def spell(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly those of the text: none is a marker."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 of one token, perhaps a part of a character; empty for ids it does not know."""
        ...
