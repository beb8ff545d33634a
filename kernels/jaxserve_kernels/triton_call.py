"""jax-triton, made to work with the Triton versions we support, and with Gluon.

Also what a call's record holds: the kernel's machine code, which a program has once, not its text.
"""

from __future__ import annotations

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
from jaxserve_kernels.triton_compat import jt, triton_lib

# What jax-triton 0.4 wants instead, a Ref to an array of zeros, costs a kernel where its own way is
# a memset, and on an H200 the kernel that was called so died of an illegal address (0.4.1).
warnings.filterwarnings("ignore", "zeroed_outputs is deprecated", DeprecationWarning)

jax_triton: Any = triton_lib
_library: Any = triton_lib.triton_kernel_call_lib
_TritonKernel: Any = _library.TritonKernel
_TritonKernelCall: Any = _library.TritonKernelCall


_BARRIER = "stablehlo.optimization_barrier"
_DEVICE = "device"
"""Among a call's options for the compiler, which knows nothing of it: the card that is compiled
for."""
_TOGETHER = "together"
"""Too: whether programs wait for each other."""


class _Codes:
    """Which machine codes a value of a program that is lowered needs, through all before it."""

    def __init__(self) -> None:
        self._of: dict[Any, frozenset[str]] = {}

    def before(self, values: Iterable[Any]) -> frozenset[str]:
        """Names of the codes that calls have brought on whose results the values depend."""
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
    """Those that make its operands; arguments of functions and loops have none."""
    operands = () if isinstance(operation, ir.Block) else operation.operands
    return [_maker(value) for value in operands]


def _maker(value: Any) -> Any:
    """The operation that makes a value, or the block whose argument it is. A barrier makes nothing:
    XLA removes it, and what it tied together is in no order any more."""
    while not isinstance(value.owner, ir.Block) and value.owner.name == _BARRIER:
        value = value.owner.operands[ir.OpResult(value).result_number]
    return value.owner


class _Call:
    """One that is lowered."""

    def __init__(self, codes: frozenset[str]):
        self.codes = codes
        """What calls before it have brought, and itself."""


_call: ContextVar[_Call] = ContextVar("call")


class _Kernel(NamedTuple):
    """What the calls of a kernel may record of it."""

    compiled: ptxas.Code
    source: Any
    """A record with PTX."""
    code: str = ""
    """Names the machine code; empty if there is no assembler."""
    named: Any = None
    """A record with the name in place of PTX."""
    with_code: bytes = b""
    """What a record that brings the machine code has at its end."""
    together_on: Device | None = None
    """The card on which all programs of a grid must run at once; None: they need not."""


def _kernel(*args: Any) -> _Kernel:
    """A kernel's records, without its Triton source form.

    Each of the 300 calls of a step has a copy of the record, in its program's text and twice in the
    call itself, in memory as long as the program. jaxlib takes machine code that a record brings,
    and keeps it by the record's PTX, of which a digest serves as well. So a call brings the code,
    and those that depend on its result name it: in whichever order XLA makes the calls of a
    program, it makes them later.
    """
    name, num_warps, num_ctas, shared_memory, ptx, _ttir, capability, *rest = args
    launch = (name, num_warps, num_ctas, shared_memory)
    source = _TritonKernel(*launch, ptx, "", capability, *rest)
    cubin = None if records.hold_source() else ptxas.assemble(ptx, capability)
    compiled = ptxas.Code(name, num_warps, shared_memory, ptx, capability)
    if cubin is None:
        return _Kernel(compiled, source)
    image = _field(1, cubin) + _field(2, name.encode()) + _number(3, shared_memory)
    code = hashlib.sha256(image).hexdigest()
    named = _TritonKernel(*launch, code, "", capability, *rest)
    return _Kernel(compiled, source, code, named, _field(1, _field(1, _field(11, image))))


class _Parameter(NamedTuple):
    """Of a kernel."""

    record: Any
    """What jaxlib takes."""
    number: tuple[str, int | float] | None
    """A format of `struct`, and a value; None: a buffer."""


