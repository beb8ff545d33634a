"""The KV formats' kernels for any heads on the emulator against their references."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve_kernels.kv_format import KVFormat, attend, chunks, end_step, named
from jaxserve_kernels.kv_format.eight_bit import triton as eight_bit
from jaxserve_kernels.kv_format.kvarn import KVarN
from jaxserve_kernels.kv_format.kvarn import triton as kvarn
from jaxserve_kernels.target import REFERENCE
from tests.emulator.targets import gpu
from tests.kernels.kv_steps import EPS, LAYER, Sequences, without_what_is_behind

GROUP = 16
DECODE = ((33, 0, 15, 47), (1, 1, 1, 1), 1)
"""Two of four tokens fill a page, one of them its sequence's first."""
PREFILL = ((18, 0, 31), (20, 33, 1), 16)
"""Chunks that begin and end inside pages and cross several; beside them a token that fills one."""


@pytest.fixture(autouse=True)
def small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run one after the other: as few as share the pages of a step, and no more places
    than its chunks see."""
    monkeypatch.setattr(chunks, "programs", lambda kv_heads, target: 4 // kv_heads)
    monkeypatch.setattr(chunks, "LEAST", 128)


EIGHT_BIT = (named("int8"), named("fp8_e4m3"))
KVARN = tuple(KVarN(value_bits=bits, group=GROUP) for bits in (4, 2))


@pytest.mark.parametrize("work", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("kv_format", "capability", "window"),
    [
        *((each, 90, None) for each in (*EIGHT_BIT, *KVARN)),
        (named("fp8_e4m3"), 80, None),
        *((each, 90, 11) for each in EIGHT_BIT),
        (named("fp8_e4m3"), 80, 20),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_attention_and_what_it_leaves(
    kv_format: KVFormat, capability: int, window: int | None, work: tuple[Any, ...]
) -> None:
    """Kernels for any heads: those that compute their inputs are in Gluon. GPUs before 8.9 have no
    instruction that makes e4m3."""
    starts, counts, tile_size = work
    ends = tuple(start + count for start, count in zip(starts, counts, strict=True))
    sequences = Sequences(lengths=ends, page_size=GROUP, head_dim=32)
    kv = kv_format.allocate(sequences.shape, jnp.float32)

    def reference(kv: Any, step: Any, tile_size: int) -> Any:
        qkv, tables = sequences.projections(step)
        call = partial(
            attend,
            layer=LAYER,
            eps=EPS,
            tile_size=tile_size,
            dtype=sequences.dtype,
            window=window,
            target=REFERENCE,
        )
        return jax.jit(
            lambda qkv, kv, tables, step: call(
                qkv, kv, heads=sequences.heads, tables=tables, step=step
            )
        )(qkv, kv, tables, step)

    _, kv = reference(kv, sequences.step((0,) * len(starts), starts, 8), 8)
    step = sequences.step(starts, counts, tile_size, padding=2, apart=tile_size > 1)
    expected, left = reference(kv, step, tile_size)
    qkv, tables = sequences.projections(step)
    if window is not None:
        kv, step = without_what_is_behind(kv, step, starts, window, GROUP)
    kernels: Any = kvarn
    if kv_format in EIGHT_BIT:
        kernels = SimpleNamespace(attend=partial(eight_bit.attend, window=window))
    target = gpu(capability)
    out, kv = kernels.attend(
        qkv,
        kv,
        LAYER,
        sequences.heads,
        tables,
        step,
        eps=EPS,
        tile_size=tile_size,
        dtype=sequences.dtype,
        target=target,
    )
    kv = end_step(kv, step, tile_size=tile_size, target=target)
    count = sum(counts)
    # A scale may round to the other float16 neighbour.
    assert np.abs(np.asarray(out[:count]) - np.asarray(expected[:count])).max() < 1e-3
    for got, wanted in zip(kv, left, strict=True):
        # Page 0 and the padding slot may hold anything.
        padding = -1 if got.ndim == 7 else 0
        got, wanted = (np.delete(np.asarray(x[LAYER]), padding, axis=0) for x in (got, wanted))
        if window is not None and len(got) == sequences.num_pages - 1:
            got, wanted = got[:-1], wanted[:-1]  # without the page that belongs to nobody
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5)
