"""A candidate's kernels, for few tokens' router and experts, as ptxas makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.aot.compiled_steps import missing

if lacking := missing():
    pytest.skip(f"missing: {', '.join(lacking)}", allow_module_level=True)

from jaxserve_kernels import pdl, ptxas
from jaxserve_kernels.pdl import plan
from jaxserve_kernels.pdl.describe import describe
from jaxserve_kernels.target import Target
from lab.studies import few_tokens
from tests.aot.test_expert_launches import GPT_OSS, QWEN, abstract, mixture
from tests.aot.test_few_tokens import disassembled


@pytest.mark.parametrize(("sizes", "name", "tokens"), [
    (QWEN, "bf16", 1), (QWEN, "bf16", 8), (QWEN, "int4", 1), (QWEN, "int4", 8), (QWEN, "fp8", 1),
    (QWEN, "fp8", 8), (QWEN, "mxfp4", 4), (GPT_OSS, "mxfp4", 1), (GPT_OSS, "mxfp4", 8),
    (GPT_OSS, "bf16", 2),
])  # fmt: skip
def test_three_kernels_of_which_the_last_reads_early(
    sizes: Any, name: str, tokens: int, tmp_path: Path
) -> None:
    """Down finds its expert and asks for the weights before it waits: of one token, a warp for
    itself."""
    oss = sizes == GPT_OSS
    routing, w = mixture(sizes, name, biases=oss)
    embed = sizes[2]

    def call(x: Any, parts: Any, norm: Any, router: Any, w: Any, bias: Any, *, target: Any) -> Any:
        x, *own = few_tokens.norm_and_score(
            x, parts, norm, 1e-6, router, bias=norm if oss else None, target=target
        )
        activation = "swiglu_oss" if oss else "silu"
        return x, few_tokens.experts(*own, routing, w, activation, bias=bias, target=target)

    args = (
        abstract((tokens, embed)), abstract((8, tokens, embed), jnp.float32), abstract((embed,)),
        abstract((routing.num_experts, embed)), w,
        abstract((routing.num_experts,)) if oss else None,
    )  # fmt: skip
    target = Target.for_gpu(90)
    traced = jax.jit(lambda *args: pdl.call(call, *args, target=target)).trace(*args)
    (chain,) = traced.jaxpr.eqns
    launches = [describe(each.equation) for each in plan.make(chain.params["jaxpr"]).calls]
    assert [each.code.name for each in launches] == ["_norm_and_score", "_gate_up", "_down"]
    cubins = [ptxas.assemble(each.code.ptx, 90) for each in launches]
    assert all(cubins)
    (tmp_path / "kernel.cubin").write_bytes(cubins[-1] or b"")
    before, after = disassembled(tmp_path).split("ACQBULK", 1)
    assert "LDGSTS" in before and "REDUX" in before and "LDGSTS" in after
    assert tokens > 1 or "SHFL" not in before
