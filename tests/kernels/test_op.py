"""An operation takes the first implementation that does not refuse, and knows why others did."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve_kernels.dense_matmul import linear
from jaxserve_kernels.op import Choice, Implementation, Op, Refusal, anything
from jaxserve_kernels.target import CPU, Target

X = jax.ShapeDtypeStruct((3,), jnp.float32)


def _wide(x: Any, **_: Any) -> int | Refusal:
    return x.shape[0] if x.shape[0] > 4 else Refusal("up to 4 numbers")


DOUBLE = Op(
    name="double",
    implementations=(
        Implementation(name="wide", configure=_wide, run=lambda n, x, **_: n * x),
        Implementation(
            name="definition", configure=anything, run=lambda _, x, **__: x + x, kernels=False
        ),
    ),
    describe=lambda x, **_: f"{x.shape[0]} numbers",
)


def test_the_first_that_takes_the_arguments_serves_them() -> None:
    choice = DOUBLE.choose(X, target=CPU)
    assert choice.implementation.name == "definition" and choice.what == "3 numbers"
    assert choice.refused == (("wide", "up to 4 numbers"),)
    np.testing.assert_array_equal(DOUBLE(jnp.ones(3), target=CPU), 2 * np.ones(3))
    unchecked = Target(implementation="triton", checked=False)
    np.testing.assert_array_equal(DOUBLE(jnp.ones(5), target=unchecked), 5 * np.ones(5))


def test_kernels_that_do_not_compile_are_refused_for_it() -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such instruction")

    wide = Implementation(name="wide", configure=anything, run=fails)
    op = Op(name="fails", implementations=(wide, DOUBLE.implementations[1]))
    choice = op.choose(X, target=CPU)
    assert choice.implementation.name == "definition"
    assert choice.refused == (("wide", "does not compile: RuntimeError: no such instruction"),)
    assert op.choose(X, target=CPU.replace(checked=False)).implementation is wide


def test_who_observes_a_target_is_told_of_every_call() -> None:
    seen: list[Choice] = []
    x, weight = jnp.ones((2, 8)), jnp.ones((4, 8))
    linear(x, weight, target=CPU.replace(observe=seen.append))
    assert [(each.operation, each.what, each.implementation.name) for each in seen] == [
        ("linear", "weight 4 x 8", "xla")
    ]
    assert dict(seen[0].refused)["triton"] == "there are no kernels"
