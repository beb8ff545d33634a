"""A disk that is full, refuses, hangs or ends: its pages are misses, and slots are the caller's."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.offload import disk as disks
from jaxserve.offload.checksum import checksum
from jaxserve.offload.page_files import PageFiles
from jaxserve.offload.page_folder import is_held
from tests.offload.disk_setup import (
    SLOT_BYTES,
    Disk,
    disks_in,
)
from tests.offload.disk_writer import key_of, page_of


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    with disks_in(tmp_path / "kv") as build:
        yield build


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_page_that_cannot_be_written_leaves_nothing(
    make: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    disk = make()

    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate" if code == errno.ENOSPC else "pwritev", refuse)
        completion = disk.put(1)
    assert not completion.ok
    assert completion.error is not None
    assert os.strerror(code) in completion.error
    assert disk.files() == []
    assert not disk.tier.contains(key_of(1))
    counters = disk.tier.counters
    assert counters.disk_full == (code in (errno.ENOSPC, errno.EDQUOT))
    assert (counters.disk_writes_failed, counters.disk_writes) == (1, 0)
    assert disk.put(1).ok


def test_a_disk_that_fills_up_within_a_page_is_full(
    make: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, write = make(), os.pwritev
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda file, parts, at: write(file, parts[:1], at))
        assert not disk.put(1).ok
    assert disk.tier.counters.disk_full == 1
    assert disk.files() == []


def test_file_systems_that_only_write_through_their_cache_work(
    make: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, plain = list[str](), os.open

    def open_(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            direct.append(str(path))
            if flags & os.O_CREAT:
                os.close(plain(path, flags & ~os.O_DIRECT, *args))  # as some do
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return plain(path, flags, *args)

    monkeypatch.setattr(os, "open", open_)
    disk = make(threads=1)
    for number in range(3):
        assert disk.put(number).ok
        assert disk.get(number).ok
    assert len(direct) == 1, "it asks once"
    assert len(disk.files()) == 3


class Stuck:
    """A disk that hangs until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, *, before: bool):
        self.entered, self.released = threading.Event(), threading.Event()
        original = getattr(PageFiles, name)

        def hang(files: PageFiles, *args: Any) -> Any:
            if before:
                self._wait()
            result = original(files, *args)
            if not before:
                self._wait()
            return result

        monkeypatch.setattr(PageFiles, name, hang)

    def _wait(self) -> None:
        self.entered.set()
        assert self.released.wait(20)


def test_a_read_that_takes_too_long_is_given_up_and_touches_its_slot_no_more(
    make: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = make(timeout=0.2)
    disk.put(1)
    with monkeypatch.context() as patch:
        stuck = Stuck(patch, "read", before=True)
        assert disk.get(1) == (1, False, "it took more than 0.2 s")
        assert not disk.tier.contains(key_of(1)), "it would be asked for again"
        assert disk.tier.counters.disk_timeouts == 1
        disk.slab.slot(1)[:] = b"n" * SLOT_BYTES  # the next user's
        stuck.released.set()
        deadline = time.monotonic() + 5
        while not disk.tier.contains(key_of(1)) and time.monotonic() < deadline:
            time.sleep(0.005)
    assert bytes(disk.slab.slot(1)) == b"n" * SLOT_BYTES
    assert disk.tier.poll() == []
    assert disk.get(1).ok


@pytest.mark.parametrize("before", [False, True])
def test_a_write_that_takes_too_long_is_never_found(
    make: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    disk = make(timeout=0.2)
    with monkeypatch.context() as patch:
        stuck = Stuck(patch, "write", before=before)
        assert disk.put(1).error == "it took more than 0.2 s"
        disk.slab.slot(0)[:] = b"n" * SLOT_BYTES  # the next user's
        stuck.released.set()
        time.sleep(0.1)
    assert disk.files() == []
    assert not disk.tier.contains(key_of(1))
    assert disk.put(1).ok
    assert disk.get(1).ok


def test_pages_that_wait_too_long_are_given_up_but_stay(
    make: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = make(timeout=0.3, threads=1)
    disk.put(1)
    disk.put(2)
    stuck = Stuck(monkeypatch, "read", before=True)
    disk.tier.get(key_of(1), 1, 10)
    assert stuck.entered.wait(5)
    disk.tier.get(key_of(2), 2, 20)
    assert {each.tag for each in disk.wait(2) if not each.ok} == {10, 20}
    assert disk.tier.contains(key_of(2))
    stuck.released.set()


def test_too_many_waiting_writes_are_refused_at_once(
    make: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "MAX_WRITES", 2)
    disk = make(threads=1)
    stuck = Stuck(monkeypatch, "write", before=True)
    disk.tier.put(key_of(0), 0, 0)
    assert stuck.entered.wait(5)
    for number in (1, 2, 3):
        disk.tier.put(key_of(number), number, number)
    assert [each.tag for each in disk.wait(1)] == [3]
    assert disk.tier.counters.disk_busy == 1
    stuck.released.set()
    assert all(each.ok for each in disk.wait(3))


def test_a_page_that_changed_in_host_memory_is_not_written(make: Callable[..., Disk]) -> None:
    disk = make()
    disk.slab.slot(0)[:] = page_of(key_of(1), SLOT_BYTES)
    disk.slab.checksums[0] = checksum(b"something else")
    disk.tier.put(key_of(1), 0, 1)
    assert disk.wait(1) == [(1, False, "the page in host memory is damaged")]
    assert disk.tier.counters.checksum_failures == 1
    assert disk.files() == []


def test_closing_ends_every_job(make: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch) -> None:
    disk = make(threads=1)
    disk.put(9)
    stuck = Stuck(monkeypatch, "write", before=True)
    disk.tier.put(key_of(0), 0, 0)
    assert stuck.entered.wait(5)
    disk.tier.put(key_of(1), 1, 1)
    disk.tier.get(key_of(9), 2, 2)
    threading.Timer(0.1, stuck.released.set).start()
    assert disk.tier.close()
    disk.tier.put(key_of(3), 3, 3)
    disk.tier.get(key_of(9), 3, 4)
    ended = {each.tag: each.ok for each in disk.wait(5)}
    assert ended == {0: True, 1: False, 2: False, 3: False, 4: False}
    assert not is_held(disk.directory)


def test_a_disk_that_hangs_does_not_hold_the_end(
    make: Callable[..., Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "_CLOSING_SECONDS", 0.1)
    disk = make()
    stuck = Stuck(monkeypatch, "write", before=True)
    disk.tier.put(key_of(0), 0, 0)
    assert stuck.entered.wait(5)
    assert not disk.tier.close()
    assert is_held(disk.directory), "its directory could be taken while it is written"
    stuck.released.set()
