"""Kernels of a chain have all their loads under way before they wait for the first, as ptxas makes
them: see `jaxserve_kernels.triton_loads`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.aot.compiled_steps import missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)

from jaxserve_kernels import pdl, ptxas
from jaxserve_kernels.add_rms_norm import add_rms_norm
from jaxserve_kernels.gated_delta_rule import (
    Heads,
    RuleConfig,
    RuleTokens,
    RuleWeights,
    gated_delta_rule,
)
from jaxserve_kernels.pdl import plan
from jaxserve_kernels.pdl.describe import describe
from jaxserve_kernels.recurrent_state import RecurrentStep, Rows
from jaxserve_kernels.target import Target
from tests.aot.ptx import disassembled

TARGET = Target.for_gpu(90)
HEADS = Heads(key_heads=16, value_heads=48, key_dim=128, value_dim=128)
"""Of Qwen3.5-27B."""


def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def launches(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The kernels of a chain, by name."""
    traced = jax.jit(lambda *args: pdl.call(function, *args, target=TARGET)).trace(*args)
    (chain,) = traced.jaxpr.eqns
    found = [describe(each.equation) for each in plan.make(chain.params["jaxpr"]).calls]
    return {each.code.name: each.code for each in found}


def loads(code: Any, folder: Path) -> tuple[int, int]:
    """Loads after the wait for earlier kernels: those before the first number is used, and all."""
    (folder / "kernel.cubin").write_bytes(ptxas.assemble(code.ptx, 90) or b"")
    _, after = disassembled(folder).split("ACQBULK", 1)
    used = re.search(r"\b(FADD|FMUL|FFMA|SHFL)", after)
    assert used
    return len(re.findall(r"\bLDG", after[: used.start()])), len(re.findall(r"\bLDG", after))


@pytest.mark.parametrize(("embed", "parts"), [(2048, 9), (2560, 8), (5120, 4)])
def test_the_norm_adds_parts_when_all_are_under_way(embed: int, parts: int, tmp_path: Path) -> None:
    def call(*args: Any, target: Target) -> Any:
        return add_rms_norm(*args, 1e-6, target=target)

    given = array(1, embed), array(parts, 1, embed, dtype=jnp.float32), array(embed)
    code = launches(call, *given)["_add_rms_norm"]
    first, every = loads(code, tmp_path)
    assert first == every > parts
    # A cluster's programs exchange their sums without a fence, which waits for all stores.
    assert not re.search(r"MEMBAR|ERRBAR", disassembled(tmp_path))


def test_the_delta_rule_and_its_norm(tmp_path: Path) -> None:
    """Few loads: numbers beside each other are read at once."""
    rows = 2
    numbers = array(rows, dtype=jnp.int32)
    step = RecurrentStep(numbers, numbers, Rows(numbers, numbers, numbers, numbers))
    tokens = RuleTokens(
        qkv=array(rows, 2 * HEADS.keys + HEADS.values),
        gates=array(20, rows, 2 * HEADS.value_heads, dtype=jnp.float32),
        projected=array(2, rows, 2 * HEADS.keys + 2 * HEADS.values, dtype=jnp.float32),
    )
    gates = array(HEADS.value_heads, dtype=jnp.float32)
    weights = RuleWeights(a_log=gates, dt_bias=gates, norm=array(HEADS.value_dim))
    state = array(2, 5, HEADS.value_heads, 128, 128, dtype=jnp.float32)

    def call(*args: Any, target: Target) -> Any:
        *before, step = args
        config = RuleConfig(heads=HEADS, block=64, eps=1e-6)
        return gated_delta_rule(*before, 1, step, config=config, target=target)

    codes = launches(call, tokens, weights, state, step)
    assert loads(codes["_rule_kernel"], tmp_path) == (4, 4)  # q and k, v, both gates
    assert loads(codes["_norm"], tmp_path) == (5, 5)  # x, and two parts of z in two pieces
