"""Dependent launch: what a traced function becomes, and its launches by a driver of the test's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.extend import core

from jaxserve_kernels import cuda_driver, tensor_map
from jaxserve_kernels.pdl import c_types, handler, launches, plan
from jaxserve_kernels.pdl.launches import Launch, Mapped, digests, pack
from jaxserve_kernels.pdl.plan import Place
from jaxserve_kernels.ptxas import Code
from jaxserve_kernels.tensor_map import TensorMap

kernel_p = core.Primitive("triton_kernel_call")


@kernel_p.def_abstract_eval
def _(*_: Any, size: int, **__: Any) -> Any:
    return ShapedArray((size,), jnp.float32)


def kernel(*operands: jax.Array, size: int, zeroed: bool = False) -> jax.Array:
    zeroed_outputs = (0,) if zeroed else ()
    return kernel_p.bind(*operands, size=size, name="kernel", zeroed_outputs=zeroed_outputs)


def planned(function: Callable[..., Any], *shapes: tuple[int, ...]) -> plan.Plan:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return plan.make(jax.make_jaxpr(function)(*arguments).jaxpr)


def test_results_have_their_own_place_and_what_lies_between_shares_scratch() -> None:
    def function(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = kernel(x, size=64)
        return x

    found = planned(function, (64,))
    first, second, third, last = found.calls
    operand, result, scratch = 0, 1, 2
    assert first.operands == (Place(operand, 0),)
    assert last.results == (Place(result, 0),)
    assert (
        first.results == second.operands == third.results == last.operands == (Place(scratch, 0),)
    )
    assert second.results == third.operands == (Place(scratch, 256),)
    assert found.scratch_bytes == 512


def test_an_array_keeps_its_place_until_it_has_been_read_last() -> None:
    def function(x: jax.Array) -> jax.Array:
        kept = kernel(x, size=64)
        return kernel(kept, kernel(kernel(x, size=1), size=1), size=2)

    calls = planned(function, (64,)).calls
    places = [call.results[0] for call in calls[:3]]
    assert len(set(places)) == 3
    assert calls[3].operands == (places[0], places[2])


def test_what_must_be_zero_has_a_place_that_nothing_else_has() -> None:
    def function(x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = kernel(x, kernel(x, size=8, zeroed=True), size=64)
        return x

    found = planned(function, (64,))
    flags = [found.calls[index].results[0].offset for index in (0, 2)]
    assert flags == [0, 256] and found.zeroed_bytes == 512
    assert found.calls[1].results[0].offset >= 512


def test_rows_and_shapes_are_views() -> None:
    def function(stack: jax.Array) -> jax.Array:
        return kernel(stack[3].reshape(2, 8), size=1)

    (call,) = planned(function, (5, 4, 4)).calls
    assert call.operands == (Place(0, 3 * 16 * 4),)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: kernel(x + 1, size=4),
        lambda x: kernel(x[:, 1:3], size=4),
        lambda x: kernel(x, size=4)[1:3],
        lambda x: kernel(x, size=4, zeroed=True),
    ],
    ids=[
        "arithmetic",
        "parts of rows",
        "a part as a result",
        "a result that must be zero",
    ],
)
def test_other_functions_are_no_chains(function: Callable[..., Any]) -> None:
    with pytest.raises(plan.NotOnlyKernels):
        planned(function, (4, 4))


class Driver:
    """CUDA's, as far as it is needed; its kernels compute on the host."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, list[int], list[tuple[int, list[int]]]]] = []
        self.maps: list[Any] = []
        self.loaded: list[str] = []
        self.attributes: list[tuple[str, int, int]] = []
        self.status = 0

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        module._obj.value = int.from_bytes(code, "little")
        self.loaded.append(code.decode())
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, _: bytes) -> int:
        function._obj.value = module.value
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((_name(function), attribute, value))
        return 0

    def cuStreamGetCtx(self, *_: Any) -> int:
        return 0

    cuCtxPushCurrent_v2 = cuCtxPopCurrent_v2 = cuStreamGetCtx

    def cuMemsetD8Async(self, where: Any, value: int, size: Any, _: Any) -> int:
        ctypes.memset(where.value, value, size.value)
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13000
        return 0

    def cuTensorMapEncodeTiled(
        self, where: Any, dtype: int, rank: int, array: Any, *rest: Any
    ) -> int:
        shape, strides, block, ones, *numbers = rest
        self.maps.append((dtype, list(shape), list(strides), list(block), list(ones), numbers))
        words = (ctypes.c_uint64 * 2).from_address(where.value)
        words[0], words[1] = array.value, (1 << 64) - 1
        return self.status

    def cuLaunchKernelEx(self, given: Any, function: Any, arguments: Any, _: None) -> int:
        config: c_types.LaunchConfig = given._obj
        name = _name(function)
        given = [config.attributes[index] for index in range(config.num_attributes)]
        attributes = [(each.id, [each.value, *each.rest[:2]]) for each in given]
        self.launched.append((name, list(config.grid), attributes))

        def buffer(index: int) -> Any:
            address = ctypes.c_uint64.from_address(arguments[index]).value
            return np.ctypeslib.as_array((ctypes.c_float * 4).from_address(address))

        if name == "scale":
            buffer(1)[:] = buffer(0) * ctypes.c_float.from_address(arguments[2]).value
        else:
            buffer(2)[:] = buffer(0) + buffer(1)
        return self.status


