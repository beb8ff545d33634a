"""Kernels of few tokens' router and experts, as ptxas makes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.aot.compiled_steps import missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)

from jaxserve_kernels import pdl, ptxas
from jaxserve_kernels.experts import (
    ExpertWeights,
    Routing,
    config,
    norm_and_score,
    routed_experts,
    token_format,
)
from jaxserve_kernels.pdl import plan
from jaxserve_kernels.pdl.describe import describe
from jaxserve_kernels.target import Target
from tests.aot.ptx import disassembled
from tests.aot.test_expert_launches import FORMATS, GPT_OSS, QWEN, abstract, mixture

QWEN_3_5 = (256, 8, 2048, 512)
"""Of Qwen3.5-35B-A3B, with a shared expert."""
TARGET = Target.for_gpu(90)
UNCHECKED = TARGET.replace(checked=False)
"""Kernels that do not compile are an error."""


def launches_of(sizes: Any, name: str, tokens: int, target: Target = TARGET) -> Any:
    """A layer's router and experts as a chain."""
    count, _, embed, width = sizes
    oss = sizes == GPT_OSS
    routing, w = mixture(sizes, name, biases=oss)
    shared = None
    if sizes == QWEN_3_5:
        one = (abstract((2 * width, embed)), abstract((embed, width)))
        shared = ExpertWeights(*(jax.eval_shape(FORMATS[name], each) for each in one))
    args = (
        abstract((tokens, embed)), abstract((8, tokens, embed), jnp.float32), abstract((embed,)),
        abstract((count + (shared is not None), embed)), w, abstract((count,)) if oss else None,
        shared,
    )  # fmt: skip

    def call(*args: Any, target: Target) -> Any:
        return layer(routing, *args, oss=oss, target=target)

    traced = jax.jit(lambda *args: pdl.call(call, *args, target=target)).trace(*args)
    (chain,) = traced.jaxpr.eqns
    return [describe(each.equation) for each in plan.make(chain.params["jaxpr"]).calls]


def layer(
    routing: Routing, x: Any, parts: Any, norm: Any, router: Any, w: Any, bias: Any, shared: Any,
    *, oss: bool, target: Target,
) -> Any:  # fmt: skip
    form = token_format(x, routing.top_k, w, target=target)
    given = x, parts, norm, 1e-6, router
    x, *own = norm_and_score(*given, bias=norm if oss else None, form=form, target=target)
    activation = "swiglu_oss" if oss else "silu"
    normed, scores = own
    return x, routed_experts(
        *(normed, scores, routing, w),
        bias=bias, shared=shared, activation=activation, target=target,
    )  # fmt: skip


@pytest.mark.parametrize(("sizes", "name", "tokens"), [
    (QWEN, "bf16", 1), (QWEN, "int4", 2), (QWEN, "fp8", 1), (GPT_OSS, "mxfp4", 1),
    (GPT_OSS, "mxfp4", 2), (GPT_OSS, "bf16", 2), (QWEN_3_5, "bf16", 1), (QWEN_3_5, "fp8", 1),
])  # fmt: skip
def test_three_kernels_of_which_the_last_reads_early(
    sizes: Any, name: str, tokens: int, tmp_path: Path
) -> None:
    """Down finds its expert and asks for the weights before it waits: of one token, a warp for
    itself. Rings leave room for another program."""
    found = launches_of(sizes, name, tokens)
    assert [each.code.name for each in found] == ["_norm_and_score", "_gate_up", "_down"]
    cubins = [ptxas.assemble(each.code.ptx, 90) for each in found]
    assert all(cubins)
    for each in found[1:]:
        assert 2 * (each.code.shared_bytes + 1024) <= TARGET.gpu.shared_memory
    for cubin in cubins[1:]:
        (tmp_path / "kernel.cubin").write_bytes(cubin or b"")
        before, after = disassembled(tmp_path).split("ACQBULK", 1)
        assert "LDGSTS.E.BYPASS.128" in after
        assert len(re.findall(r"\bSTL\b", before + after)) <= 2, "registers are spilled"
    assert "LDGSTS.E.BYPASS.128" in before and "REDUX" in before
    assert tokens > 1 or sizes == QWEN_3_5 or "SHFL" not in before


@pytest.mark.parametrize("tokens", [2, 8, 64])
def test_a_shared_expert_takes_no_kernels_of_its_own(tokens: int) -> None:
    """Already with two tokens, each program would look at 512 scores."""
    found = [each.code.name for each in launches_of(QWEN_3_5, "fp8", tokens)]
    before = ["_norm_and_score", "_route"]
    if tokens == 64:
        before = ["_add_rms_norm", "_linear", "_route", "_order"]
    assert found == [*before, "_product", "_product"]


@pytest.mark.parametrize(("name", "sizes", "tokens", "programs", "tile"), [
    ("int4", (128, *QWEN[1:]), 64, 3, 8), ("int4", (32, *QWEN[1:]), 32, 3, 16),
    ("int4", (32, *QWEN[1:]), 64, 2, 32), ("mxfp4", GPT_OSS, 32, 3, 8),
    ("mxfp4", GPT_OSS, 64, 3, 16), ("mxfp4", (16, *GPT_OSS[1:]), 64, 2, 32),
])  # fmt: skip
def test_gate_and_up_of_int8_tokens_convert_no_codes_to_bfloat16(
    name: str, sizes: Any, tokens: int, programs: int, tile: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In tiles of every size, whose programs fit a multiprocessor. The router reads plain
    tokens."""
    monkeypatch.setattr(config, "INT8_ABOVE", 0)
    *before, gate_up, _ = launches_of(sizes, name, tokens, UNCHECKED)
    names = [each.code.name for each in before]
    assert names == ["_also_quantizing", "_linear", "_route", "_order"]
    assert programs * (gate_up.code.shared_bytes + 1024) <= TARGET.gpu.shared_memory
    cubin = ptxas.assemble(gate_up.code.ptx, 90)
    assert cubin
    (tmp_path / "kernel.cubin").write_bytes(cubin)
    code = disassembled(tmp_path)
    assert not re.search(r"\bSTL\b", code), "registers are spilled"
    assert len(re.findall("IGMMA" if tile == 32 else "IMMA", code)) >= 8
    assert not re.search(r"HFMA2|HMMA|HGMMA", code.split("ACQBULK", 1)[1].split("F2FP", 1)[0])


def test_a_shared_expert_reads_the_experts_int8_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "INT8_ABOVE", 0)
    found = [each.code.name for each in launches_of(QWEN_3_5, "int4", 32, UNCHECKED)]
    before = ["_also_quantizing", "_linear", "_route", "_order"]
    assert found == [*before, "_product", "_product"]


@pytest.mark.parametrize("name", ["int4", "mxfp4", "fp8"])
@pytest.mark.parametrize("sizes", [(16, 4, 384, 256), (16, 4, 512, 128)])
def test_streaming_kernels_of_few_inputs_compile(sizes: Any, name: str) -> None:
    """Their rings have no more slots than there are inputs to fill them."""
    kernels = [each.code.name for each in launches_of(sizes, name, 20, target=UNCHECKED)]
    assert kernels[-2:] == ["_product", "_product"]
