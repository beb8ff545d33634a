"""Snapshots of recurrent state in lower tiers: one piece for each recurrent layer."""

from __future__ import annotations

import hashlib

from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.snapshots import Snapshots


class StatePieces:
    """Names the pieces of snapshots. Pieces move like the pages of one more cache group.

    A snapshot is useful only with all of its pieces. Piece `slot * count + layer` on the device
    holds the state of `layer` in `slot`.
    """

    def __init__(self, snapshots: Snapshots, *, number: int, count: int):
        """`number`: index of the group; `count`: pieces per snapshot."""
        self.snapshots, self.number, self.count = snapshots, number, count

    def keys(self, content: bytes) -> list[bytes]:
        """Returns the keys of the pieces of the snapshot with this hash, 32 bytes each."""
        root = hashlib.sha256(b"state" + content)
        found: list[bytes] = []
        for layer in range(self.count):
            each = root.copy()
            each.update(layer.to_bytes(2))
            found.append(each.digest())
        return found

    def pieces(self, slot: int) -> range:
        """Returns the pieces of a slot on the device."""
        return range(slot * self.count, (slot + 1) * self.count)

    def publish_loaded(self, _: Sequence, hashes: list[bytes], number: int, page: int) -> None:
        """Reports a loaded piece of the snapshot after page `number`. Pieces arrive in order."""
        slot, layer = divmod(page, self.count)
        if layer == self.count - 1:
            self.snapshots.arrived(slot, hashes[number])
