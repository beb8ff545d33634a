"""Thoughts that clients keep and send back without reading or changing them."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet


class Sealer:
    """Seals texts with the first key, opens those of any."""

    def __init__(self, keys: Sequence[str] = ()):
        """`keys`: long random texts. Without any there is one of this start, for texts of this
        start."""
        self._keys = keys or (secrets.token_hex(32),)

    def seal(self, text: str, tenant: str) -> str:
        return self._fernet.encrypt(msgspec.json.encode((tenant, text))).decode()

    def open(self, sealed: str, tenant: str) -> str | None:
        """Returns the text; None: it was sealed for another tenant or with another key, or
        changed."""
        from cryptography.fernet import InvalidToken

        try:
            opened = self._fernet.decrypt(sealed.encode())
        except (InvalidToken, UnicodeEncodeError):
            return None
        owner, text = msgspec.json.decode(opened, type=tuple[str, str])
        return text if owner == tenant else None

    @cached_property
    def _fernet(self) -> MultiFernet:
        # Not at the start of every server: it takes 25 ms and 10 MB.
        from cryptography.fernet import Fernet, MultiFernet

        digests = [hashlib.sha256(key.encode()).digest() for key in self._keys]
        return MultiFernet([Fernet(base64.urlsafe_b64encode(digest)) for digest in digests])
