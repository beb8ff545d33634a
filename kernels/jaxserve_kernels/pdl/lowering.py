"""Traces a function into a chain of kernels, and lowers the chain to one call of the handler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir

from jaxserve_kernels import fallback
from jaxserve_kernels.pdl import handler, parts, plan
from jaxserve_kernels.pdl.describe import describe
from jaxserve_kernels.pdl.launches import Launch, Mapped, Number, assembled, digests, pack
from jaxserve_kernels.target import Target
from jaxserve_kernels.tensor_map import TensorMap
from jaxserve_kernels.triton_call import Codes

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
    closed, results, report = _traced(function, *args, target=target.replace(pdl=True))
    try:
        calls = plan.make(closed.jaxpr).calls
    except plan.NotOnlyKernels:
        return None
    if target.checked and not _compile(call.equation for call in calls):
        return None
    report()
    return Traced(closed.jaxpr, [*closed.consts, *jax.tree.leaves(args)], results)


def join(function: Callable[..., Any], *args: Any, target: Target) -> Any:
    """Returns function(*args, target=target), and launches each chain of kernels in it as one
    call."""
    closed, shapes, report = _traced(function, *args, target=target.replace(joined=True))
    kernels = (each for each in closed.jaxpr.eqns if each.primitive.name == plan.KERNEL)
    if target.checked and not _compile(kernels):
        return function(*args, target=target)
    report()
    equations = parts.joined(closed.jaxpr, _pdl_p)
    joined = closed.replace(jaxpr=closed.jaxpr.replace(eqns=equations))
    # Otherwise XLA makes one operation of a chain and of what updates a part of an array by its
    # result, beside the chain, and copies what both update in place.
    results = jax.lax.optimization_barrier(core.jaxpr_as_fun(joined)(*jax.tree.leaves(args)))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _traced(
    function: Callable[..., Any], *args: Any, target: Target
) -> tuple[Any, Any, Callable[[], None]]:
    """A function's jaxpr and its results' shapes. The last result reports the choices of its
    operations: not before, because a function that is given up is traced again."""
    choices: list[Any] = []
    launched = functools.partial(
        function, target=target.replace(observe=target.observe and choices.append)
    )
    closed, results = jax.make_jaxpr(launched, return_shape=True)(*args)

    def report() -> None:
        for choice in choices:
            assert target.observe is not None
            target.observe(choice)

    return closed, results, report


def _compile(equations: Iterable[Any]) -> bool:
    """Whether all kernels of a call compile for the target's GPU. The results are cached."""
    alike = {_kind(equation): equation for equation in equations}
    try:
        for equation in alike.values():
            assembled(describe(equation).chained)
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
    codes = Codes.of(context)
    known = codes.before(operands)
    packed = pack(launches, planned.zeroed_bytes, known)
    # The handler reads the attribute whose name sorts first: `kernels`.
    results: Any = rule(context, *operands, kernels=packed, launches=count)
    codes.add(results[0].owner, known | digests(launches))
    return results[:-1]


def _launch(call: plan.KernelCall) -> Launch:
    described = describe(call.equation)
    buffers = iter(described.buffers)
    parameters: list[plan.Place | Number | Mapped] = []
    for number in described.numbers:
        if number is not None and not isinstance(number, TensorMap):
            parameters.append(number)
            continue
        is_operand, index = next(buffers)
        place = (call.operands if is_operand else call.results)[index]
        parameters.append(place if number is None else Mapped(place, number))
    own = described.cluster, described.early
    return Launch(described.chained, described.grid, tuple(parameters), *own)


# Not cacheable: of equal calls, only some hold the code.
mlir.register_lowering(_pdl_p, _lower, platform="cuda", cacheable=False)
