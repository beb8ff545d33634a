"""The rule as the benchmark's candidates compute it, on the emulator, against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import recurrent_candidates
from recurrent_candidates import Tile, rule_by

from jaxserve_kernels.gated_delta_rule import Heads, RuleConfig, gated_delta_rule
from jaxserve_kernels.target import REFERENCE
from tests.emulated.errors import relative_error
from tests.emulator.launch import triton_call
from tests.emulator.targets import PDL
from tests.kernels.recurrent_cases import LAYER, decode_rows, rule_arrays

HEADS = Heads(key_heads=2, value_heads=6, key_dim=16, value_dim=64)
CONFIG = RuleConfig(heads=HEADS, block=16, eps=1e-6)


@pytest.mark.parametrize(
    "tile", [Tile(32, 4), Tile(64, 8, norm=True), Tile(32, 4, one_pass=True)], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_rows(tile: Tile, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_candidates, "triton_call", triton_call)
    mix = decode_rows(40, 0)
    tokens, weights, state = rule_arrays(HEADS, mix.tokens, dtype)
    args = (tokens, weights, state, LAYER, mix.step(16))
    out, new = rule_by(tile)(*args, config=CONFIG, target=PDL)
    expected, wanted = gated_delta_rule(*args, config=CONFIG, target=REFERENCE)
    bound = 1e-6 if dtype == "float32" else 2e-3
    assert relative_error(out[: mix.used], expected[: mix.used]) <= bound
    for slot in (0, 1, 2, 4):
        if slot in (1, 2):
            assert relative_error(new[LAYER, slot], wanted[LAYER, slot]) <= 1e-6
        else:
            np.testing.assert_array_equal(new[LAYER, slot], state[LAYER, slot])
