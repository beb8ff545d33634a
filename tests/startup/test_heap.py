"""The process's own memory: what files hold is given back, what only the process holds stays."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
from pathlib import Path

import pytest

from jaxserve.startup import heap

PAGES = 64
SIZE = PAGES * mmap.PAGESIZE
LIBRARY = ctypes.CDLL(None, use_errno=True)
LIBRARY.mmap.restype = ctypes.c_void_p
LIBRARY.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBRARY.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def mapped(file: Path) -> int:
    """The address of a private mapping of the whole file, as a library's are; behind it one of no
    file, of which nothing is in memory."""
    flags, fixed = mmap.MAP_PRIVATE, 0x10
    both = LIBRARY.mmap(None, 2 * SIZE, 0, flags | mmap.MAP_ANONYMOUS, -1, 0)
    with file.open("rb") as stream:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = LIBRARY.mmap(both, SIZE, protection, flags | fixed, stream.fileno(), 0)
    assert address == both
    assert address not in (None, ctypes.c_void_p(-1).value)
    return address


def resident(file: Path) -> int:
    """Bytes of the file that are in this process's memory."""
    found = re.search(rf"{file}\n(?:.+\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "library.so"
    file.write_bytes(b"".join(bytes([page]) * mmap.PAGESIZE for page in range(PAGES)))
    return file


def test_pages_that_a_file_holds_leave_and_come_back_when_they_are_read(file: Path) -> None:
    address = mapped(file)
    LIBRARY.mprotect(address, SIZE, mmap.PROT_READ)
    content = (ctypes.c_ubyte * SIZE).from_address(address)
    assert bytes(content) == file.read_bytes()
    assert resident(file) == SIZE
    heap.forget_clean_pages(LIBRARY)
    assert resident(file) == 0
    assert bytes(content) == file.read_bytes()


@pytest.mark.parametrize("protection", [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE])
def test_pages_that_were_written_stay(file: Path, protection: int) -> None:
    """What the dynamic linker relocated, for one, and made read-only then."""
    address = mapped(file)
    content = (ctypes.c_ubyte * SIZE).from_address(address)
    content[5 * mmap.PAGESIZE] = 99
    LIBRARY.mprotect(address, SIZE, protection)
    heap.forget_clean_pages(LIBRARY)
    assert content[5 * mmap.PAGESIZE] == 99
    assert content[6 * mmap.PAGESIZE] == 6


def test_while_it_starts_freed_memory_is_joined_at_once_and_collections_are_rare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(heap, "_keep_apart", sizes.append)
    thresholds = gc.get_threshold()
    try:
        heap.import_freely()
        assert not gc.isenabled()
        heap.imported()
        assert gc.isenabled()
        assert gc.get_threshold()[0] > 1000
        assert sizes == [0]
        heap.settle()
        assert sizes == [0, 128]
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
