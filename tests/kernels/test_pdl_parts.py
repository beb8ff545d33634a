"""Chains of kernels in functions that also compute outside of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.core import ShapedArray
from jax.extend import core

from jaxserve_kernels.pdl import parts, plan

SIZE = 8

kernel_p = core.Primitive("triton_kernel_call")


@kernel_p.def_abstract_eval
def _(*_: Any, **__: Any) -> Any:
    return ShapedArray((SIZE,), jnp.float32)


@kernel_p.def_impl
def _(*operands: Any, **_: Any) -> Any:
    return sum(2 * jnp.asarray(each).reshape(-1)[:SIZE] for each in operands) + 1


chain_p = core.Primitive("chain")
chain_p.multiple_results = True
chain_p.def_impl(lambda *operands, jaxpr: core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*operands))


def kernel(*operands: Any) -> jax.Array:
    return kernel_p.bind(*operands, zeroed_outputs=())


def joined(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """The function with its chains, and the names of its operations: of a chain, the number of
    kernels."""
    closed = jax.make_jaxpr(function)(*args)
    equations = parts.joined(closed.jaxpr, chain_p)
    names = [
        f"chain of {sum(each.primitive is kernel_p for each in found.params['jaxpr'].eqns)}"
        if found.primitive is chain_p
        else found.primitive.name
        for found in equations
    ]
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=equations)), names


def run(closed: Any, *args: Any) -> list[np.ndarray]:
    return [np.asarray(each) for each in core.jaxpr_as_fun(closed)(*args)]


X = jnp.arange(SIZE, dtype=jnp.float32)


def check(function: Callable[..., Any], wanted: list[str]) -> None:
    closed, names = joined(function, X)
    assert names == wanted
    for own, plain in zip(run(closed, X), jax.tree.leaves(function(X)), strict=True):
        np.testing.assert_array_equal(own, plain)


def test_kernels_in_a_row_are_a_chain() -> None:
    check(lambda x: kernel(kernel(kernel(x))), ["chain of 3"])


def test_one_kernel_is_none() -> None:
    check(lambda x: kernel(x) + 1, ["triton_kernel_call", "add"])


def test_what_needs_no_result_of_a_chain_comes_before_it() -> None:
    check(lambda x: kernel(kernel(x), x * 3), ["mul", "chain of 2"])


def test_a_chain_ends_where_an_operation_needs_its_result() -> None:
    def function(x: jax.Array) -> jax.Array:
        x = kernel(kernel(x))
        return kernel(kernel(x * 3, x))

    check(function, ["chain of 2", "mul", "chain of 2"])


def test_views_belong_to_the_chains_that_read_them() -> None:
    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = kernel(x.reshape(2, 4)).reshape(4, 2)
        second = kernel(first[1:3])
        return kernel(second), first + 1

    check(function, ["reshape", "chain of 3", "reshape", "add"])


def test_a_view_that_only_kernels_read_is_computed_nowhere_else() -> None:
    check(lambda x: kernel(kernel(x).reshape(2, 4)), ["chain of 2"])


@pytest.mark.parametrize("function", [lambda x: kernel(kernel(x)[::2]), lambda x: kernel(x)[2:6]])
def test_parts_of_rows_and_parts_of_results_are_operations(function: Callable[..., Any]) -> None:
    _, names = joined(function, X)
    assert "slice" in names and not any(name.startswith("chain") for name in names)


def test_what_a_chain_updates_in_place_is_one_of_its_results() -> None:
    def function(x: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        ref = jax.new_ref(kept)
        first = kernel(x, ref)
        kept = jax.freeze(ref)
        ref = jax.new_ref(kept)
        second = kernel(first * 2, ref)
        return kernel(second), jax.freeze(ref)

    closed, names = joined(function, X, X)
    assert names == ["new_ref", "triton_kernel_call", "freeze", "mul", "chain of 2"]
    chain = closed.jaxpr.eqns[-1]
    (kept,) = (eqn.outvars[0] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "freeze")
    aliases = plan.make(chain.params["jaxpr"]).aliases
    assert aliases == {chain.invars.index(kept): chain.outvars.index(closed.jaxpr.outvars[1])}


def test_no_reference_leaves_a_chain() -> None:
    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        ref = jax.new_ref(x)
        second = kernel(kernel(x, ref) + 1, ref)
        return kernel(second), jax.freeze(ref)

    _, names = joined(function, X)
    assert names.count("triton_kernel_call") == 3


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_function_computes_the_same(data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.sampled_from(["kernel", "two", "add", "view"]), max_size=12))
    picks = [data.draw(st.tuples(st.integers(0, 30), st.integers(0, 30))) for _ in steps]
    ends = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))

    def function(x: jax.Array) -> list[jax.Array]:
        known = [x]
        for step, (first, second) in zip(steps, picks, strict=True):
            a, b = known[first % len(known)], known[second % len(known)]
            if step == "kernel":
                known.append(kernel(a))
            elif step == "two":
                known.append(kernel(a, b))
            elif step == "add":
                known.append(a.reshape(-1) + b.reshape(-1))
            else:
                known.append(a.reshape(2, 4) if a.ndim == 1 else a.reshape(-1))
        return [known[end % len(known)] for end in ends]

    closed, _ = joined(function, X)
    for own, plain in zip(run(closed, X), function(X), strict=True):
        np.testing.assert_array_equal(own, plain)