def _name(function: Any) -> str:
    return function.value.to_bytes(8, "little").rstrip(b"\0").decode()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "locked_library", lambda: driver)
    monkeypatch.setattr(launches, "assembled", lambda code: code.name.encode())
    monkeypatch.setattr(handler, "_stream", lambda frame: (7, None))
    launches._load.cache_clear()
    tensor_map._driver_version.cache_clear()
    handler.register("cpu")
    return driver


def chain(factor: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """x[4:8] * factor + y, by two kernels, the last of them twice, and one scratch buffer."""
    scale, add = (Code(name, 4, 0, "", 90) for name in ("scale", "add"))
    x, y, out, scratch = Place(0, 16), Place(1, 0), Place(2, 0), Place(3, 0)
    packed = pack(
        [
            Launch(scale, (1, 2, 3), (x, scratch, ("f", factor))),
            Launch(add, (4, 1, 1), (scratch, y, out), cluster=2),
            Launch(add, (1, 1, 1), (scratch, y, out)),
        ]
    )
    types = [jax.ShapeDtypeStruct((4,), jnp.float32)] * 2
    call = jax.ffi.ffi_call(handler.TARGET, types)
    return lambda *arrays: call(*arrays, kernels=packed, launches=2)[0]


def test_one_call_launches_all_kernels_in_order(driver: Driver) -> None:
    for factor in (3.0, 5.0):
        out = jax.jit(chain(factor))(jnp.arange(8.0), jnp.ones(4))
        np.testing.assert_array_equal(out, np.arange(4, 8) * factor + 1)
    early = (c_types.PROGRAMMATIC, [1, 0, 0])  # all but the first
    cluster = (c_types.CLUSTER_DIMENSION, [2, 1, 1])
    wanted = [
        ("scale", [1, 2, 3], []),
        ("add", [4, 1, 1], [cluster, early]),
        ("add", [1, 1, 1], [early]),
    ]
    assert driver.launched == wanted * 2


def test_scratch_that_must_be_zero_is_cleared_before_the_first_launch(driver: Driver) -> None:
    add, types = Code("add", 4, 0, "", 90), [jax.ShapeDtypeStruct((4,), jnp.float32)] * 2
    launch = Launch(add, (1, 1, 1), (Place(2, 0), Place(0, 0), Place(1, 0)))
    call = jax.ffi.ffi_call(handler.TARGET, types)
    packed = pack([launch], zeroed_bytes=16)
    for _ in range(3):
        out = jax.jit(lambda x: call(x, kernels=packed, launches=1)[0])(jnp.arange(4.0))
        np.testing.assert_array_equal(out, np.arange(4.0))


def test_a_failed_launch_is_an_error_of_the_program(driver: Driver) -> None:
    driver.status = 719
    with pytest.raises(jax.errors.JaxRuntimeError, match="CUDA error 719 from the launch of scale"):
        jax.block_until_ready(jax.jit(chain(7.0))(jnp.arange(8.0), jnp.ones(4)))


def test_a_tensor_map_is_of_the_array_that_the_call_has_now(driver: Driver) -> None:
    tensor = TensorMap(9, 3, (6, 4), (8, 1), (2, 4), 0)  # bfloat16
    scale, types = Code("scale", 4, 0, "", 90), [jax.ShapeDtypeStruct((4,), jnp.float32)] * 2
    mapped = Mapped(Place(0, 16), tensor)
    packed = pack([Launch(scale, (1, 1, 1), (mapped, Place(1, 0), ("f", 2.0)), early=False)])
    call = jax.ffi.ffi_call(handler.TARGET, types)
    for times in (1.0, 3.0):
        x = jnp.arange(8.0) * times
        out = jax.jit(lambda x: call(x, kernels=packed, launches=1)[0])(x)
        np.testing.assert_array_equal(out, x[4:] * 2)
    # The last axis comes first; strides are in bytes, without the last axis's.
    assert driver.maps[0] == (9, [4, 6], [16], [4, 2], [1, 1], [0, 3, 2, 0])


def test_a_small_tensor_map_lacks_the_bit_that_drivers_set_by_mistake(driver: Driver) -> None:
    for rows, wanted in ((8, ~(1 << 21) & ((1 << 64) - 1)), (1 << 15, (1 << 64) - 1)):
        encoded = tensor_map.Encoded(TensorMap(9, 3, (rows, 4), (4, 1), (2, 4), 0))
        encoded.encode(4096)
        assert encoded.address % 64 == 0
        assert ctypes.c_uint64.from_address(encoded.address + 8).value == wanted


def test_a_code_is_held_by_the_first_call_that_needs_it(driver: Driver) -> None:
    add, types = Code("add", 4, 0, "", 90), [jax.ShapeDtypeStruct((4,), jnp.float32)] * 2
    launch = Launch(add, (1, 1, 1), (Place(0, 0), Place(0, 0), Place(1, 0)))
    first, second = pack([launch]), pack([launch], 1, digests([launch]))
    assert len(second) < len(first) + 8
    call = jax.ffi.ffi_call(handler.TARGET, types)
    for packed in (first, second):
        out = jax.jit(lambda x, packed=packed: call(x, kernels=packed, launches=1)[0])(jnp.ones(4))
        np.testing.assert_array_equal(out, 2 * np.ones(4))
    assert driver.loaded == ["add"]


def test_only_kernels_that_run_beside_others_ask_for_their_split_of_memory(driver: Driver) -> None:
    types = [jax.ShapeDtypeStruct((4,), jnp.float32)] * 2
    add, scale = (Code(name, 4, 1 << 16, "", 90) for name in ("add", "scale"))
    packed = pack(
        [
            Launch(add, (1, 1, 1), (Place(0, 0), Place(0, 0), Place(2, 0))),
            Launch(scale, (1, 1, 1), (Place(2, 0), Place(1, 0), ("f", 2.0)), early=False),
        ]
    )
    call = jax.ffi.ffi_call(handler.TARGET, types)
    jax.block_until_ready(jax.jit(lambda x: call(x, kernels=packed, launches=2))(jnp.ones(4)))
    size, split = c_types.MAX_SHARED_BYTES, c_types.SHARED_CARVEOUT
    wanted = [("add", size, 1 << 16), ("add", split, 100), ("scale", size, 1 << 16)]
    assert driver.attributes == wanted
