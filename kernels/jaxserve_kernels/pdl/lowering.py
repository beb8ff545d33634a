"""One call for many kernels, in a program that is traced and lowered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir

from jaxserve_kernels import fallback
from jaxserve_kernels.pdl import handler, plan
from jaxserve_kernels.pdl.describe import describe
from jaxserve_kernels.pdl.launches import Launch, Number, pack
from jaxserve_kernels.target import Target

_LEAST_SCRATCH = (2 << 20) + 1
"""Bytes. XLA's `vmm` allocator hands out blocks of a size in turn, and one of 2 MiB for anything
smaller, each step's input among them. Scratch of that size would lie elsewhere in each step, and
the graph of the whole chain be changed for it."""

_pdl_p = core.Primitive("pdl_launches")
_pdl_p.multiple_results = True


class Traced(NamedTuple):
    """A function that calls kernels and does nothing else, with its arguments."""

    jaxpr: Any
    operands: list[Any]
    results: Any
    """A tree of shapes."""

    def call(self) -> Any:
        """Launches the kernels as one call: returns the function's results."""
        results = _pdl_p.bind(*self.operands, jaxpr=self.jaxpr)
        return jax.tree.unflatten(jax.tree.structure(self.results), results)


def trace(function: Callable[..., Any], *args: Any, target: Target) -> Traced | None:
    """None: the function computes something outside of kernels."""
    choices: list[Any] = []
    launched = functools.partial(
        function, target=target.replace(pdl=True, observe=target.observe and choices.append)
    )
    closed, results = jax.make_jaxpr(launched, return_shape=True)(*args)
    try:
        calls = plan.make(closed.jaxpr).calls
    except plan.NotOnlyKernels:
        return None
    if target.checked and not _compile(calls):
        return None
    for choice in choices:  # not those of a function that gets no PDL, which is traced again
        assert target.observe is not None
        target.observe(choice)
    return Traced(closed.jaxpr, [*closed.consts, *jax.tree.leaves(args)], results)


def _compile(calls: Sequence[plan.KernelCall]) -> bool:
    """Whether all kernels of a call compile for the GPU that is traced for. They are kept."""
    alike = {_kind(call.equation): call.equation for call in calls}
    try:
        for equation in alike.values():
            describe(equation)
    except Exception as error:  # whatever a compiler says
        fallback.note("kernel_chains", error)
        return False
    return True


def _kind(equation: Any) -> Any:
    """What a layer's call of a kernel has in common with those of other layers."""
    params = equation.params
    types = tuple(str(var.aval) for var in (*equation.invars, *equation.outvars))
    return params["fn"], params["metaparams"], params["backend_options"], types


@_pdl_p.def_abstract_eval
def _(*_: Any, jaxpr: Any) -> list[Any]:
    return [var.aval for var in jaxpr.outvars]


def _lower(context: Any, *operands: Any, jaxpr: Any) -> Any:
    planned = plan.make(jaxpr)
    launches = [_launch(each) for each in planned.calls]
    handler.register()
    rule = jax.ffi.ffi_lowering(handler.TARGET, operand_output_aliases=planned.aliases)
    scratch = ShapedArray((max(planned.scratch_bytes, _LEAST_SCRATCH),), jnp.uint8)
    context = context.replace(avals_out=[*context.avals_out, scratch])
    count = len(launches)  # for people who look at the program
    packed = pack(launches, planned.zeroed_bytes)
    # The handler reads the attribute whose name is first.
    return rule(context, *operands, kernels=packed, launches=count)[:-1]


def _launch(call: plan.KernelCall) -> Launch:
    described = describe(call.equation)
    buffers = iter(described.buffers)
    parameters: list[plan.Place | Number] = []
    for number in described.numbers:
        if number is not None:
            parameters.append(number)
            continue
        is_operand, index = next(buffers)
        parameters.append((call.operands if is_operand else call.results)[index])
    return Launch(described.code, described.grid, tuple(parameters))


mlir.register_lowering(_pdl_p, _lower, platform="cuda")
