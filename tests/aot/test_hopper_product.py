"""The gated product for Hopper, as ptxas makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve_kernels.target import Target
from tests.aot.ptx import check_registers_and_memory, compile_kernel, tma_blocks


@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [(2048, 9728, 2560), (512, 9728, 2560), (384, 9728, 2560), (1000, 128, 64)],
)
def test_the_program_fits_and_its_products_do_not_wait(
    tokens: int, n: int, k: int, tmp_path: Path
) -> None:
    from jaxserve_kernels.dense_matmul.hopper import COLUMNS, DEPTH, TOKENS, _program, divide

    tiles = -(-tokens // TOKENS) * (n // COLUMNS)
    whole, pieces = divide(tiles, min(tiles, 132))
    types = {
        "x": tma_blocks(TOKENS, DEPTH),
        "w": tma_blocks(COLUMNS, DEPTH),
        "w_piece": tma_blocks(COLUMNS // pieces, DEPTH),
        "out_ptr": "*bf16",
    }
    constants = {
        "whole": whole, "pieces": pieces, "tokens": tokens, "n": n, "k": k, "GATED": 1,
    }  # fmt: skip
    kernel = compile_kernel(_program, types, constants)
    check_registers_and_memory(kernel, tmp_path)
    assert kernel.metadata.num_warps == 12  # two warpgroups, and one for the producer's warp


@pytest.mark.parametrize(
    ("tokens", "waves"),
    [(384, 2), (512, 2.5), (768, 3.5), (1024, 5), (1536, 7), (2048, 9.5), (4096, 18.5)],
)
def test_the_last_wave_is_short_where_few_tiles_are_left(tokens: int, waves: float) -> None:
    """Of 76 tiles for each 128 tokens, as Qwen3-4B has."""
    from jaxserve_kernels.dense_matmul.hopper import divide

    tiles = tokens // 128 * 76
    programs = min(tiles, 132)
    whole, pieces = divide(tiles, programs)
    rest = tiles - whole
    assert rest * pieces <= programs
    assert whole / programs + (1 / pieces if rest else 0) == waves


@pytest.mark.parametrize("tokens", [384, 256])
def test_weights_without_a_kernel_of_their_own_take_it_too(tokens: int) -> None:
    """Groups of 256 are dequantised; from 384 tokens on this product reads what that gives."""
    pytest.importorskip("jax_triton", reason="jax-triton is not installed")
    from functools import partial

    import jax
    import jax.numpy as jnp

    from jaxserve_kernels import weights
    from jaxserve_kernels.matmul import gated_linear

    plain = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    weight = jax.eval_shape(lambda w: weights.quantize_int4(w, group=256), plain)
    x = jax.ShapeDtypeStruct((tokens, 256), jnp.bfloat16)
    traced = str(jax.make_jaxpr(partial(gated_linear, target=Target.for_gpu(90)))(x, weight))
    assert ("gated_linear_hopper" in traced) == (tokens == 384)
