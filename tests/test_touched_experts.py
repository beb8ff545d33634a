"""The floor of a model with experts counts those that the timed rows had."""

from __future__ import annotations

import pytest

from jaxserve.layer_spec import ExpertsSpec
from scripts.decode_steps import decode_plans, weight_bytes
from scripts.touched_experts import touched_experts
from tests.tiny_model import make_config, make_params, tiny_spec

EXPERTS, K, WIDTH, EMBED, LAYERS, WARM = 16, 2, 24, 32, 2, 1
SPEC = tiny_spec(
    ffn=ExpertsSpec(num_experts=EXPERTS, top_k=K, width=WIDTH, normalize=True),
    embed=EMBED,
    num_layers=LAYERS,
)


@pytest.mark.slow
def test_experts_of_rows_are_counted_as_they_run() -> None:
    """Greedy rows are alike in an empty cache; with a temperature each has experts of its own."""
    config = make_config(spec=SPEC, decode=(4,), prefill=(8,))
    runs = [decode_plans(config, 4, 4, WARM + 2, temperature) for temperature in (0.0, 1.0)]
    alike, differing = touched_experts(config, make_params(SPEC), runs, WARM)
    assert alike == K
    assert K < differing <= 4 * K


def test_an_expert_more_is_its_bytes_in_each_layer() -> None:
    params = make_params(SPEC)
    counts = [weight_bytes(params, SPEC, 4, touched) for touched in (EXPERTS - 1, EXPERTS)]
    assert counts[1] - counts[0] == LAYERS * 3 * WIDTH * EMBED * 4
    assert weight_bytes(params, SPEC, 1) == weight_bytes(params, SPEC, 1, K)
