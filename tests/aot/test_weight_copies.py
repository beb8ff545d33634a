"""No layer of a step copies its weights, as compiled for an H100 without one."""

from __future__ import annotations

import pytest

from tests.aot.compiled_steps import inspect


@pytest.mark.parametrize(("model", "weights", "most"), [
    ("gpt-oss-20b", "mxfp4", 5 + 3),  # norms, biases and sinks; a prompt's last layer
    ("qwen3.5-35b-a3b", "fp8", 4 + 3),  # the rule's vectors and routers; first and last layers
])  # fmt: skip
def test_weights_that_xla_would_copy_in_each_layer_are_copied_once(
    model: str, weights: str, most: int
) -> None:
    """Of six layers, each of which had five and four. XLA gives a slice of a stack to a kernel only
    at a multiple of 256 bytes, and pads a product's rows to a multiple of eight."""
    flags = ("--model", model, "--quantization", weights, "--layers", "6")
    reports = inspect(*flags, "--decode", "256", "--prefill", "512")
    assert len(reports) == 2
    for name, report in reports.items():
        assert report["weight_copies"] <= most, name
