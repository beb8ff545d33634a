"""Triton's and Gluon's kernels on a CPU, with numpy in place of their language.

A kernel's own Python functions are run: each partition of `warp_specialize` in a thread of its own,
with barriers as threads know them, and inline assembly instruction by instruction. What a GPU does
later is done as late, or as early, as it may be: copies when somebody waits for them or at once,
products of warpgroups when they are waited for. So a kernel that reads too early, or frees a place
too soon, gets other numbers, and one that waits for what never comes fails; so does an index that
leaves its array. Memory that nobody wrote holds NaN. What no barrier or fence orders fails even
where the numbers came out right (`order`).

Layouts mean nothing here: which thread holds what is the compiler's to check (tests/aot). Neither
are there swizzles, nor scopes of atomic operations.
"""

from __future__ import annotations

import collections
import importlib
import inspect
import itertools
import pkgutil
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton.language import constexpr
from triton.runtime.jit import ConstexprFunction, JITFunction

import jaxserve_kernels
from jaxserve_kernels.target import Target
from tests.emulator.cluster import Cluster
from tests.emulator.memory import Descriptor, Pointer
from tests.emulator.order import HERE, KERNELS, Order, Partition, Race, Touched
from tests.emulator.program import Program
from tests.emulator.values import count, scalar, unwritten

_LAST = {"starts late": False}
"""Whether the last kernel let dependents start only when it had waited."""


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are called outside of jit run here."""
    for module in pkgutil.walk_packages(jaxserve_kernels.__path__, "jaxserve_kernels."):
        importlib.import_module(module.name)
    for name, module in tuple(sys.modules.items()):
        for function in (triton_call, tensor_descriptor):
            own = getattr(module, function.__name__, None)
            if name.startswith("jaxserve_kernels.") and inspect.isfunction(own):
                monkeypatch.setattr(module, function.__name__, function)


def tensor_descriptor(
    array: jax.Array,
    block: Sequence[int],
    layout: Any,
    view: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Descriptor:
    """As `triton_call.tensor_descriptor`.

    Raises:
      ValueError: the tensor has elements outside of the array.
    """
    found = np.asarray(array)
    if view is not None:
        shape, strides = view
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if last >= found.size:
            raise ValueError(f"{tuple(shape)} by {tuple(strides)} of {found.size} elements")
        steps = [stride * found.itemsize for stride in strides]
        found = np.lib.stride_tricks.as_strided(found, shape, steps)
    return Descriptor(found, block)


def triton_call(
    *arguments: Any, kernel: Any, name: str, target: Target, out_type: Any, grid: tuple[int, ...],
    num_warps: int = 4, num_stages: int = 1, zeroed_outputs: Sequence[int] = (), seed: int = 0,
    together: bool = False, registers: int | None = None, **constants: Any,
) -> Any:  # fmt: skip
    """As `triton_call.triton_call`. Programs run one after the other, or at once where some wait
    for others: `together`, or in clusters. Where they count in memory who has ended, in an order of
    `seed`."""
    size = constants.get("CLUSTER", 1)
    together = together or size > 1
    clusters: dict[tuple[int, ...], Cluster] = collections.defaultdict(lambda: Cluster(size))
    early_start = "EARLY" in kernel.arg_names and target.pdl
    if "EARLY" in kernel.arg_names:
        constants["EARLY"] = early_start
    kinds = inspect.signature(kernel.fn).parameters
    constants = {
        key: value if "constexpr" in str(kinds[key].annotation) else _argument(value, key)
        for key, value in constants.items()
    }
    types = jax.tree.leaves(out_type)
    outputs = [unwritten(each.dtype, (int(np.prod(each.shape)),)) for each in types]
    for index in zeroed_outputs:
        outputs[index][...] = 0
    given = list(map(_argument, arguments, kernel.arg_names))
    places = list(itertools.product(*map(range, grid)))
    own = {"early": early_start, "after_waiting": _LAST["starts late"]}
    if zeroed_outputs and not together:
        np.random.default_rng(seed).shuffle(places)
    shared = Order(len(places), **own) if together or zeroed_outputs else None
    results = [
        Pointer(each, 0, "its results", Touched(each.size) if shared else None) for each in outputs
    ]
    failed, errors = threading.Event(), list[BaseException]()
    waited, starts_early = list[bool](), list[bool]()

    def run(at: tuple[int, ...]) -> None:
        if failed.is_set():
            return
        HERE.partition = Partition(shared or Order(**own), name)
        cluster = clusters[at[0] // size, *at[1:]]
        modules = _Modules(Program(at, grid, num_warps, seed, failed, cluster))
        try:
            functions = {
                key: modules.function(value) if isinstance(value, JITFunction) else value
                for key, value in constants.items()
            }
            modules.function(kernel)(*given, *results, **functions)
            waited.append(bool(HERE.partition.known[KERNELS]))
            HERE.partition.start_dependents()
            starts_early.append(HERE.partition.order.starts_early)
        except BaseException as error:
            errors.append(error)
            failed.set()

    with ThreadPoolExecutor(len(places) if together else 1) as pool:
        list(pool.map(run, places))
    if errors:
        raise errors[0]  # others may follow from it
    if early_start and not any(waited):
        raise Race(f"{name} may end before the kernels before it")
    _LAST["starts late"] = early_start and not any(starts_early)
    for each, held in zip(arguments, given, strict=True):
        if isinstance(each, jax.Ref):
            each[...] = jnp.asarray(held.array.reshape(each.shape))
    found = [
        jnp.asarray(each.reshape(kind.shape)) for each, kind in zip(outputs, types, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(out_type), found)


def _argument(value: Any, name: str) -> Any:
    if isinstance(value, jax.Ref):
        value = value[...]
    if isinstance(value, jax.Array):
        return Pointer(np.array(value).reshape(-1), 0, name)
    if isinstance(value, Descriptor):
        return Descriptor(value.array, value.block_shape, name)
    return scalar(value) if isinstance(value, int) else value


class _Modules:
    """Kernels' modules as a program sees them."""

    def __init__(self, program: Program) -> None:
        self._given = program.names()
        self._known: dict[str, dict[str, Any]] = {}

    def function(self, kernel: Any) -> Callable[..., Any]:
        function = kernel.fn
        names = self._names_of(sys.modules[function.__module__])
        return FunctionType(function.__code__, names, function.__name__, function.__defaults__)

    def _names_of(self, module: ModuleType) -> dict[str, Any]:
        if module.__name__ not in self._known:
            names = {"__builtins__": __builtins__, "range": count}
            self._known[module.__name__] = names
            for name, value in vars(module).items():
                if name in self._given:
                    names[name] = self._given[name]
                elif isinstance(value, constexpr):
                    names[name] = value.value
                elif isinstance(value, ConstexprFunction):
                    names[name] = value.fn
                elif isinstance(value, JITFunction):
                    names[name] = self.function(value)
        return self._known[module.__name__]
