"""Int8 tokens of experts' gate and up on the emulator: the kernel, and what writes and reads
them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.experts import (
    ExpertWeights,
    Routing,
    config,
    experts,
    norm_and_score,
    routed_experts,
    token_format,
    triton_streaming,
)
from jaxserve_kernels.experts.config import Config, Launch, choose_streaming
from jaxserve_kernels.quantized_matmul.e4m3.tokens import BothForms
from jaxserve_kernels.quantized_matmul.e4m3.triton_tokens import quantized
from jaxserve_kernels.tables import LIMITS
from jaxserve_kernels.target import Target
from jaxserve_kernels.weights import layout
from jaxserve_kernels.weights.fp4 import pack_mxfp4
from tests.emulated.errors import relative_error
from tests.emulated.test_expert_kernels import EMBED, EXPERTS, K, made, summed
from tests.emulated.weights import WEIGHTS, gating, in_int8
from tests.emulator.targets import HOPPER, PDL

ROUTING = Routing(num_experts=EXPERTS, top_k=K)


class Dequantized(NamedTuple):
    """The values of a stack of weights."""

    values: Any

    def dequantize(self) -> Any:
        return self.values


def of_rounded(x: Any, ids: Any, weights: Any, w: ExpertWeights) -> Any:
    """The definition's sums, for tokens that are rounded to int8 before gate and up."""
    more = w.gate_up.dequantize().shape[-1] - x.shape[1]
    read, total = in_int8(jnp.pad(x, ((0, 0), (0, more)))), np.zeros(x.shape, np.float32)
    for expert in range(EXPERTS):
        one = (jax.tree.map(lambda leaf: leaf[expert], each) for each in (w.gate_up, w.down))  # noqa: B023
        share = np.where(ids == expert, weights, 0).sum(-1, keepdims=True)
        total += share * of_one(read, *one)
    return total


def of_one(read: Any, gate_up: Any, down: Any) -> Any:
    hidden = gating(read @ np.asarray(gate_up.dequantize()).T)
    return hidden @ np.asarray(down.dequantize())[:, : hidden.shape[1]].T


def in_both_forms(x: Any, w: ExpertWeights, target: Target = PDL) -> BothForms:
    form = token_format(x, K, w, target=target)
    assert form is not None and form.dtype == jnp.int8
    return BothForms(x, quantized(x, form, target=target))


@pytest.mark.parametrize("name", ["int4", "int4-zeros", "mxfp4"])
@pytest.mark.parametrize("launch", [
    Launch(rows=128, tokens=8, depth=256, num_stages=3),
    Launch(rows=128, tokens=16, depth=256, num_stages=3),
    Launch(rows=128, tokens=16, depth=128, num_stages=4, ahead=4),
    Launch(rows=128, tokens=32, depth=128, num_stages=2),
    Launch(rows=128, tokens=32, depth=256, num_stages=3),
], ids=str)  # fmt: skip
def test_tiles_of_int8_tokens(name: str, launch: Launch) -> None:
    """Experts with several tiles and without any, rows past the last one, and an odd number of
    tiles of inputs."""
    x, ids, weights, w = made(45, WEIGHTS[name], embed=384, width=192)
    both = in_both_forms(x, w)
    own = Config(gate_up=launch, down=Launch(rows=128, tokens=16), parts=True)
    for target in (HOPPER, PDL):
        found = triton_streaming.experts(both, ids, weights, w, "silu", own, target=target)
        assert relative_error(summed(found), of_rounded(x, ids, weights, w)) < 1e-3


@pytest.mark.parametrize("target", [HOPPER, PDL], ids=["plain", "early"])
@pytest.mark.parametrize("tokens", [20, 41])
@pytest.mark.parametrize("name", ["int4", "int4-zeros", "mxfp4"])
def test_a_shared_expert_reads_the_same_tokens(name: str, tokens: int, target: Target) -> None:
    """From the norm to the experts' sums, in tiles of 16 and 32 tokens. Some rows are padding."""
    x, _, _, w = made(tokens, WEIGHTS[name])
    shared = ExpertWeights(*(jax.tree.map(lambda leaf: leaf[-1], each) for each in w[:2]))
    target = target.with_tuned({("experts", LIMITS): {"hopper_tokens_mxfp4": 24}})
    rng = np.random.default_rng(2)
    router = jnp.asarray(rng.standard_normal((EXPERTS + 1, EMBED)) / 16, jnp.bfloat16)
    update = jnp.asarray(rng.standard_normal((2, *x.shape)), jnp.float32)
    norm = jnp.linspace(0.5, 2, EMBED, dtype=jnp.bfloat16)
    active = jnp.asarray(np.arange(tokens) < tokens - 3, jnp.int32)
    seen: list[Any] = []
    observed = target.replace(observe=seen.append)
    form = token_format(x, K, w, target=target)
    _, normed, scores = norm_and_score(x, update, norm, 1e-6, router, form=form, target=target)
    assert isinstance(normed, BothForms)
    own = normed, scores, ROUTING, w
    found = routed_experts(*own, shared=shared, active=active, target=observed)
    assert seen[0].implementation.name == "streaming"
    assert seen[0].config.gate_up.tokens == (16 if tokens == 20 else 32)
    logits = np.asarray(scores.sum(0))
    ids = np.argsort(-logits[:, :EXPERTS], axis=1)[:, :K]
    weights = np.take_along_axis(np.exp(logits), ids, 1)
    weights /= weights.sum(1, keepdims=True)
    share = 1 / (1 + np.exp(-logits[:, EXPERTS:]))
    wanted = of_rounded(normed.plain, ids, weights, w)
    wanted += share * of_one(in_int8(normed.plain), shared.gate_up, shared.down)
    assert relative_error(summed(found)[:-3], wanted[:-3]) < 1e-3


