"""What a process may still allocate, from the kernel's files of an imagined machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve import host_memory

GIB = 2**30
MEMINFO = "MemTotal: 99000 kB\nMemFree:    200 kB\nMemAvailable:   {} kB\n"


def machine(root: Path, free: int, cgroup: str = "0::/\n") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO.format(free // 1024))
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def second(folder: Path, limit: int | str, used: int, cached: int = 0) -> None:
    """Writes the files of a cgroup of version 2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached}\n")


def test_what_the_system_keeps_of_files_counts_as_free(tmp_path: Path) -> None:
    assert host_memory.available(machine(tmp_path, 21 * GIB)) == 21 * GIB


@pytest.mark.parametrize("text", ["MemTotal: 24000 kB\n", None], ids=["an old kernel", "no /proc"])
def test_without_the_kernel_s_estimate_free_pages_count(tmp_path: Path, text: str | None) -> None:
    machine(tmp_path, 21 * GIB)
    meminfo = tmp_path / "proc/meminfo"
    meminfo.unlink() if text is None else meminfo.write_text(text)
    assert host_memory.available(tmp_path) > 0


def test_a_container_s_limit_counts_with_the_files_that_it_would_give_up(tmp_path: Path) -> None:
    second(machine(tmp_path, 21 * GIB) / "sys/fs/cgroup", 8 * GIB, 5 * GIB, 2 * GIB)
    assert host_memory.available(tmp_path) == 5 * GIB


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    base = machine(tmp_path, 21 * GIB, "0::/pod/server\n") / "sys/fs/cgroup"
    second(base / "pod", 9 * GIB, 3 * GIB)
    second(base / "pod/server", "max", 2 * GIB)
    assert host_memory.available(tmp_path) == 6 * GIB
    second(base / "pod/server", 4 * GIB, 2 * GIB)
    assert host_memory.available(tmp_path) == 2 * GIB


def test_a_path_of_the_host_s_leads_to_what_the_container_sees(tmp_path: Path) -> None:
    base = machine(tmp_path, 21 * GIB, "0::/kubepods/pod7\n") / "sys/fs/cgroup"
    second(base, 8 * GIB, 5 * GIB)
    assert host_memory.available(tmp_path) == 3 * GIB


def test_cgroups_of_the_first_version_count(tmp_path: Path) -> None:
    lines = "4:cpu,memory:/docker/1\n0::/\n"
    folder = machine(tmp_path, 21 * GIB, lines) / "sys/fs/cgroup/memory/docker/1"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (folder / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {GIB}\n")
    assert host_memory.available(tmp_path) == 2 * GIB


def test_a_limit_that_is_exceeded_leaves_nothing(tmp_path: Path) -> None:
    second(machine(tmp_path, 21 * GIB) / "sys/fs/cgroup", 4 * GIB, 5 * GIB)
    assert host_memory.available(tmp_path) == 0


def test_this_machine_has_memory() -> None:
    assert host_memory.available() > 0
