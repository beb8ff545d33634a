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


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "name", "tokens"), [
    (QWEN, "bf16", 1), (QWEN, "int4", 8), (QWEN, "fp8", 8), (GPT_OSS, "mxfp4", 1),
])  # fmt: skip
def test_three_kernels_of_which_the_last_reads_early(
    sizes: Any, name: str, tokens: int, tmp_path: Path
) -> None:
    """Down finds its expert, a warp for itself, and asks for the weights before it waits."""
    routing, w = mixture(sizes, name, biases=False)
    embed = sizes[2]

    def call(x: Any, parts: Any, norm: Any, router: Any, w: Any, *, target: Target) -> Any:
        x, *own = few_tokens.norm_and_score(x, parts, norm, 1e-6, router, target=target)
        return x, few_tokens.experts(*own, routing, w, "silu", target=target)

    args = (
        abstract((tokens, embed)), abstract((8, tokens, embed), jnp.float32), abstract((embed,)),
        abstract((routing.num_experts, embed)), w,
    )  # fmt: skip
    target = Target.for_gpu(90)
    traced = jax.jit(lambda *args: pdl.call(call, *args, target=target)).trace(*args)
    (chain,) = traced.jaxpr.eqns
    launches = [describe(each.equation) for each in plan.make(chain.params["jaxpr"]).calls]
    assert [each.code.name for each in launches] == ["_norm_and_score", "_gate_up", "_down"]
    cubin = ptxas.assemble(launches[-1].code.ptx, 90)
    assert cubin is not None
    (tmp_path / "kernel.cubin").write_bytes(cubin)
    before, after = disassembled(tmp_path).split("ACQBULK", 1)
    assert "LDGSTS" in before and "REDUX" in before and "SHFL" not in before
    assert "LDGSTS" in after
