"""Pages in files: the right page or a miss, whatever happens to files, disk and process."""

from __future__ import annotations

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

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxserve.offload.disk import DiskTier
from jaxserve.offload.page_folder import FolderError, is_held
from jaxserve.offload.slab import HostSlab
from tests.offload import disk_writer
from tests.offload.disk_setup import (
    DAMAGES,
    FILE_BYTES,
    NUM_SLOTS,
    SLOT_BYTES,
    Disk,
    damage,
    disks_in,
)
from tests.offload.disk_writer import key_of, page_of


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    with disks_in(tmp_path / "kv") as build:
        yield build


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
