"""The Triton kernels of the KV formats against their references, on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve_kernels import target
from jaxserve_kernels.kv_format import attend, named
from tests.kernels.kv_steps import EPS, LAYER, Sequences

pytestmark = pytest.mark.gpu

DECODE = ((0, 1, 62, 63, 64, 65, 127, 128, 500, 1300), (1,) * 10, 1)
PREFILL = ((0, 0, 64, 100, 127, 700), (3, 300, 64, 29, 2, 150), 32)


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    a, b = (np.asarray(x, np.float64) for x in (out, expected))
    assert np.isfinite(a).all()
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 2, 64), (40, 8, 128)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("work", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "kvarn_k4v4_g128", "kvarn_k4v2_g128"])
def test_attention_equals_its_reference(
    name: str, work: tuple[Any, ...], dtype: str, heads: tuple[int, int, int]
) -> None:
    starts, counts, tile_size = work
    q_heads, kv_heads, head_dim = heads
    ends = tuple(start + count for start, count in zip(starts, counts, strict=True))
    sequences = Sequences(
        lengths=ends, page_size=named(name).page_size or 64, dtype=dtype,
        q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
    )  # fmt: skip
    kv = named(name).allocate(sequences.shape, dtype)

    def run(implementation: target.Implementation, kv: Any, step: Any, tile_size: int) -> Any:
        qkv, tables = sequences.projections(step, parts=1 if tile_size > 1 else 4)
        call = functools.partial(attend, layer=LAYER, eps=EPS, tile_size=tile_size)
        with (
            target.use(target.Target(implementation)),
            jax.default_matmul_precision("highest"),
        ):
            return jax.jit(
                lambda qkv, kv, tables, step: call(
                    qkv, kv, norms=sequences.norms, tables=tables, step=step
                )
            )(qkv, kv, tables, step)

    if any(starts):
        _, kv = run("reference", kv, sequences.step((0,) * len(starts), starts, 32), 32)
    step = sequences.step(starts, counts, tile_size)
    expected, _ = run("reference", kv, step, tile_size)
    out, _ = run("triton", kv, step, tile_size)
    # The bf16 result is rounded to 8 bits (2e-3), so are probabilities, and so may be the step's
    # own keys and values to their neighbours.
    count = sum(counts)
    error = relative_error(out[:count], expected[:count])
    assert error < (1e-2 if dtype == "bfloat16" else 2e-3), f"{name}: {error:.2e}"
