"""How much memory of this machine a process may still allocate."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path


def available(root: Path = Path("/")) -> int:
    """Returns the bytes that this process may still allocate: what the machine has free, with the
    file cache that it would give up, or less if a cgroup of this process has a limit.

    Args:
      root: folder in which `proc` and `sys` lie.
    """
    return max(0, min([_of_machine(root / "proc/meminfo"), *_of_cgroups(root)]))


def _of_machine(meminfo: Path) -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable: *(\d+) kB$", meminfo.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yields what each limit on the way up from this process's cgroup leaves; of versions 1 and 2.

    Inside a container the path in /proc is often that of the host, and only the root of what is
    mounted applies. So folders that do not exist are passed over.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = base / path.lstrip("/")
        for folder in [inner, *inner.parents]:
            left = _left(folder, *names)
            if left is not None:
                yield left
            if folder == base:
                break


def _left(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Returns what the limit of one cgroup leaves; None without a limit."""
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    if not most.isdigit():  # "max"
        return None
    cached = re.search(rf"^{reclaimable} (\d+)$", stat, re.MULTILINE)
    return int(most) - used + (int(cached[1]) if cached else 0)
