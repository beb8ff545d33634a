"""What happens where a kernel does not compile for the GPU: another implementation takes its place.

A kernel that a Triton version or a GPU refuses would end the start otherwise, or a request. So an
operation asks, where it is traced, whether its kernels compile. They are kept, and not compiled
again when the program is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxserve_kernels.target import Target

log = logging.getLogger(__name__)

_lock = threading.Lock()
_known: dict[Any, str | None] = {}
_fallen: dict[str, str] = {}


def why_not(
    operation: str, kernels: Callable[..., Any], *args: Any, static: Any = (), target: Target
) -> str | None:
    """Why kernels do not compile for a target; None: they do. The first time it is logged.

    With programmatic dependent launch it is left to `pdl`, which gives up all of a call.

    Args:
      operation: its name, for the log and the metric.
      kernels: calls the operation's kernels for args, which are trees of arrays.
      static: what else decides which kernels those are.
    """
    if target.pdl or not target.checked:
        return None
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    leaves, tree = jax.tree.flatten(shapes)
    sizes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    key = (operation, static, target, tree, sizes)
    if key not in _known:
        try:
            # A function of its own: jax keeps what it has traced.
            traced = jax.jit(lambda *shapes: kernels(*shapes)).trace(*shapes)
            traced.lower(lowering_platforms=("cuda",))
        except Exception as error:  # whatever a compiler says
            _known[key] = note(operation, error)
        else:
            _known[key] = None
    return _known[key]


def note(operation: str, error: Exception) -> str:
    """An operation goes on without a kernel. Returns why, which is logged once for each
    operation."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split('-' * 20)[0].split())[:400]}"
    with _lock:
        if operation in _fallen:
            return reason
        _fallen[operation] = reason
    log.warning(
        "%s: a kernel does not compile for this GPU, plain XLA or another kernel takes its place, "
        "which is slower: %s",
        operation,
        reason,
    )
    return reason


def fallen_back() -> dict[str, str]:
    """Operations that go on without one of their kernels, and why."""
    with _lock:
        return dict(_fallen)
