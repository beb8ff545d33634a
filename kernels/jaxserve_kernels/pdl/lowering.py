"""Traces a function into a chain of kernels, and lowers the chain to one call of the handler."""

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
"""Bytes, more than 2 MiB. XLA's `vmm` allocator rotates among blocks of the same size, and gives
2 MiB blocks to all smaller buffers, such as each step's input. Scratch of that size would have
another address in each step, and XLA would have to update the graph of the whole chain."""

_pdl_p = core.Primitive("pdl_launches")
_pdl_p.multiple_results = True


class Traced(NamedTuple):
    """A traced function that only calls kernels, with its arguments."""

    jaxpr: Any
    operands: list[Any]
    results: Any
    """A tree of shapes."""

    def call(self) -> Any:
        """Launches the kernels as one call. Returns the function's results."""
        results = _pdl_p.bind(*self.operands, jaxpr=self.jaxpr)
        return jax.tree.unflatten(jax.tree.structure(self.results), results)


def trace(function: Callable[..., Any], *args: Any, target: Target) -> Traced | None:
    """Traces a function for PDL. None if it computes anything outside of kernels, or if one of its
    kernels does not compile."""
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
    for choice in choices:  # only now: a function without PDL is traced again, and reports then
        assert target.observe is not None
        target.observe(choice)
    return Traced(closed.jaxpr, [*closed.consts, *jax.tree.leaves(args)], results)


def _compile(calls: Sequence[plan.KernelCall]) -> bool:
    """Whether all kernels of a call compile for the target's GPU. The results are cached."""
    alike = {_kind(call.equation): call.equation for call in calls}
    try:
        for equation in alike.values():
            describe(equation)
    except Exception as error:  # whatever a compiler says
        fallback.note("kernel_chains", error)
        return False
    return True


def _kind(equation: Any) -> Any:
    """A key that calls of the same kernel in different layers share."""
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
    count = len(launches)  # for people who read the program's text
    packed = pack(launches, planned.zeroed_bytes)
    # The handler reads the attribute whose name sorts first: `kernels`.
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
    return Launch(described.code, described.grid, tuple(parameters), described.cluster)


mlir.register_lowering(_pdl_p, _lower, platform="cuda")
