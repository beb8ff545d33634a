"""Calls of Triton and Gluon kernels, through jax-triton and every Triton version we support.

This module replaces the records that jax-triton makes of calls: a program holds each kernel's
machine code once, instead of PTX in every call.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import triton
from jax.extend.mlir import ir
from jax.interpreters import mlir
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from jaxserve_kernels import ptxas, records, residency, triton_compat
from jaxserve_kernels.device import Device
from jaxserve_kernels.target import Target
from jaxserve_kernels.tensor_map import TensorMap
from jaxserve_kernels.triton_compat import jt, triton_lib

# jax-triton 0.4 recommends a Ref to an array of zeros instead. That costs a kernel in place of a
# memset, and with 0.4.1 on an H200 the called kernel failed with an illegal address.
warnings.filterwarnings("ignore", "zeroed_outputs is deprecated", DeprecationWarning)

jax_triton: Any = triton_lib
_library: Any = triton_lib.triton_kernel_call_lib
_TritonKernel: Any = _library.TritonKernel
_TritonKernelCall: Any = _library.TritonKernelCall


_BARRIER = "stablehlo.optimization_barrier"
_DEVICE = "device"
"""Key of the target's `Device` in a call's compiler options. It is removed before compilation."""
_TOGETHER = "together"
"""Key, likewise: whether programs of the grid wait for each other."""


class Codes:
    """Tracks, in a program being lowered, which machine codes the calls before a value hold."""

    def __init__(self) -> None:
        self._of: dict[Any, frozenset[str]] = {}

    @staticmethod
    def of(context: Any) -> Codes:
        """Those of the program that a lowering rule's context belongs to."""
        return context.module_context.cached_primitive_lowerings.setdefault(Codes, Codes())

    def before(self, values: Iterable[Any]) -> frozenset[str]:
        """Names of the codes in all calls whose results the values depend on."""
        owners = [_maker(value) for value in values]
        todo = list(owners)
        while todo:
            known = {each: self._of.get(each) for each in _operations_before(todo[-1])}
            unknown = [each for each, codes in known.items() if codes is None]
            if unknown:
                todo += unknown
            else:
                self._of.setdefault(todo.pop(), frozenset().union(*filter(None, known.values())))
        return frozenset().union(*(self._of[owner] for owner in owners))

    def add(self, operation: Any, codes: frozenset[str]) -> None:
        self._of[operation] = codes


def _operations_before(operation: Any) -> list[Any]:
    """The operations that make its operands; none for arguments of functions and loops."""
    operands = () if isinstance(operation, ir.Block) else operation.operands
    return [_maker(value) for value in operands]


def _maker(value: Any) -> Any:
    """The operation that makes a value, or the block whose argument it is. Barriers are skipped:
    XLA removes them, and with them the order of the values that they join."""
    while not isinstance(value.owner, ir.Block) and value.owner.name == _BARRIER:
        value = value.owner.operands[ir.OpResult(value).result_number]
    return value.owner


class _Call:
    """A call being lowered."""

    def __init__(self, codes: frozenset[str]):
        self.codes = codes
        """Names of the machine codes that this call and the calls before it hold."""


_call: ContextVar[_Call] = ContextVar("call")


