"""Decompresses bodies. aiohttp's own decompression accepts a gzip body that is cut short."""

from __future__ import annotations

import zlib

from jaxserve.server.errors import ApiError, invalid, too_large

_GZIP, _ZLIB, _RAW_DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
CODINGS = ("gzip", "deflate", "identity")


def unpacked(body: bytes, coding: str, most: int) -> bytes:
    """Returns the body that was sent with this Content-Encoding.

    Raises:
      ApiError: the encoding is unsupported (415), the body has more than `most` bytes (413), or it
        is
        incomplete.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in CODINGS:
        raise ApiError(
            415,
            f"Content-Encoding {coding[:40]!r} is not supported; supported: {', '.join(CODINGS)}",
            code="unsupported_media_type",
        )
    stream = zlib.decompressobj(_GZIP if coding == "gzip" else _deflate_format(body))
    try:
        content = stream.decompress(body, most + 1)
    except zlib.error:
        raise invalid(f"the body is not compressed with {coding}, as it claims") from None
    if len(content) > most:
        raise too_large(most)
    if not stream.eof or stream.unused_data:
        raise invalid(f"the body's {coding} data is cut short, or something follows it")
    return content


def _deflate_format(body: bytes) -> int:
    """Returns the zlib format. HTTP's deflate has zlib's header, but some clients omit it."""
    return _ZLIB if body[:1] and body[0] & 0xF == zlib.DEFLATED else _RAW_DEFLATE