_FORMATS = {"i1": "B", "i8": "b", "i16": "h", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
            "fp32": "f", "fp64": "d"}  # fmt: skip


class Described(Exception):
    """Carries a compiled kernel, its grid and its numbers (None: a buffer) out of jax-triton's
    lowering of a call, where `describing` asks for them."""


describing: ContextVar[bool] = ContextVar("describing", default=False)


class _KernelCall:
    """In place of jaxlib's TritonKernelCall."""

    def __init__(self, kernel: _Kernel, x: int, y: int, z: int, parameters: list[_Parameter]):
        if kernel.together_on is not None:
            residency.check(kernel.compiled, (x, y, z), kernel.together_on)
        self._kernel, self._args = kernel, (x, y, z, [each.record for each in parameters])
        self._numbers = [each.number for each in parameters]

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        """TritonAnyKernelCall of jaxlib/gpu/triton.proto. What stands twice in a message is merged
        when it is read, so that fields can be added at its end."""
        if describing.get():
            raise Described(self._kernel.compiled, self._args[:3], self._numbers)
        kernel, call = self._kernel, _call.get()
        if not kernel.code or records.hold_source():
            return _TritonKernelCall(kernel.source, *self._args).to_proto(name, metadata)
        record = _TritonKernelCall(kernel.named, *self._args).to_proto(name, metadata)
        if kernel.code in call.codes:
            return record
        call.codes |= {kernel.code}
        return record + kernel.with_code


def _field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer that holds bytes."""
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
    """As jax-triton does, knowing what the program has brought before."""
    codes = context.module_context.cached_primitive_lowerings.setdefault(_Codes, _Codes())
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
    """As jax-triton does. A kernel that the card could not start is refused here, where no card is
    needed."""
    own = (_DEVICE, _TOGETHER)
    given = {name: value for name, value in options.items() if name not in own}
    compiles = _compile_gluon if isinstance(function.fn, GluonJITFunction) else _compile_triton
    kernel, *others = compiles(function, specialization, target, backend, given)
    _check_fits(kernel.compiled, options[_DEVICE])
    if options[_TOGETHER]:
        kernel = kernel._replace(together_on=options[_DEVICE])
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
    """jax-triton 0.4 takes Gluon kernels through Triton's own passes, and launches them without
    the warps that warp specialisation adds. Triton's compiler does both right."""
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
    """Put what is above in the place of jax-triton's own."""
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
        create_descriptor(**kwargs), None
    )
    triton_lib.TritonFunction._compile_kernel = _compile_kernel  # type: ignore[method-assign]
    # Not cached by jax: equal calls differ in who brings the code.
    register = mlir.register_lowering
    register(triton_lib.triton_kernel_call_p, _lower, platform="cuda", cacheable=False)


_compile_triton: Any = triton_lib.TritonFunction._compile_kernel
if records.unknown_package() is None:
    _take_over()


def triton_call(
    *args: jax.Array | jax.Ref | int,
    name: str,
    target: Target,
    together: bool = False,
    **kwargs: Any,
) -> Any:
    """`jax_triton.triton_call` for a target. Ints are launch constants.

    Every kernel runs inside the step's CUDA graph, so configurations are fixed beforehand: Triton
    cannot tune while a graph is recorded.

    Args:
      together: programs wait for others of the grid. It is refused if they do not all run at once.
    """
    capability = target.gpu.compute_capability
    if "EARLY" in kwargs["kernel"].arg_names:
        kwargs["EARLY"] = target.pdl
    options = triton_compat.compiler_options(capability)
    options |= {_DEVICE: target.gpu, _TOGETHER: together}
    return jt.triton_call(
        *args, name=name, compute_capability=capability, backend_options=options, **kwargs
    )


def tensor_descriptor(x: jax.Array, block: Sequence[int], layout: Any) -> Any:
    """x as an argument that a kernel copies blocks of by TMA."""
    return jt.TensorDescriptor.from_array(x, block, layout)