class _Held(NamedTuple):
    """What a program holds of a kernel's machine code."""

    code: str
    """The machine code's name, a digest."""
    named: Any
    """A record with that name in place of PTX."""
    with_code: bytes
    """The machine code, as bytes to append to a serialised record."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """A compiled kernel, and the records that its calls may hold."""

    compiled: ptxas.Code
    source: Any
    """A record with PTX."""
    rest: tuple[Any, ...]
    """What follows the compute capability in a record."""
    together_on: Device | None = None
    """The card on which all programs of a grid must run at once; None if they need not."""

    @functools.cached_property
    def held(self) -> _Held | None:
        """None if no assembler is installed. A chain of kernels never asks for it."""
        name, warps, shared_bytes, ptx, capability = self.compiled
        cubin = None if records.hold_source() else ptxas.assemble(ptx, capability)
        if cubin is None:
            return None
        image = _field(1, cubin) + _field(2, name.encode()) + _number(3, shared_bytes)
        code = hashlib.sha256(image).hexdigest()
        named = _TritonKernel(name, warps, 1, shared_bytes, code, "", capability, *self.rest)
        return _Held(code, named, _field(1, _field(1, _field(11, image))))


def _kernel(*args: Any) -> _Kernel:
    """A kernel's records, without its TTIR. Takes the arguments of jaxlib's TritonKernel.

    Each of a step's 300 calls has a copy of its record, once in the program's text and twice in the
    call. They stay in memory as long as the program. jaxlib accepts machine code in a record, and
    caches it by the record's PTX, for which a digest serves as well. So one call holds the code,
    and the calls that depend on its result only name it. XLA creates a call after those that it
    depends on, in whatever order it creates a program's calls, so the code is known by then.
    """
    name, num_warps, num_ctas, shared_memory, ptx, _ttir, capability, *rest = args
    assert num_ctas == 1, "clusters are launched by chains"
    source = _TritonKernel(name, num_warps, num_ctas, shared_memory, ptx, "", capability, *rest)
    compiled = ptxas.Code(name, num_warps, shared_memory, ptx, capability)
    return _Kernel(compiled=compiled, source=source, rest=tuple(rest))


class _Parameter(NamedTuple):
    """A parameter of a kernel."""

    record: Any
    """jaxlib's object for it."""
    number: tuple[str, int | float] | TensorMap | None
    """A format character of `struct`, and a value; a map of the next buffer; None for a buffer."""


_FORMATS = {"i1": "B", "i8": "b", "i16": "h", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
            "fp32": "f", "fp64": "d"}  # fmt: skip


class Described(Exception):
    """Raised inside jax-triton's lowering of a call while `describing` is set. Carries the compiled
    kernel, its grid and its numbers (see `_Parameter`)."""


describing: ContextVar[bool] = ContextVar("describing", default=False)


class _KernelCall:
    """Replaces jaxlib's TritonKernelCall."""

    def __init__(self, kernel: _Kernel, x: int, y: int, z: int, parameters: list[_Parameter]):
        if kernel.together_on is not None:
            residency.check(kernel.compiled, (x, y, z), kernel.together_on)
        self._kernel, self._args = kernel, (x, y, z, [each.record for each in parameters])
        self._numbers = [each.number for each in parameters]

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        """Serialises a TritonAnyKernelCall of jaxlib/gpu/triton.proto. A protobuf parser merges a
        field that occurs twice, so fields can be appended to a message."""
        if describing.get():
            raise Described(self._kernel.compiled, self._args[:3], self._numbers)
        held, call = self._kernel.held, _call.get()
        if held is None or records.hold_source():
            return _TritonKernelCall(self._kernel.source, *self._args).to_proto(name, metadata)
        record = _TritonKernelCall(held.named, *self._args).to_proto(name, metadata)
        if held.code in call.codes:
            return record
        call.codes |= {held.code}
        return record + held.with_code


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes((*groups, value))


def _lower(context: Any, *args: Any, **kwargs: Any) -> Any:
    """jax-triton's lowering of a call, given the machine codes that earlier calls hold."""
    codes = Codes.of(context)
    call = _Call(codes.before(args))
    token = _call.set(call)
    try:
        results = triton_lib.triton_kernel_call_lowering(
            triton_lib.make_cuda_target, context, *args, **kwargs
        )
    finally:
        _call.reset(token)
    codes.add(results[0].owner, call.codes)
    return results


def _compile_kernel(
    function: Any, specialization: Any, target: Any, backend: Any, options: Mapping[str, Any]
) -> tuple[Any, str, Any, Any]:
    """Replaces jax-triton's method. Also checks that the card can start the kernel, which needs no
    card."""
    own = (_DEVICE, _TOGETHER)
    given = {name: value for name, value in options.items() if name not in own}
    compiles = _compile_gluon if isinstance(function.fn, GluonJITFunction) else _compile_triton
    kernel, *others = compiles(function, specialization, target, backend, given)
    _check_fits(kernel.compiled, options[_DEVICE])
    if options[_TOGETHER]:
        kernel = dataclasses.replace(kernel, together_on=options[_DEVICE])
    return kernel, *others


def _check_fits(code: ptxas.Code, device: Device) -> None:
    most = device.shared_memory_per_block
    if code.shared_bytes > most:
        raise ValueError(
            f"the kernel {code.name} asks for {code.shared_bytes:,} bytes of shared memory, and a "
            f"GPU of compute capability {code.compute_capability / 10} has {most:,}: use smaller "
            "blocks or fewer stages"
        )


