"""Turns a traced function that only calls kernels into a list of launches.

Between the calls there may be views: slices of whole rows, reshapes and references. Every array
that a kernel writes gets a place: a result of the function, or a part of a scratch buffer. The
array holds its part from the kernel that writes it until the last one that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

KERNEL = "triton_kernel_call"
"""Name of the operation that calls a kernel."""
_ALIGNMENT = 256


class NotOnlyKernels(Exception):
    """The function computes something outside of kernels; the message says what."""


class Place(NamedTuple):
    """Bytes from `offset` on in buffer number `buffer`. Buffers are the operands of the call, then
    its results. The last result is the scratch buffer."""

    buffer: int
    offset: int


class KernelCall(NamedTuple):
    """A kernel's equation, and the places of its operands and results."""

    equation: Any
    operands: tuple[Place, ...]
    results: tuple[Place, ...]


class Plan(NamedTuple):
    """The launches and buffers of a function."""

    calls: tuple[KernelCall, ...]
    aliases: dict[int, int]
    """Operands that kernels update in place, mapped to the results that they become."""
    scratch_bytes: int
    zeroed_bytes: int
    """How many bytes at the beginning of the scratch buffer must be zero before the first kernel
    starts."""


class _View(NamedTuple):
    """An array inside a root array, which is an argument or a kernel's result."""

    root: Any
    offset: int


def make(jaxpr: Any) -> Plan:
    """The launches and buffers of a function.

    Raises:
      NotOnlyKernels: the function computes something outside of kernels.
    """
    views: dict[Any, _View] = {var: _View(var, 0) for var in (*jaxpr.constvars, *jaxpr.invars)}
    equations: list[Any] = []
    last_use: dict[Any, int] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == KERNEL:
            for var in equation.invars:
                last_use[views[var].root] = len(equations)
            for var in equation.outvars:
                views[var] = _View(var, 0)
                last_use[var] = len(equations)
            equations.append(equation)
        else:
            views[equation.outvars[0]] = _view(equation, views)
    given = [*jaxpr.constvars, *jaxpr.invars]
    places = {var: Place(index, 0) for index, var in enumerate(given)}
    aliases: dict[int, int] = {}
    for index, var in enumerate(jaxpr.outvars):
        root, offset = views[var]
        if offset or _bytes(root.aval) != _bytes(var.aval):
            raise NotOnlyKernels("a result is a part of another array")
        if root in places:
            operand = places[root].buffer
            if operand >= len(given) or operand in aliases:
                raise NotOnlyKernels("an array is two results")
            aliases[operand] = index
        else:
            places[root] = Place(len(given) + index, 0)
    buffer = len(given) + len(jaxpr.outvars)
    zeroed_bytes = 0
    for equation in equations:
        for index in equation.params["zeroed_outputs"]:
            var = equation.outvars[index]
            if var in places:
                raise NotOnlyKernels("a result of the function must be zero before its kernel")
            places[var] = Place(buffer, zeroed_bytes)
            zeroed_bytes += _aligned(_bytes(var.aval))
    scratch = _Scratch(zeroed_bytes)
    calls: list[KernelCall] = []
    for index, equation in enumerate(equations):
        for var in equation.outvars:
            if var not in places:
                places[var] = Place(buffer, scratch.take(_bytes(var.aval), index, last_use[var]))
        calls.append(
            KernelCall(
                equation,
                tuple(_at(places, views[var]) for var in equation.invars),
                tuple(places[var] for var in equation.outvars),
            )
        )
    return Plan(tuple(calls), aliases, max(scratch.size, _ALIGNMENT), zeroed_bytes)


def _at(places: dict[Any, Place], view: _View) -> Place:
    buffer, offset = places[view.root]
    return Place(buffer, offset + view.offset)


def _view(equation: Any, views: dict[Any, _View]) -> _View:
    name, source = equation.primitive.name, equation.invars[0]
    if name in REFERENCES:
        return views[source]
    if not is_view(equation):
        raise NotOnlyKernels(f"{name} between kernels")
    root, offset = views[source]
    if name == "slice":
        offset += equation.params["start_indices"][0] * (
            _bytes(source.aval) // source.aval.shape[0]
        )
    return _View(root, offset)


NEW_REFERENCE = "new_ref"
REFERENCES = (NEW_REFERENCE, "freeze")
"""Names of operations that begin and end to update an array in place."""


def is_view(equation: Any) -> bool:
    """Whether the result is the operand in another shape, or whole rows of it."""
    params = equation.params
    if equation.primitive.name != "slice":
        return equation.primitive.name in ("reshape", "squeeze")
    shape = equation.invars[0].aval.shape
    whole = not any(params["start_indices"][1:]) and params["limit_indices"][1:] == shape[1:]
    return whole and params["strides"] is None


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes(aval: Any) -> int:
    aval = getattr(aval, "inner_aval", aval)
    return math.prod(aval.shape) * aval.dtype.itemsize


class _Scratch:
    """Allocates places for a limited time, from offset `begin` on."""

    def __init__(self, begin: int) -> None:
        self._begin = self.size = begin
        self._taken: list[tuple[int, int, int]] = []  # begin, end, last use

    def take(self, size: int, now: int, last_use: int) -> int:
        size = _aligned(size)
        self._taken = [place for place in self._taken if place[2] >= now]
        begin = next(start for start in self._starts() if self._free(start, start + size))
        self._taken.append((begin, begin + size, last_use))
        self.size = max(self.size, begin + size)
        return begin

    def _starts(self) -> Iterator[int]:
        yield self._begin
        yield from sorted(end for _, end, _ in self._taken)

    def _free(self, begin: int, end: int) -> bool:
        return all(end <= taken or begin >= until for taken, until, _ in self._taken)
