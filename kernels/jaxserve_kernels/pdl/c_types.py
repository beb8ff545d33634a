"""C structures of XLA's foreign function interface and of CUDA, as ctypes.

Sources: xla/ffi/api/c_api.h (version 0.4) and cuda.h (12 and later).
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p

API_VERSION = (0, 4)


class Extension(Structure):
    _fields_ = (("struct_size", c_size_t), ("type", c_int), ("next", c_void_p))


class Version(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int),
    )  # fmt: skip


class Metadata(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("version", Version), ("traits", c_uint32),
        ("state_type", c_int64),
    )  # fmt: skip


class MetadataExtension(Structure):
    _fields_ = (("base", Extension), ("metadata", POINTER(Metadata)))


class Buffer(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("dtype", c_int), ("data", c_void_p),
        ("rank", c_int64), ("dims", c_void_p),
    )  # fmt: skip


class Buffers(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64),
        ("types", c_void_p), ("items", POINTER(POINTER(Buffer))),
    )  # fmt: skip


class Span(Structure):
    _fields_ = (("data", c_void_p), ("size", c_size_t))


class Attributes(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64),
        ("types", c_void_p), ("names", c_void_p), ("items", POINTER(POINTER(Span))),
    )  # fmt: skip


class Api(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("version", Version),
        ("internal", c_void_p), ("error_create", c_void_p), ("error_get_details", c_void_p),
        ("error_destroy", c_void_p), ("handler_register", c_void_p), ("stream_get", c_void_p),
    )  # fmt: skip


class CallFrame(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", POINTER(Extension)), ("api", POINTER(Api)),
        ("context", c_void_p), ("stage", c_int), ("operands", Buffers), ("results", Buffers),
        ("attributes", Attributes), ("future", c_void_p),
    )  # fmt: skip


class ErrorArguments(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int),
    )  # fmt: skip


class StreamArguments(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p),
        ("stream", c_void_p),
    )  # fmt: skip


class LaunchAttribute(Structure):
    """CUlaunchAttribute. Its value takes 64 bytes."""

    _fields_ = (("id", c_int), ("padding", c_int), ("value", c_int), ("rest", c_int * 15))


def attributes(cluster: int) -> ctypes.Array[LaunchAttribute]:
    """The attributes of a launch. The last one is PDL's.

    Args:
      cluster: programs of a thread block cluster, along the grid's first axis.
    """
    early = LaunchAttribute(PROGRAMMATIC, 0, 1)
    if cluster == 1:
        return (LaunchAttribute * 1)(early)
    size = LaunchAttribute(CLUSTER_DIMENSION, 0, cluster, (c_int * 15)(1, 1))
    return (LaunchAttribute * 2)(size, early)


class LaunchConfig(Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint32 * 3), ("block", c_uint32 * 3), ("shared_bytes", c_uint32),
        ("stream", c_void_p), ("attributes", POINTER(LaunchAttribute)),
        ("num_attributes", c_uint32),
    )  # fmt: skip


METADATA = 1  # XLA_FFI_Extension_Metadata
CAPTURABLE = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MAX_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT

Function = ctypes.CFUNCTYPE(c_void_p, c_void_p)
"""Type of handlers and of XLA's own functions. The argument is the address of a structure, the
result an error or null."""
