"""Pages in files: the right page or a miss, whatever happens to files, disk and process."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.offload import disk as disks
from jaxserve.offload.checksum import checksum
from jaxserve.offload.copier import Completion
from jaxserve.offload.disk import DiskTier
from jaxserve.offload.page_files import HEADER_BYTES, PageFiles
from jaxserve.offload.page_folder import FolderError, is_held
from jaxserve.offload.slab import HostSlab
from tests.offload import disk_writer
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


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    made: list[Disk] = []

    def build(*args: Any, **options: Any) -> Disk:
        made.append(Disk(tmp_path / "kv", *args, **options))
        return made[-1]

    yield build
    for disk in made:
        disk.tier.close()
        disk.slab.close()


def test_a_page_comes_back_and_others_are_misses(make: Callable[..., Disk]) -> None:
    disk = make()
    assert disk.put(1) == (1, True, None)
    assert disk.tier.contains(key_of(1))
    assert disk.get(1).ok
    assert not disk.tier.contains(key_of(2))
    assert disk.get(2) == (2, False, "no such page")
    counters = disk.tier.counters
    assert (counters.disk_writes, counters.disk_reads) == (1, 1)
    assert counters.disk_write_bytes == counters.disk_read_bytes == SLOT_BYTES
    assert counters.disk_write_seconds > 0 < counters.disk_read_seconds
    assert (counters.disk_reads_failed, counters.disk_writes_failed) == (1, 0)


def test_files_are_the_user_s_alone(make: Callable[..., Disk]) -> None:
    old = os.umask(0)
    try:
        disk = make()
        disk.put(1)
    finally:
        os.umask(old)
    assert [stat.S_IMODE(each.stat().st_mode) for each in disk.directory.iterdir()] == [0o600] * 2
    assert stat.S_IMODE(disk.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(disk.directory.parent.stat().st_mode) == 0o700
    assert disk.path(1).stat().st_size == FILE_BYTES


def test_a_page_is_written_once(make: Callable[..., Disk]) -> None:
    disk = make()
    disk.put(1)
    before = disk.path(1).stat()
    assert disk.put(1).ok
    assert disk.path(1).stat().st_ino == before.st_ino
    assert disk.tier.counters.disk_writes == 1


def test_pages_survive_a_restart_in_the_order_of_their_use(make: Callable[..., Disk]) -> None:
    disk = make(3 * FILE_BYTES, threads=1)
    for number in (1, 2, 3):
        disk.put(number)
        time.sleep(0.01)
    assert disk.get(1).ok
    disk.end()
    disk = make(3 * FILE_BYTES, threads=1)
    assert disk.get(3).ok
    disk.put(4)  # 2 was used longest ago
    assert [disk.tier.contains(key_of(number)) for number in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert disk.tier.counters.disk_evicted == 1
    assert all(disk.get(number).ok for number in (1, 3, 4))


def test_the_folder_stays_within_its_limit(make: Callable[..., Disk]) -> None:
    disk = make(5 * FILE_BYTES + 100)
    for number in range(12):
        assert disk.put(number, number % NUM_SLOTS).ok
        assert len(disk.files()) <= 5
    kept = [number for number in range(12) if disk.get(number).ok]
    assert kept == [7, 8, 9, 10, 11]
    disk.end()
    disk = make(2 * FILE_BYTES)  # a smaller limit at the next start
    assert len(disk.files()) == 2


def test_a_limit_below_one_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="100 bytes on disk do not hold a page of 12288"):
        Disk(tmp_path, 100)


@pytest.mark.parametrize("other", ["file", "link"])
def test_a_folder_that_cannot_be_trusted_is_refused(
    make: Callable[..., Disk], tmp_path: Path, other: str
) -> None:
    disk = make()
    disk.end()
    shutil.rmtree(disk.directory)
    if other == "file":
        disk.directory.write_text("")
    else:
        (tmp_path / "elsewhere").mkdir()
        disk.directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderError):
        make()
    with pytest.raises(FolderError, match="cannot hold pages"):
        Disk(Path("/proc/nowhere"))


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


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("restart", [False, True])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_a_damaged_file_is_a_miss_and_goes(
    tmp_path: Path, kind: str, restart: bool, seed: int
) -> None:
    folder = tmp_path / f"{kind}-{restart}-{seed}"
    disk = Disk(folder)
    disk.put(0)
    disk.put(1)
    damage(disk, kind, 1, seed)
    counters = disk.tier.counters
    if restart:
        disk.end()
        disk = Disk(folder)
        counters = disk.tier.counters
    assert not disk.get(1).ok
    assert not disk.tier.contains(key_of(1))
    disk.tier.poll()
    if kind not in ("directory", "link", "gone"):
        assert not disk.path(1).exists()
        assert counters.disk_damaged == 1
    assert disk.get(0).ok
    if kind != "directory":
        assert disk.put(1).ok  # it may come again
        assert disk.get(1).ok
    disk.end()
    shutil.rmtree(folder)


def test_failures_are_logged_once(
    make: Callable[..., Disk], caplog: pytest.LogCaptureFixture
) -> None:
    disk = make()
    for number in range(3):
        disk.put(number)
        os.truncate(disk.path(number), 7)
        assert not disk.get(number).ok
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "7 bytes instead of 12288" in caplog.text


def test_what_vanishes_underneath_is_a_miss_and_writing_goes_on(make: Callable[..., Disk]) -> None:
    disk = make()
    disk.put(1)
    shutil.rmtree(disk.directory.parent)
    assert not disk.get(1).ok
    assert disk.put(2).ok
    assert disk.get(2).ok


def test_what_an_interrupted_write_left_goes_and_other_people_s_files_stay(
    make: Callable[..., Disk],
) -> None:
    disk = make()
    disk.put(1)
    disk.end()
    (disk.directory / "123-4.tmp").write_bytes(b"half")
    (disk.directory / "notes.txt").write_text("mine")
    (disk.directory / "abc.kv").write_text("not a page")
    disk = make()
    assert {each.name for each in disk.files()} == {"notes.txt", "abc.kv", disk.path(1).name}


def test_two_processes_on_one_folder_have_pages_of_their_own(make: Callable[..., Disk]) -> None:
    first, second = make(), make()
    assert first.directory != second.directory
    first.put(1)
    assert not second.tier.contains(key_of(1))
    second.put(2)
    assert is_held(first.directory)
    assert is_held(second.directory)
    second.end()
    assert not is_held(second.directory)
    assert make().get(2).ok  # who comes next finds them


def test_what_nobody_owns_goes_first_and_what_somebody_owns_stays(
    make: Callable[..., Disk],
) -> None:
    old = make(fingerprint="an earlier model")
    for number in range(3):
        old.put(number)
    owned = make(fingerprint="another model, still running")
    owned.put(7)
    old.end()
    disk = make(4 * FILE_BYTES, threads=1)
    for number in range(3):
        disk.put(number)
    assert len(old.files()) == 1
    assert len(owned.files()) == 1
    assert len(disk.files()) == 3
    returned = make(fingerprint="an earlier model")
    disk.put(3)
    disk.put(4)
    assert len(returned.files()) == 1, "a file of a directory that was taken since was removed"


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


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_process_leaves_only_right_pages(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "kv"
    rng = random.Random(seed)
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, disk_writer.__file__, folder],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 40)):
            process.stdout.readline()
        time.sleep(rng.random() / 100)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    slab, woken = HostSlab(2, disk_writer.SLOT_BYTES), threading.Event()
    tier = DiskTier(folder, disk_writer.MAX_BYTES, slab, "writer", wake=woken.set)
    assert tier.wait_scanned(10)
    assert not list(folder.glob("*/*.tmp"))
    read = 0
    for number in range(200):
        if tier.contains(key_of(number)):
            tier.get(key_of(number), 0, number)
            while not (completions := tier.poll()):
                assert woken.wait(10)
                woken.clear()
            (completion,) = completions
            assert completion.ok, completion
            assert bytes(slab.slot(0)) == page_of(key_of(number))
            read += 1
    assert read
    assert tier.close()
    slab.close()


class DiskMachine(RuleBasedStateMachine):
    """Anything in any order: a page that is read is right, and the folder keeps its limit."""

    LIMIT = 4

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp()) / "kv"
        self.disk = self._open()

    def _open(self) -> Disk:
        return Disk(self.folder, self.LIMIT * FILE_BYTES + 5, threads=2)

    @rule(number=st.integers(0, 7), slot=st.integers(0, NUM_SLOTS - 1))
    def put(self, number: int, slot: int) -> None:
        before = self.disk.path(number)
        if not before.is_dir():
            assert self.disk.put(number, slot).ok
            assert self.disk.tier.contains(key_of(number))

    @rule(number=st.integers(0, 7), slot=st.integers(0, NUM_SLOTS - 1))
    def get(self, number: int, slot: int) -> None:
        known = self.disk.tier.contains(key_of(number))
        ok = self.disk.get(number, slot).ok
        assert known or not ok
        assert self.disk.tier.contains(key_of(number)) == ok

    @rule(number=st.integers(0, 7), seed=st.integers(0, 99), kind=st.sampled_from(DAMAGES[:4]))
    def hurt(self, number: int, seed: int, kind: str) -> None:
        if self.disk.path(number).exists():
            damage(self.disk, kind, number, seed)

    @rule(number=st.integers(0, 7))
    def remove(self, number: int) -> None:
        self.disk.path(number).unlink(missing_ok=True)

    @rule()
    def restart(self) -> None:
        self.disk.end()
        self.disk = self._open()

    @precondition(lambda self: self.disk.files())
    @rule()
    def remove_all(self) -> None:
        shutil.rmtree(self.folder)

    @invariant()
    def the_limit_holds(self) -> None:
        assert len(self.disk.files()) <= self.LIMIT

    def teardown(self) -> None:
        self.disk.end()
        shutil.rmtree(self.folder.parent)


DiskMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestDiskMachine = DiskMachine.TestCase
