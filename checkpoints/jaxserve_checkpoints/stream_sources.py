"""Sources of a tree's leaves for `staging.stream`: bytes of files, or parts assembled on the
host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxserve_checkpoints.load import (
    HOST_THREADS,
    MAX_BYTES_IN_FLIGHT,
    Plain,
    Stored,
    assemble,
    release,
)
from jaxserve_checkpoints.naming import LeafSource, leaf_nbytes, leaf_paths, resolve_rules
from jaxserve_checkpoints.reader import AnyArray, Checkpoint, Segment
from jaxserve_checkpoints.rules import AnyRule
from jaxserve_checkpoints.staging import LeafArrays, LeafBytes


def direct_sources(
    checkpoint: Stored, rules: Sequence[AnyRule], abstract: Any
) -> list[LeafBytes] | None:
    """Returns the locations of each leaf's bytes, if all leaves are stored as they are needed: no
    cast, no transform, concatenation along the first axis only. Otherwise None.

    Raises:
      CheckpointError: see `resolve_rules`.
    """
    if not isinstance(checkpoint, Checkpoint):
        return None
    segments: dict[str, list[Segment]] = {}
    for source in resolve_rules(rules, abstract, checkpoint):
        dtypes = {checkpoint.dtype(name) for name in source.tensors}
        changed = source.transforms or (source.axis and len(source.tensors) > 1)
        if dtypes != {np.dtype(source.leaf.dtype)} or changed:
            return None
        found = [checkpoint.segment(name) for name in source.tensors]
        segments.setdefault(source.part.owner, []).extend(found)
    return [LeafBytes(path, leaf, tuple(segments[path])) for path, leaf in leaf_paths(abstract)]


def assembled_sources(
    checkpoint: Plain,
    rules: Sequence[AnyRule],
    abstract: Any,
    *,
    max_bytes_ahead: int = MAX_BYTES_IN_FLIGHT // 2,
) -> list[LeafArrays]:
    """Returns the leaves for `staging.stream`. They are assembled and cast on the host while others
    are copied. The result equals that of `load_params` without encoding, but needs only the
    programs of the stream.

    Consume them in order. Parts that are assembled ahead take at most `max_bytes_ahead`, or are a
    single part.

    Raises:
      CheckpointError: see `resolve_rules`.
    """
    by_owner: dict[str, list[LeafSource]] = {}
    for source in resolve_rules(rules, abstract, checkpoint):
        by_owner.setdefault(source.part.owner, []).append(source)
    leaves = dict(leaf_paths(abstract))
    ordered = [source for sources in by_owner.values() for source in sources]
    arrays = _assembled(checkpoint, ordered, max_bytes_ahead)
    return [LeafArrays(path, leaves[path], arrays) for path in by_owner]


def _assembled(checkpoint: Plain, sources: Sequence[LeafSource], limit: int) -> Iterator[AnyArray]:
    """Yields each source's leaf, and assembles the next ones meanwhile."""
    waiting: deque[tuple[LeafSource, Future[Any]]] = deque()
    ahead = 0
    with ThreadPoolExecutor(HOST_THREADS, thread_name_prefix="load-params") as pool:
        for following in (*sources, None):
            size = 0 if following is None else leaf_nbytes(following.leaf)
            while waiting and (following is None or ahead + size > limit):
                source, array = waiting.popleft()
                ahead -= leaf_nbytes(source.leaf)
                try:
                    yield array.result()
                finally:  # also for the last one, after which nobody calls next()
                    release(checkpoint, [source])
            if following is not None:
                waiting.append((following, pool.submit(assemble, checkpoint, following)))
                ahead += size
