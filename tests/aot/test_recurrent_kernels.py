"""The kernels of recurrent layers, compiled for each kind of GPU without one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve_kernels import ptxas
from jaxserve_kernels.causal_conv import Operands, conv_and_gates, convolve, keep_inputs
from jaxserve_kernels.gated_delta_rule import (
    Heads,
    RuleConfig,
    RuleTokens,
    RuleWeights,
    advance_state,
    gated_delta_rule,
    rule_outputs,
)
from jaxserve_kernels.recurrent_state import Chunks, Kept, RecurrentStep, Rows
from jaxserve_kernels.target import Target
from tests.aot.compiled_steps import missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)

LAYERS, SLOTS, BF16 = 48, 65, jnp.bfloat16
LAYER = 1
"""Triton makes a constant of 1, which other numbers are not."""
VALUE_HEADS = {"qwen3.5-27b": 48, "qwen3.5-35b-a3b": 32}
EMBED = {"qwen3.5-27b": 5120, "qwen3.5-35b-a3b": 2048}
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}
"""Bytes that a program may have."""
SPILLED = {80: 276, 90: 128, 100: 128}
"""Bytes of a thread that may leave the registers, outside of decode steps."""


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(count: int) -> Any:
    return array(count, dtype=jnp.int32)


def compiled(function: Any, *args: Any) -> list[ptxas.Code]:
    """The kernels that the function calls."""
    from jaxserve_kernels.pdl.describe import describe

    program = jax.make_jaxpr(function)(*args).jaxpr
    calls = [each for each in program.eqns if each.primitive.name == "triton_kernel_call"]
    return [describe(call).code for call in calls]


def check(code: ptxas.Code, folder: Path, most: int) -> None:
    """It fits the card, and spills no more than so many bytes."""
    assert code.shared_bytes <= SHARED[code.compute_capability], code.name
    (folder / "kernel.ptx").write_text(code.ptx)
    feature = "a" if code.compute_capability >= 90 else ""
    command = [str(ptxas.path()), "-v", f"-arch=sm_{code.compute_capability}{feature}"]
    command += ["kernel.ptx", "-o", "kernel.cubin"]
    report = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
    stores = [int(each) for each in re.findall(r"(\d+) bytes spill stores", report)]
    assert stores and max(stores) <= most, report
    assert "wgmma" not in report, report


@pytest.mark.parametrize(
    ("capability", "model"),
    [(80, "qwen3.5-27b"), (90, "qwen3.5-27b"), (90, "qwen3.5-35b-a3b"), (100, "qwen3.5-27b")],
)
@pytest.mark.parametrize(
    ("tokens", "decode"),
    [(8, True), (64, True), (512, False)],
    ids=["decode", "many_rows", "prompt"],
)
def test_recurrent_layers_compile(
    capability: int, model: str, tokens: int, decode: bool, tmp_path: Path
) -> None:
    pdl = decode and capability == 90
    target = Target.for_gpu(capability).replace(checked=False, pdl=pdl)
    heads = Heads(key_heads=16, value_heads=VALUE_HEADS[model], key_dim=128, value_dim=128)
    config = RuleConfig(heads=heads, block=64, eps=1e-6)
    rows, few = ints(tokens if decode else 8), ints(tokens // 64)
    blocks = () if decode else (rows, Chunks(few, few, few, few, Kept(few, few)))
    step = RecurrentStep(ints(tokens), ints(tokens), Rows(rows, rows, rows, rows, *blocks))
    channels = 2 * heads.keys + heads.values

    def layer(
        x: Any, projected: Any, gates: Any, conv: Any, weights: Any, states: Any, step: Any
    ) -> Any:
        operands = Operands(x, projected, gates, conv, states[0], step)
        mixed, gates, kept = conv_and_gates(operands, LAYER, target=target)
        tokens = RuleTokens(mixed, gates, projected)
        out, state = gated_delta_rule(
            tokens, weights, states[1], LAYER, step, config=config, target=target
        )
        return out, kept, state

    codes = compiled(
        layer, array(tokens, EMBED[model], dtype=BF16), array(4, tokens, channels + heads.values),
        array(2 * heads.value_heads, EMBED[model], dtype=BF16), array(channels, 4, dtype=BF16),
        RuleWeights(array(heads.value_heads), array(heads.value_heads), array(128, dtype=BF16)),
        (array(LAYERS, SLOTS, 3, channels, dtype=BF16), array(LAYERS, SLOTS, *heads[1:])),
        step,
    )  # fmt: skip
    assert len(codes) == (3 if decode else 6)
    for code in codes:
        check(code, tmp_path, 0 if decode else SPILLED[capability])


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_steps_with_drafts_compile(capability: int, tmp_path: Path) -> None:
    """Outputs first, and the state when it is known which tokens count."""
    target = Target.for_gpu(capability).replace(checked=False)
    heads = Heads(key_heads=16, value_heads=48, key_dim=128, value_dim=128)
    config = RuleConfig(heads=heads, block=64, eps=1e-6)
    step = RecurrentStep(ints(64), ints(64), Rows(ints(8), ints(8), ints(8), ints(8)))
    channels = 2 * heads.keys + heads.values

    def layer(projected: Any, gates: Any, conv: Any, weights: Any, states: Any, step: Any) -> Any:
        mixed = convolve(projected, conv, states[0], LAYER, step, target=target)
        rest = (weights, states[1], LAYER, step)
        tokens = RuleTokens(mixed, gates[None], projected)
        out = rule_outputs(tokens, *rest, config=config, target=target)
        kept = keep_inputs(mixed, states[0], LAYER, step.rows, target=target)
        return out, kept, advance_state(mixed, gates, *rest, config=config, target=target)

    codes = compiled(
        layer, array(4, 64, channels + heads.values), array(64, 2 * heads.value_heads, dtype=BF16),
        array(channels, 4, dtype=BF16),
        RuleWeights(array(heads.value_heads), array(heads.value_heads), array(128, dtype=BF16)),
        (array(LAYERS, SLOTS, 3, channels, dtype=BF16), array(LAYERS, SLOTS, *heads[1:])),
        step,
    )  # fmt: skip
    assert len(codes) == 5
    for code in codes:
        check(code, tmp_path, SPILLED[capability])
