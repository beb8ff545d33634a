"""A tier on disk with its memory, for tests, and ways to damage its files."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from jaxserve.offload.checksum import checksum
from jaxserve.offload.copier import Completion
from jaxserve.offload.disk import DiskTier
from jaxserve.offload.page_files import HEADER_BYTES
from jaxserve.offload.slab import HostSlab
from tests.offload.disk_writer import key_of, page_of

SLOT_BYTES = 5000
STRIDE = 8192
FILE_BYTES = HEADER_BYTES + STRIDE
NUM_SLOTS = 4
PLENTY = 1 << 30


class Disk:
    """A tier with its memory, and calls that wait for their end."""

    def __init__(
        self, folder: Path, max_bytes: int = PLENTY, fingerprint: str = "a", **options: Any
    ):
        self.slab = HostSlab(NUM_SLOTS, SLOT_BYTES)
        self.woken = threading.Event()
        options = {"wake": self.woken.set, **options}
        self.tier = DiskTier(folder, max_bytes, self.slab, fingerprint, **options)
        assert self.tier.wait_scanned(10)

    @property
    def directory(self) -> Path:
        return self.tier._folder.directory  # pyright: ignore[reportPrivateUsage]

    def path(self, number: int) -> Path:
        return self.directory / f"{key_of(number).hex()}.kv"

    def files(self) -> list[Path]:
        return sorted(each for each in self.directory.glob("*") if each.name != "lock")

    def wait(self, count: int) -> list[Completion]:
        found: list[Completion] = []
        deadline = time.monotonic() + 20
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} completions"
            self.woken.wait(0.05)
            self.woken.clear()
            found += self.tier.poll()
        assert len(found) == count
        return found

    def put(self, number: int, slot: int = 0) -> Completion:
        self.slab.slot(slot)[:] = page_of(key_of(number), SLOT_BYTES)
        self.slab.checksums[slot] = None
        self.tier.put(key_of(number), slot, number)
        (completion,) = self.wait(1)
        return completion

    def get(self, number: int, slot: int = 1) -> Completion:
        """A page that is read is the right one; a slot whose read failed is as it was."""
        before = os.urandom(SLOT_BYTES)
        self.slab.slot(slot)[:] = before
        self.tier.get(key_of(number), slot, number)
        (completion,) = self.wait(1)
        assert completion.tag == number
        expected = page_of(key_of(number), SLOT_BYTES) if completion.ok else before
        assert bytes(self.slab.slot(slot)) == expected
        if completion.ok:
            assert self.slab.checksums[slot] == checksum(expected)
        return completion

    def end(self) -> None:
        assert self.tier.close()
        self.slab.close()


@contextlib.contextmanager
def disks_in(folder: Path) -> Generator[Callable[..., Disk]]:
    """What makes tiers in a folder; all are closed at the end."""
    made: list[Disk] = []

    def build(*args: Any, **options: Any) -> Disk:
        made.append(Disk(folder, *args, **options))
        return made[-1]

    yield build
    for disk in made:
        disk.tier.close()
        disk.slab.close()


DAMAGES = ("truncate", "extend", "flip", "zero", "swap", "other model", "directory", "link", "gone")


def damage(disk: Disk, kind: str, number: int, seed: int) -> None:
    path, random_ = disk.path(number), random.Random(seed)
    content = bytearray(path.read_bytes())
    if kind == "truncate":
        os.truncate(path, random_.randrange(FILE_BYTES))
    elif kind == "extend":
        path.write_bytes(content + b"\0")
    elif kind == "flip":  # a bit that means something
        at = random_.choice([random_.randrange(112), HEADER_BYTES + random_.randrange(SLOT_BYTES)])
        content[at] ^= 1 << random_.randrange(8)
        path.write_bytes(content)
    elif kind == "zero":
        path.write_bytes(bytes(FILE_BYTES))
    elif kind == "swap":  # a whole page, but of other tokens
        shutil.copy(disk.path(0), path)
    elif kind == "other model":
        other = Disk(disk.directory.parent, fingerprint="b")
        other.put(number)
        shutil.copy(other.path(number), path)
        other.end()
    else:
        path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(disk.path(0))
