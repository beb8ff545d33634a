"""Text to token ids and back: the interface, a Hugging Face tokenizer, a byte-level stand-in."""

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
    """The interface of tokenizers. Any thread may call the methods."""

    @property
    def vocab_size(self) -> int:
        """Ids with a text are below this. A model's embedding may have more rows."""
        ...

    @property
    def markers(self) -> Mapping[str, int]:
        """Added tokens by spelling, such as `<|im_end|>` and `<think>`."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that text omits by default: `<|im_end|>` is one, `<think>` is not."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end the model's output."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template."""
        ...

    @property
    def template_tokens(self) -> Mapping[str, str]:
        """Markers by their role in templates: `bos_token`, `eos_token`."""
        ...

    def encode(
        self,
        text: str,
        breaker: str = "",
        progress: Progress = nothing,
        *,
        prefix: bool = True,
    ) -> list[int]:
        """Encodes a text. The spelling of a marker becomes its token, unless `breaker` splits it.

        Args:
          breaker: a character that the caller inserted into client text, so that it contains no
            markers. It is removed before encoding.
          progress: called periodically with the number of tokens so far. It may raise to stop.
          prefix: whether to prepend the tokens that begin every prompt of the model, such as
            Llama's
            `<|begin_of_text|>`, unless the text begins with them.
        """
        ...

    def encode_part(self, text: str) -> list[int]:
        """Encodes text from the middle of a text, without a prefix."""
        ...

    def for_tenant(self, tenant: str) -> Tokenizer:
        """Returns the same tokenizer. Its caches, and so its times, depend on this tenant's texts
        only."""
        ...

    def spell(self, text: str) -> list[int]:
        """Returns tokens whose bytes are exactly those of the text. None of them is a marker."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Returns the UTF-8 bytes of a token, perhaps part of a character; empty for unknown
        ids."""
        ...
