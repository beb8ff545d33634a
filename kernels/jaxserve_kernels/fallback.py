"""Finds out whether kernels compile for the GPU, so that another implementation can replace them.

Otherwise a kernel that a Triton version or a GPU refuses would make the start or a request fail.
So an operation compiles its kernels while it is traced. The program reuses the compiled kernels.
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
    """Why kernels do not compile for a target; None if they do. Logs an operation's first failure.

    With programmatic dependent launch this returns None: `pdl` checks all kernels of a call.

    Args:
      operation: its name, for the log and the metric.
      kernels: calls the operation's kernels with args, which are trees of arrays.
      static: hashable values that also select the kernels.
    """
    if target.pdl or target.joined or not target.checked:
        return None
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    leaves, tree = jax.tree.flatten(shapes)
    sizes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
    key = (operation, static, target, tree, sizes)
    if key not in _known:
        try:
            # A new function for each call: jax caches traces by function.
            traced = jax.jit(lambda *shapes: kernels(*shapes)).trace(*shapes)
            traced.lower(lowering_platforms=("cuda",))
        except Exception as error:  # a compiler may raise anything
            _known[key] = note(operation, error)
        else:
            _known[key] = None
    return _known[key]


def note(operation: str, error: Exception) -> str:
    """Records that an operation runs without one of its kernels. Returns the reason, and logs it
    once for each operation."""
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
    """Operations that run without one of their kernels, and why."""
    with _lock:
        return dict(_fallen)
