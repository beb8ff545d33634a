"""Compiles a kernel call and extracts its launch parameters, through jax-triton's own lowering."""

from __future__ import annotations

import functools
import re
import types
from typing import Any, NamedTuple

import jax

from jaxserve_kernels import ptxas
from jaxserve_kernels.pdl.launches import Number
from jaxserve_kernels.tensor_map import TensorMap
from jaxserve_kernels.triton_call import Described, describing, jax_triton

_OUTPUT: Any = jax_triton._OutputPlaceholder
_NUMBER: Any = jax_triton._StaticArg


class Description(NamedTuple):
    """How a kernel is launched."""

    code: ptxas.Code
    grid: tuple[int, int, int]
    numbers: list[Number | TensorMap | None]
    """The kernel's parameters in order. None stands for the next of `buffers`, a map for its
    map."""
    cluster: int
    """The kernel's constant CLUSTER, or 1."""
    early: bool
    """The kernel's constant EARLY: it waits for the kernel before where it needs its results."""
    buffers: list[tuple[bool, int]]
    """For each buffer: whether it is an operand of the call, and the operand's or result's
    index."""

    @property
    def chained(self) -> ptxas.Code:
        """The kernel as a chain launches it."""
        return self.code if self.early else self.code._replace(ptx=_waiting(self.code.ptx))


class _Operand(NamedTuple):
    number: int


def describe(equation: Any) -> Description:
    """Compiles the kernel of a traced call, and returns how to launch it."""
    params = equation.params
    avals = [getattr(var.aval, "inner_aval", var.aval) for var in equation.invars]
    context = types.SimpleNamespace(
        avals_in=avals,
        avals_out=[var.aval for var in equation.outvars],
        module_context=types.SimpleNamespace(platforms=("cuda",)),
    )
    token = describing.set(True)
    try:
        jax_triton.triton_kernel_call_lowering(jax_triton.make_cuda_target, context, **params)
    except Described as found:
        code, grid, numbers = found.args
    else:
        raise AssertionError("jax-triton has lowered a call without a record")
    finally:
        describing.reset(token)
    marks = params["in_tree"].unflatten([_Operand(index) for index in range(len(avals))])
    kinds = (_Operand, _OUTPUT, _NUMBER)
    leaves = jax.tree.leaves(marks, is_leaf=lambda leaf: isinstance(leaf, kinds))
    buffers = [
        (True, leaf.number) if isinstance(leaf, _Operand) else (False, leaf.ordinal)
        for leaf in leaves
        if not isinstance(leaf, _NUMBER)
    ]
    constants = dict(params["metaparams"])
    cluster, early = constants.get("CLUSTER", 1), bool(constants.get("EARLY"))
    return Description(code, grid, numbers, cluster, early, buffers)


@functools.lru_cache(maxsize=64)
def _waiting(ptx: str) -> str:
    """A kernel that knows nothing of its early start: its first instruction waits for the kernel
    before, and the next one starts when its programs have ended. If that one started at once, its
    programs would wait on the multiprocessors: steps of many tokens took longer."""
    body = re.compile(r"(\.entry [^{]*\{\n)")
    text, count = body.subn(r"\1\tgriddepcontrol.wait;\n", ptx, count=1)
    assert count, "PTX without an entry"
    return text
