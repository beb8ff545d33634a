"""A process that writes pages to a folder until it is killed: python disk_writer.py FOLDER."""

from __future__ import annotations

import sys
import threading
from hashlib import sha256
from itertools import count
from pathlib import Path

import numpy as np

from jaxserve.offload.disk import DiskTier
from jaxserve.offload.slab import HostSlab

SLOT_BYTES, SLOTS = 200_000, 8
MAX_BYTES = 12 << 20


def key_of(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def page_of(key: bytes, size: int = SLOT_BYTES) -> bytes:
    """The only right content of a page."""
    seed = int.from_bytes(key[:8], "little")
    return np.random.default_rng(seed).bytes(size)


def main(folder: Path) -> None:
    slab, woken = HostSlab(SLOTS, SLOT_BYTES), threading.Event()
    tier = DiskTier(folder, MAX_BYTES, slab, "writer", wake=woken.set)
    free = list(range(SLOTS))
    for number in count():
        slot = free.pop()
        slab.slot(slot)[:] = page_of(key_of(number))
        tier.put(key_of(number), slot, slot)
        while not free:
            woken.wait(1)
            woken.clear()
            free += [each.tag for each in tier.poll()]
        print(number, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