@pytest.mark.parametrize("target", [HOPPER, PDL], ids=["plain", "early"])
@pytest.mark.parametrize("embed", [384, 320])
@pytest.mark.parametrize("name", ["int4", "int4-zeros", "mxfp4"])
def test_a_norm_writes_what_a_kernel_after_it_would(name: str, embed: int, target: Target) -> None:
    """Both forms, bit for bit. 320: the weight has more inputs, so the last ones are 0."""
    x, ids, weights, w = made(20, WEIGHTS[name], embed=embed)
    update = jnp.asarray(np.random.default_rng(1).standard_normal((2, *x.shape)), jnp.float32)
    norm = jnp.linspace(0.5, 2, embed, dtype=jnp.bfloat16)
    router = jnp.zeros((EXPERTS, embed), jnp.bfloat16)
    form = token_format(x, K, w, target=target)
    given = x, update, norm, 1e-6, router
    _, found, _ = norm_and_score(*given, form=form, target=target)
    _, plain, _ = norm_and_score(*given, target=target)
    assert isinstance(found, BothForms) and isinstance(plain, jax.Array)
    np.testing.assert_array_equal(found.plain, plain)
    again = in_both_forms(plain, w, target).quantized
    arrays = 3 if name == "int4-zeros" else 2  # without zero points nobody reads sums
    for one, other in zip(found.quantized[:arrays], again[:arrays], strict=True):
        np.testing.assert_array_equal(one, other)
    seen: list[Any] = []
    own = found, ids, weights, w
    summed_up = summed(experts(*own, target=target.replace(observe=seen.append)))
    assert seen[0].implementation.name == "triton_streaming"
    assert relative_error(summed_up, of_rounded(plain, ids, weights, w)) < 1e-3


def test_more_tokens_stream_in_int8_than_plain_ones() -> None:
    x, ids, _, w = made(41, WEIGHTS["int4"], embed=2048)
    both = in_both_forms(x, w)
    found = choose_streaming(both, ids, w, target=HOPPER)
    assert isinstance(found, Config)
    assert (found.gate_up.tokens, found.down.tokens) == (32, 32)
    assert not isinstance(choose_streaming(x, ids, w, target=HOPPER), Config)


@pytest.mark.parametrize(("name", "tokens", "embed", "expected"), [
    ("int4", 8, 256, None), ("int4", 9, 256, jnp.int8), ("int4", 48, 256, jnp.int8),
    ("int4", 49, 256, None), ("int4", 72, 256, jnp.float8_e4m3fn), ("int4", 20, 320, jnp.int8),
    ("mxfp4", 8, 256, None), ("mxfp4", 9, 256, jnp.int8), ("mxfp4", 26, 320, jnp.int8),
    ("mxfp4", 27, 256, jnp.float8_e4m3fn), ("int4-g64", 20, 256, None), ("fp8", 20, 256, None),
])  # fmt: skip
def test_which_experts_read_int8_tokens(name: str, tokens: int, embed: int, expected: Any) -> None:
    """Of int4 in groups of 128 and of MXFP4, those of more than 8 tokens, and of at most 16 for
    each expert (int4), or fewer than 9 (MXFP4)."""
    x, _, _, w = made(tokens, WEIGHTS[name], embed=embed)
    form = token_format(x, K, w, target=HOPPER)
    assert (form.dtype if form else None) == expected
    if expected == jnp.int8:
        assert token_format(x, K, w, target=Target.for_gpu(89)) is None


def test_experts_of_fewer_tokens_read_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "INT8_ABOVE", 5)
    for tokens, expected in ((15, None), (16, jnp.int8)):
        x, _, _, w = made(tokens, WEIGHTS["int4"])
        form = token_format(x, K, w, target=HOPPER)
        assert (form.dtype if form else None) == expected


def test_few_tokens_are_scored_in_their_norms_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "INT8_ABOVE", 0)
    for tokens in (8, 9):
        x, _, _, w = made(tokens, WEIGHTS["int4"])
        assert (token_format(x, K, w, target=PDL) is not None) == (tokens > 8)


@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_blocks_of_mxfp4_far_below_their_rows_largest(tokens: int) -> None:
    """Values become multiples of a 16th of the largest block's power: exactly, if their block has
    at least an eighth of it. A block of 2^-8 of it counts as zero."""
    x, ids, weights, w = made(20, WEIGHTS["mxfp4"], embed=384, width=192)
    lower = jnp.asarray([0, 1, 3, 4, 5, 6, 7, 8, 9, 60, 2, 0], jnp.int32)

    def spread(weight: Any) -> Any:
        codes = layout.unpack_blocks(weight.packed)
        return pack_mxfp4(codes, jnp.broadcast_to(125 - lower, (*codes.shape[:-1], 12)))

    w = w._replace(gate_up=spread(w.gate_up))
    launch = Launch(rows=128, tokens=tokens, depth=128, num_stages=3)
    own = Config(gate_up=launch, down=Launch(rows=128, tokens=16), parts=True)
    found = triton_streaming.experts(in_both_forms(x, w), ids, weights, w, "silu", own, target=PDL)
    exact = w.gate_up.dequantize()
    step = 2.0 ** (125 - 127 - 4)
    rounded = jnp.round(exact / step) * step
    assert bool(jnp.all(jnp.where(jnp.repeat(lower, 32) <= 3, rounded == exact, True)))
    wanted = of_rounded(x, ids, weights, w._replace(gate_up=Dequantized(rounded)))
    assert relative_error(summed(found), wanted) < 1e-3