def _compile_gluon(
    function: Any, specialization: Any, target: Any, backend: Any, options: Mapping[str, Any]
) -> tuple[Any, str, Any, Any]:
    """Compiles a Gluon kernel with Triton's own compiler. jax-triton 0.4 would run passes for
    Triton kernels on it, and launch it without the warps that warp specialisation adds."""
    known = triton_compat.option_names()
    compiled = triton.compile(
        GluonASTSource(
            function.fn, specialization.signature, specialization.constants, specialization.attrs
        ),
        target=target,
        options={name: value for name, value in options.items() if name in known},
    )
    found: Any = compiled.metadata
    kernel = _library.TritonKernel(
        found.name, found.num_warps, found.num_ctas, found.shared, compiled.asm["ptx"], "",
        target.arch,
    )  # fmt: skip
    result = triton_lib.CompilationResult(
        binary=compiled.asm["ptx"],
        name=found.name,
        shared_mem_bytes=found.shared,
        ttgir="",
        llir="",
        tensordesc_meta=found.tensordesc_meta,
    )
    return kernel, "", None, result


def _take_over() -> None:
    """Replaces jax-triton's functions by those above."""
    create_array: Any = _library.create_array_parameter
    create_scalar: Any = _library.create_scalar_parameter
    create_descriptor: Any = _library.create_tma_descriptor_parameter
    _library.TritonKernel = _kernel
    _library.TritonKernelCall = _KernelCall
    _library.create_array_parameter = lambda *args: _Parameter(create_array(*args), None)
    _library.create_scalar_parameter = lambda value, dtype: _Parameter(
        create_scalar(value, dtype), (_FORMATS.get(dtype, ""), value)
    )
    _library.create_tma_descriptor_parameter = lambda **kwargs: _Parameter(
        create_descriptor(**kwargs), _tensor_map(**kwargs)
    )
    triton_lib.TritonFunction._compile_kernel = _compile_kernel  # type: ignore[method-assign]
    # Not cacheable: of equal calls, only some hold the code.
    register = mlir.register_lowering
    register(triton_lib.triton_kernel_call_p, _lower, platform="cuda", cacheable=False)


def _tensor_map(
    *,
    elem_type: int,
    swizzle: int,
    shape: Sequence[int],
    strides: Sequence[int],
    block_shape: Sequence[int],
    oob_fill: int,
) -> TensorMap:
    return TensorMap(elem_type, swizzle, shape, strides, block_shape, oob_fill)


_compile_triton: Any = triton_lib.TritonFunction._compile_kernel
if records.unknown_package() is None:
    _take_over()


def triton_call(
    *args: jax.Array | jax.Ref | int,
    name: str,
    target: Target,
    together: bool = False,
    registers: int | None = None,
    **kwargs: Any,
) -> Any:
    """`jax_triton.triton_call` for a target. Ints among args are launch constants.

    Every kernel runs inside the step's CUDA graph, so its configuration is fixed: Triton cannot
    autotune while a graph is recorded.

    Args:
      together: programs of the grid wait for each other.
      registers: of a thread when a program starts; None: the compiler's choice. Only for Gluon.

    Raises:
      ValueError: while the call is lowered, if the GPU cannot start the kernel; with `together`,
        also if it cannot run all programs at once; a call in clusters outside a PDL chain.
    """
    if kwargs.get("CLUSTER", 1) > 1 and not target.pdl:
        raise ValueError(f"{name}: only PDL launches programs in clusters")
    capability = target.gpu.compute_capability
    if "EARLY" in kwargs["kernel"].arg_names:
        kwargs["EARLY"] = target.pdl
    options = triton_compat.compiler_options(capability)
    options |= {_DEVICE: target.gpu, _TOGETHER: together}
    if registers is not None:
        options["maxnreg"] = registers
    return jt.triton_call(
        *args, name=name, compute_capability=capability, backend_options=options, **kwargs
    )


def tensor_descriptor(
    x: jax.Array,
    block: Sequence[int],
    layout: Any,
    view: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Any:
    """x as a kernel argument from which TMA copies blocks of shape `block`. view: shape and strides
    (in elements) in which TMA sees x, if not its own."""
    if view is None:
        return jt.TensorDescriptor.from_array(x, block, layout)
    shape, strides = view
    return jt.TensorDescriptor(x, tuple(shape), tuple(strides), tuple(block), layout)
