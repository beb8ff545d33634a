"""The foreign function through which XLA launches a chain of kernels.

XLA captures the launches of one call into a child graph of the step's CUDA graph. A child graph
keeps the programmatic edges over which a kernel starts early. There are none between two calls,
because each has its own child graph (jax registers no handler that could add nodes to the step's).

The handler is a Python function behind a C pointer, so the host needs no C compiler. XLA calls it
when it runs a program for the first time, when it records the program's graph, and when buffers
have moved since.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from ctypes import POINTER, byref, c_void_p

import jax

from jaxserve_kernels import cuda_driver
from jaxserve_kernels.cuda_driver import check
from jaxserve_kernels.pdl import c_types
from jaxserve_kernels.pdl.launches import DIGEST_BYTES, Launches

TARGET = "jaxserve_pdl_launches"
"""Name of the custom call."""

_launches: dict[bytes, Launches] = {}
_lock = threading.Lock()


@functools.cache
def register(platform: str = "CUDA") -> None:
    """Registers the handler with XLA. Call it before a program that uses it is compiled or
    loaded."""
    handlers = {"execute": jax.ffi.pycapsule(_handle)}
    jax.ffi.register_ffi_target(TARGET, handlers, platform=platform)


@c_types.Function
def _handle(address: int) -> int | None:
    """An XLA_FFI_Handler: launches the kernels, or fills in the handler's metadata."""
    frame = c_types.CallFrame.from_address(address)
    try:
        if frame.extension and frame.extension.contents.type == c_types.METADATA:
            _describe(ctypes.cast(frame.extension, POINTER(c_types.MetadataExtension)).contents)
            return None
        stream, error = _stream(frame)
        if error is None:
            _launch(frame, stream)
        return error
    except Exception as error:
        message = f"{TARGET}: {error!r}".encode()
        arguments = c_types.ErrorArguments(
            ctypes.sizeof(c_types.ErrorArguments), None, message, c_types.INTERNAL
        )
        return c_types.Function(frame.api.contents.error_create)(ctypes.addressof(arguments))


def _describe(extension: c_types.MetadataExtension) -> None:
    metadata = extension.metadata.contents
    version = ctypes.sizeof(c_types.Version)
    metadata.version = c_types.Version(version, None, *c_types.API_VERSION)
    metadata.traits = c_types.CAPTURABLE
    metadata.state_type = 0


def _stream(frame: c_types.CallFrame) -> tuple[int, int | None]:
    """The CUDA stream to launch on, and XLA's error if it has none."""
    get = c_types.StreamArguments(ctypes.sizeof(c_types.StreamArguments), None, frame.context)
    error = c_types.Function(frame.api.contents.stream_get)(ctypes.addressof(get))
    return get.stream or 0, error


def _launch(frame: c_types.CallFrame, stream: int) -> None:
    buffers = [
        group.items[index].contents.data or 0
        for group in (frame.operands, frame.results)
        for index in range(group.size)
    ]
    attribute = frame.attributes.items[0].contents
    driver, context = cuda_driver.locked_library(), c_void_p()
    with _lock:
        digest = ctypes.string_at(attribute.data, DIGEST_BYTES)
        if digest not in _launches:
            packed = ctypes.string_at(attribute.data, attribute.size)
            _launches[digest] = Launches(packed[DIGEST_BYTES:])
        check(driver.cuStreamGetCtx(c_void_p(stream), byref(context)), "cuStreamGetCtx")
        check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        try:
            _launches[digest].launch(buffers, stream)
        finally:
            driver.cuCtxPopCurrent_v2(byref(context))
