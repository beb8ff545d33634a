"""Products whose programs have as many k-steps each, on the emulator."""

from __future__ import annotations

import pytest
import stream_k_candidate

from jaxserve_kernels.quantized_matmul import config
from tests.emulated.errors import relative_error
from tests.emulated.weights import WEIGHTS, exact, gated_product, gating, product, tokens_and_weight
from tests.emulator.launch import triton_call
from tests.emulator.targets import gpu


@pytest.mark.parametrize("programs", [1, 2, 7])
@pytest.mark.parametrize("tokens", [20, 40])
@pytest.mark.parametrize("out", [64, 640, 1024])
@pytest.mark.parametrize("name", ["int4", "int4-g64", "int4-zeros"])
@pytest.mark.parametrize("stages", [2, 3])
def test_products(
    name: str, out: int, tokens: int, programs: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_k_candidate, "triton_call", triton_call)
    target = gpu(90, multiprocessors=programs)
    x, weight = tokens_and_weight(tokens, out, 1024, WEIGHTS[name])
    call = config.Call.of(weight, tokens, gated=False, target=target)
    assert call is not None
    chosen = config.Config(
        method="streaming", tokens=32 if tokens <= 32 else 64, num_stages=stages,
        unroll=2 if tokens <= 32 else 1,
    )  # fmt: skip
    found = product(stream_k_candidate, x, weight, chosen, target)
    assert relative_error(found, exact(x, weight)) < 1e-6
    if out > 64:
        both = gated_product(stream_k_candidate, x, weight, chosen, target=target)
        assert relative_error(both, gating(exact(x, weight))) < 1e-3
