"""Finds the chains of kernels in a traced function that also computes outside of kernels.

A chain is as long as possible: an operation that needs none of its results is computed before it,
and a chain ends where one needs some. Chains of several kernels become one equation each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import DebugInfo, Literal, no_effects

from jaxserve_kernels.pdl.plan import (
    KERNEL,
    NEW_REFERENCE,
    REFERENCES,
    NotOnlyKernels,
    is_view,
    make,
)

_PARTS = (KERNEL, *REFERENCES)


def joined(jaxpr: Any, primitive: Any) -> list[Any]:
    """The equations of a function, with one in place of each chain of kernels: of `primitive`, with
    the chain as its parameter `jaxpr`."""
    return _Joining(jaxpr, primitive).equations()


class _Joining:
    def __init__(self, jaxpr: Any, primitive: Any) -> None:
        self._jaxpr, self._primitive = jaxpr, primitive
        self._readers = _readers(jaxpr)
        self._views: dict[Any, Any] = {}
        """Results of views of whole rows, and the views' equations."""
        self._chain: list[Any] = []
        self._made: set[Any] = set()
        """What the chain computes, and views of it."""
        self._references: dict[Any, Any] = {}
        """Those that no kernel has used, and the equations that make them."""
        self._after: list[Any] = []
        """Views of results of the chain, for operations after it."""
        self._found: list[Any] = []

    def equations(self) -> list[Any]:
        for equation in self._jaxpr.eqns:
            self._add(equation)
        self._end()
        return [*self._found, *self._references.values()]

    def _add(self, equation: Any) -> None:
        if is_view(equation):
            self._views[equation.outvars[0]] = equation
            if equation.invars[0] in self._made:
                self._made.add(equation.outvars[0])
                self._after.append(equation)
            else:
                self._found.append(equation)
        elif equation.primitive.name == NEW_REFERENCE:
            self._references[equation.outvars[0]] = equation
        else:
            self._add_operation(equation)

    def _add_operation(self, equation: Any) -> None:
        """Adds what is no view, and the references that it is the first to use."""
        begun = [self._references.pop(var, None) for var in _variables(equation)]
        equations = [*filter(None, begun), equation]
        if equation.primitive.name in _PARTS and not _has_literals(equation):
            self._chain += equations
            self._made |= {var for each in equations for var in each.outvars}
            return
        if any(var in self._made for each in equations for var in _variables(each)):
            self._end()
        self._found += equations

    def _end(self) -> None:
        """Ends the chain."""
        kernels = sum(each.primitive.name == KERNEL for each in self._chain)
        self._after = self._read_after()
        if kernels > 1 and (chain := self._closed()) is not None:
            self._found += [self._equation(chain), *self._after]
        else:
            self._found += self._in_order()
        self._chain, self._made, self._after = [], set(), []

    def _equation(self, chain: Any) -> Any:
        """Of a chain, described as its last equation is."""
        return self._chain[-1].replace(
            primitive=self._primitive,
            invars=chain.invars,
            outvars=chain.outvars,
            params={"jaxpr": chain},
            effects=no_effects,
        )

    def _read_after(self) -> list[Any]:
        """The views of results that other operations than the chain's read."""
        chain = {id(each) for each in (*self._chain, *self._after)}
        found: list[Any] = []
        for view in reversed(self._after):
            readers = self._readers.get(view.outvars[0], ())
            own = {id(each) for each in found}
            if any(id(each) not in chain or id(each) in own for each in readers):
                found.append(view)
        return found[::-1]

    def _in_order(self) -> list[Any]:
        """The chain's equations and the views of its results."""
        chain = _with_views(self._chain, self._views)
        own = {id(each) for each in chain if self._made & set(each.outvars)}
        own |= {id(each) for each in self._after}
        return [each for each in self._jaxpr.eqns if id(each) in own]

    def _closed(self) -> Any:
        """The chain as a jaxpr of its own; None if it is none for `plan`, or if a reference is not
        only used within it."""
        chain = _with_views(self._chain, self._views)
        inside = {id(each) for each in chain} - {id(each) for each in self._after}
        computed = {var for each in chain for var in each.outvars}
        needed = dict.fromkeys(var for each in chain for var in _variables(each))
        given = [var for var in needed if var not in computed]
        results = [
            var
            for each in self._chain
            for var in each.outvars
            if any(id(reader) not in inside for reader in self._readers.get(var, ()))
        ]
        if any(_is_reference(var) for var in (*given, *results)):
            return None
        closed = self._jaxpr.replace(
            constvars=[],
            invars=given,
            outvars=results,
            eqns=chain,
            effects=no_effects,
            debug_info=DebugInfo("jit", "chain of kernels", None, None),
        )
        try:
            make(closed)
        except NotOnlyKernels:
            return None
        return closed


def _with_views(chain: Sequence[Any], views: dict[Any, Any]) -> list[Any]:
    """A chain's equations, each after the views that it needs."""
    found: list[Any] = []
    there: set[Any] = set()

    def add(var: Any) -> None:
        view = views.get(var)
        if view is not None and var not in there:
            there.add(var)
            add(view.invars[0])
            found.append(view)

    for equation in chain:
        for var in _variables(equation):
            add(var)
        found.append(equation)
    return found


def _readers(jaxpr: Any) -> dict[Any, list[Any]]:
    """The equations that read each variable. The function itself reads its results."""
    found: dict[Any, list[Any]] = {}
    for equation in jaxpr.eqns:
        for var in _variables(equation):
            found.setdefault(var, []).append(equation)
    for var in jaxpr.outvars:
        if not isinstance(var, Literal):
            found.setdefault(var, []).append(jaxpr)
    return found


def _variables(equation: Any) -> Iterable[Any]:
    return [var for var in equation.invars if not isinstance(var, Literal)]


def _has_literals(equation: Any) -> bool:
    return any(isinstance(var, Literal) for var in equation.invars)


def _is_reference(var: Any) -> bool:
    return hasattr(var.aval, "inner_aval")
