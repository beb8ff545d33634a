"""The limit of open files. Connections count as open files."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

MOST = 65_536
"""The limit to ask for. With a hard limit of a billion, some child programs would close a billion
files one by one."""

_OTHERS = 256
"""Open files besides connections: libraries, the driver, files that the start reads at once."""


def raise_limit(connections: int) -> int:
    """Raises the soft limit of open files, at most to the hard limit and MOST. Logs and returns it.

    The default of systemd and many shells is 1,024, which is less than the connections of a full
    queue.

    Args:
      connections: the most connections that the settings allow.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    unlimited = soft == resource.RLIM_INFINITY
    said = "no limit" if unlimited else f"at most {soft:,}"
    if unlimited or soft >= connections + _OTHERS:
        log.info("open files: %s", said)
    else:
        log.warning(
            "open files: %s, but up to %s requests may wait and run at once: raise the hard limit "
            "(LimitNOFILE of systemd, ulimit -Hn, --ulimit nofile of docker)",
            *(said, f"{connections:,}"),
        )
    return soft
