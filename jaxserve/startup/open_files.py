"""How many files, connections among them, the process may have open."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

MOST = 65_536
"""What is asked for. Where the hard limit is a billion, programs that are started would close that
many files one by one."""

_OTHERS = 256
"""Files that are no connections: libraries, the driver's, those that a start reads at once."""


def raise_limit(connections: int) -> int:
    """Raise the soft limit of open files as far as the hard one allows, up to MOST, and say in one
    line what it is; returns it.

    The default of systemd and of many shells is 1,024, fewer than a full queue has connections.

    Args:
      connections: that the settings let wait and run at once.
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
