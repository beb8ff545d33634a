"""A stand-in for models without tokenizer files: one token per byte of UTF-8."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.tokenizer.pieces import Progress, nothing

PLAIN_CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- message.role + ': ' + message.content + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant: ' }}
{%- endif %}
"""


class ByteTokenizer:
    """A token id is a byte value. Ids from 256 on have no text. No markers and no end of
    sequence."""

    vocab_size = 256
    markers: Mapping[str, int] = {}
    special_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    template_tokens: Mapping[str, str] = {}
    chat_template: str | None = PLAIN_CHAT_TEMPLATE

    def for_tenant(self, tenant: str) -> ByteTokenizer:
        return self

    def encode(
        self,
        text: str,
        breaker: str = "",
        progress: Progress = nothing,
        *,
        prefix: bool = True,
    ) -> list[int]:
        del prefix  # this tokenizer has no prefix
        return list((text.replace(breaker, "") if breaker else text).encode())

    def encode_part(self, text: str) -> list[int]:
        return self.encode(text)

    def spell(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if 0 <= token < 256 else b""
