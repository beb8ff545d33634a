"""KVarN's sinks and tails are written in place after others have read them, in one mixed step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton", reason="jax-triton is not installed")

from jaxserve_kernels.kv_format import named
from jaxserve_kernels.kv_format.kvarn import KVarNKV, triton
from jaxserve_kernels.target import Target
from tests.kernels.kv_steps import EPS, Sequences


def test_whoever_reads_sinks_and_tails_before_the_write_returns_them() -> None:
    """Else nothing in the data says that the reads come first, and XLA may copy all sinks and tails
    in each layer: it did in a step of six layers, not in one of two."""
    sequences = Sequences(lengths=(300, 40), page_size=128, head_dim=64, dtype="bfloat16")
    step = sequences.step((200, 39), (100, 1), 32, apart=True)
    qkv, tables = sequences.projections(step)
    kv = named("kvarn_k4v2_g128").abstract(sequences.shape, jnp.bfloat16)

    def layer(kv: KVarNKV) -> tuple[jax.Array, KVarNKV]:
        return triton.attend(
            qkv,
            kv,
            0,
            sequences.heads,
            tables,
            step,
            eps=EPS,
            tile_size=32,
            dtype=sequences.dtype,
            target=Target.for_gpu(90),
        )

    program = jax.make_jaxpr(layer)(kv).jaxpr
    readers = [
        (eqn.primitive.name, eqn.params.get("name", ""))
        for eqn in program.eqns
        for value in eqn.invars
        if getattr(value.aval, "shape", None) == kv.raw.shape
        and "Ref" not in type(value.aval).__name__
    ]
    writers_in_turn = [("new_ref", "")] * 3  # encoding, expansion, the write
    assert readers == [
        *writers_in_turn,
        ("triton_kernel_call", "paged_attention_kvarn_decode_rows"),
    ]
