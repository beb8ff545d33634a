"""The host memory that this process may still allocate."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path


def available(root: Path = Path("/")) -> int:
    """Returns the bytes that this process may still allocate. That is the machine's available
    memory, reclaimable file cache included, or less if a cgroup limits this process.

    Args:
      root: the folder that contains `proc` and `sys`.
    """
    return max(0, min([_of_machine(root / "proc/meminfo"), *_of_cgroups(root)]))


def _of_machine(meminfo: Path) -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable: *(\d+) kB$", meminfo.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yields the bytes left under each limit from this process's cgroup up to the root. Handles
    cgroup versions 1 and 2.

    In a container, /proc often has the path of the host, and only the mounted root applies. So
    folders that do not exist are skipped.
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
    """Returns the bytes left under the limit of one cgroup; None if it has no limit."""
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
