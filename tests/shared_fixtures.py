"""Test files that share a fixture of the session run in one worker, which makes it once."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling  # pyright: ignore[reportMissingTypeStubs]

SHARING = {
    "tests/e2e, server": (
        "captured_traffic",
        "kv_events",
        "official_clients",
        "signals",
        "speculation",
    ),
    "tests/runner, compiled": ("equivalence", "kv_formats", "runner", "scores"),
    "tests/runner, verifying": ("verify", "verify_distribution", "verify_equivalence"),
}
"""The folder and a fixture of its conftest -> the files with tests of it."""
GROUPS = {
    f"{group.partition(',')[0]}/test_{name}.py": group
    for group, names in SHARING.items()
    for name in names
}


class FilesThatShare(LoadFileScheduling):
    """Like `--dist loadfile`, with the files of a group as one."""

    def _split_scope(self, nodeid: str) -> Any:
        file = super()._split_scope(nodeid)
        return GROUPS.get(file, file)
