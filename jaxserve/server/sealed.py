"""Encrypted reasoning: clients store it and send it back, but cannot read or change it."""

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
    """Encrypts texts with the first key, and decrypts texts of any of its keys."""

    def __init__(self, keys: Sequence[str] = ()):
        """`keys`: long random texts. Without keys it makes one that is valid until the server
        stops."""
        self._keys = keys or (secrets.token_hex(32),)

    def seal(self, text: str, tenant: str) -> str:
        return self._fernet.encrypt(msgspec.json.encode((tenant, text))).decode()

    def open(self, sealed: str, tenant: str) -> str | None:
        """Returns the text. None if it was encrypted for another tenant or with an unknown key, or
        was changed."""
        from cryptography.fernet import InvalidToken

        try:
            opened = self._fernet.decrypt(sealed.encode())
        except (InvalidToken, UnicodeEncodeError):
            return None
        owner, text = msgspec.json.decode(opened, type=tuple[str, str])
        return text if owner == tenant else None

    @cached_property
    def _fernet(self) -> MultiFernet:
        # Imported here: the import takes 25 ms and 10 MB, and most servers do not need it.
        from cryptography.fernet import Fernet, MultiFernet

        digests = [hashlib.sha256(key.encode()).digest() for key in self._keys]
        return MultiFernet([Fernet(base64.urlsafe_b64encode(digest)) for digest in digests])
