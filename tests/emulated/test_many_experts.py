"""Hopper's kernel of a mixture of experts on the emulator: many tokens, and their two forms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels import tables
from jaxserve_kernels.add_rms_norm import add_rms_norm, add_rms_norm_twice
from jaxserve_kernels.experts import (
    ExpertActivation,
    ExpertWeights,
    Routing,
    experts,
    hopper,
    routed_experts,
    token_format,
)
from jaxserve_kernels.experts.routed import _read_by_shared
from jaxserve_kernels.quantized_matmul.e4m3.tokens import BothForms, QuantizedTokens
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from jaxserve_kernels.target import REFERENCE, Target
from tests.emulated.errors import relative_error
from tests.emulated.test_expert_kernels import (
    EXPERTS,
    QUANTIZE,
    K,
    expected,
    made,
    plain,
    summed,
)
from tests.emulated.weights import WEIGHTS
from tests.emulator.targets import gpu


@pytest.mark.parametrize("activation", ["silu", "swiglu_oss"])
@pytest.mark.parametrize("width", [128, 192])
def test_many_tokens_on_hopper(activation: ExpertActivation, width: int) -> None:
    """More tokens than a tile has, fewer than a warpgroup, an expert without any; and columns past
    the last."""
    args = made(200, embed=320, width=width, biases=activation == "swiglu_oss")
    target = gpu(90, multiprocessors=3)
    found = hopper.experts(*args, activation, target=target)
    assert relative_error(summed(found), expected(*args, activation)) < 6e-3


def test_tiles_with_fewer_tokens_on_hopper() -> None:
    """Experts with a tile that is nearly full, with a small one, and with several."""
    x, ids, weights, w = made(170, embed=320, width=128)
    ids = ids.at[:140].set(jnp.asarray([0, 3]))
    ids = ids.at[140:, 0].set(0)
    ids = ids.at[140:, 1].set(jnp.where(jnp.arange(30) < 12, 3, 4))
    found = hopper.experts(x, ids, weights, w, "silu", target=gpu(90, multiprocessors=3))
    assert found.shape == (K, 170, 320) and found.dtype == x.dtype
    assert relative_error(summed(found), expected(x, ids, weights, w)) < 6e-3


def with_tiles(target: Target, *, small: bool) -> Target:
    """Of 4-bit weights. Others have one kind."""
    limits = {"small_tiles_tokens": 1000 if small else 0}
    return target.with_tuned({("experts", tables.LIMITS): limits})


@pytest.mark.parametrize(("name", "small"), [
    ("bf16", False), ("fp8", False), ("int4", False), ("int4", True), ("mxfp4", False),
    ("mxfp4", True),
])  # fmt: skip
def test_any_number_of_tokens_for_each_expert_on_hopper(name: str, small: bool) -> None:
    """None, one, and one less or more than a box, a tile, or two tiles have."""
    quantize = QUANTIZE[name]
    counts = np.asarray([0, 1, 33, 97, 128, 129] if small else [0, 1, 33, 128, 129, 161])
    x, _, _, w = made(counts.sum(), quantize)
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(EXPERTS), counts))[:, None]
    args = x, jnp.asarray(ids, jnp.int32), jnp.ones(ids.shape, jnp.float32), w
    target = with_tiles(gpu(90, multiprocessors=3), small=small)
    found = hopper.experts(*args, "silu", target=target)
    most = 6e-3 if quantize is plain else 5e-2
    assert relative_error(summed(found), expected(*args)) < most


def test_many_tokens_of_8_bit_integers_on_hopper() -> None:
    """Weights with more inputs than tokens have. Codes become bfloat16."""
    x, ids, factors, w = made(170, WEIGHTS["int8"], embed=320, width=192, biases=True)
    ids = ids.at[:140].set(jnp.asarray([0, 3]))
    found = hopper.experts(x, ids, factors, w, "silu", target=gpu(90, multiprocessors=3))
    assert relative_error(summed(found), expected(x, ids, factors, w)) < 7e-3


def in_e4m3(x: Any) -> Any:
    """Rounds tokens [tokens, inputs] to e4m3 with a scale each."""
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / 448
    return (wide / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale


IN_E4M3 = ["fp8", "fp8-blocks", "int4", "int4-zeros", "mxfp4"]


@pytest.mark.parametrize(("name", "embed", "width", "small"), [
    *((name, 256, 384, False) for name in IN_E4M3),
    *((name, 320, 192, False) for name in IN_E4M3 if name != "fp8-blocks"),  # of 128 inputs
    *((name, 320, 192, True) for name in ("int4-zeros", "mxfp4")),
    ("int4", 256, 384, True),
])  # fmt: skip
def test_many_tokens_in_e4m3_on_hopper(name: str, embed: int, width: int, small: bool) -> None:
    """One expert has tiles of 140 tokens; a weight may have more inputs than tokens have. The
    inputs of both products are rounded to e4m3; where sums differ in their last bits, some hidden
    values are rounded to the other side."""
    padded = embed % 128 > 0
    x, ids, factors, w = made(170, WEIGHTS[name], embed=embed, width=width, biases=padded)
    ids = ids.at[:140].set(jnp.asarray([0, 3]))
    target = with_tiles(gpu(90, multiprocessors=3), small=small)
    found = hopper.experts(x, ids, factors, w, "silu", target=target)
    rounded = jnp.zeros(x.shape)
    gate_up, down = w.gate_up.dequantize()[..., :embed], w.down.dequantize()[..., :width]
    zeros = jnp.zeros((EXPERTS, 1))
    of_both = (zeros if each is None else each.astype(jnp.float32) for each in w[2:])
    gate_up_bias, down_bias = of_both
    for expert in range(EXPERTS):
        both = in_e4m3(x) @ gate_up[expert].T + gate_up_bias[expert]
        gate, up = jnp.split(both.astype(jnp.bfloat16).astype(jnp.float32), 2, axis=-1)
        hidden = in_e4m3((jax.nn.silu(gate) * up).astype(jnp.bfloat16))
        out = hidden @ down[expert].T + down_bias[expert]
        rounded += out * jnp.sum(jnp.where(ids == expert, factors, 0), axis=-1, keepdims=True)
    assert relative_error(summed(found), rounded) < 3e-2
    assert relative_error(summed(found), expected(x, ids, factors, w)) < 5e-2


@pytest.mark.parametrize(("name", "embed"), [
    ("fp8", 256), ("fp8-blocks", 256), ("int4", 256), ("mxfp4", 256), ("int4", 320), ("mxfp4", 320),
])  # fmt: skip
def test_a_norm_writes_what_the_experts_and_the_router_read(name: str, embed: int) -> None:
    """Both are, bit for bit, what a norm and a kernel that quantises its tokens write. A weight may
    have more inputs than tokens have."""
    target = gpu(90, multiprocessors=3)
    x, ids, weights, w = made(170, WEIGHTS[name], embed=embed, width=192)
    update = jnp.asarray(np.random.default_rng(1).standard_normal((2, *x.shape)), jnp.float32)
    norm = jnp.linspace(0.5, 2, embed, dtype=jnp.bfloat16)
    form = token_format(x, K, w, target=target)
    assert form is not None
    own = x, update, norm, 1e-6
    _, plain = add_rms_norm(*own, target=target)
    _, found = add_rms_norm_twice(*own, form, target=target)
    assert isinstance(found, BothForms) and not isinstance(plain, BothForms | QuantizedTokens)
    expected = quantized(plain, form, target=target)
    np.testing.assert_array_equal(bits(found.plain), bits(plain))
    for one, other in zip(found.quantized, expected, strict=True):
        np.testing.assert_array_equal(bits(one)[:170], bits(other)[:170])
    given, again = (
        hopper.experts(each, ids, weights, w, "silu", target=target) for each in (found, plain)
    )
    np.testing.assert_array_equal(bits(given), bits(again))
    given, again = (  # where Hopper's kernel does not compile
        experts(each, ids, weights, w, target=REFERENCE) for each in (found, plain)
    )
    np.testing.assert_array_equal(bits(given), bits(again))


def test_experts_of_plain_tokens_have_no_other_form() -> None:
    target = gpu(90, multiprocessors=3)
    for tokens, name in ((170, "bf16"), (8, "int4")):
        x, _, _, w = made(tokens, QUANTIZE[name])
        assert token_format(x, K, w, target=target) is None


def bits(x: Any) -> Any:
    found = np.asarray(x)
    return found.view(f"u{found.dtype.itemsize}")


@pytest.mark.parametrize(("name", "read"), [("fp8", QuantizedTokens), ("int4", jax.Array)])
def test_the_shared_expert_reads_the_experts_tokens_if_it_can(name: str, read: type) -> None:
    """Those of int4 have their sums beside the codes, in dense products apart."""
    target = gpu(90, multiprocessors=3)
    x, _, _, w = made(256, WEIGHTS[name])
    shared = ExpertWeights(*(jax.tree.map(lambda leaf: leaf[-1], each) for each in w[:2]))
    form = token_format(x, K, w, target=target)
    assert form is not None
    found = BothForms(x, quantized(x, form, target=target))
    assert isinstance(_read_by_shared(found, shared, w, K, "silu", target), read)
    scores = jnp.asarray(np.random.default_rng(2).standard_normal((1, 256, EXPERTS + 1)))
    routing = Routing(num_experts=EXPERTS, top_k=K)
    given, again = (
        routed_experts(each, scores.astype(jnp.float32), routing, w, shared=shared, target=target)
        for each in (found, x)
    )
    np.testing.assert_array_equal(bits(given), bits(again))
